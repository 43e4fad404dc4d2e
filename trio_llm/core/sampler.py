"""From logits to tokens, with noise that belongs to the token and not to the batch.

A token is drawn by a race: of all candidates the one with the smallest `e / p` wins, where
p is its probability and e exponential noise.  Here e is a hash of (seed, choice, output
index, vocabulary id), so a draw depends on nothing else: not on the neighbours, the
chunking, a preemption or a draft.  That is what makes speculation exact: the target is
sampled at each drafted position with that position's own noise, and the draft is right
where it agrees.

Nothing is sorted to find a nucleus.  The race is run over the whole vocabulary, and then it
is looked whether the winner may stand: whether the tokens that are likelier than it have
less mass than top_p.  If not, it leaves together with all that are no likelier, and the
next of the race is looked at.  That is the same token as a race among the nucleus alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch import Tensor

from trio_llm.core.kernels import Kernels
from trio_llm.core.sampling_params import SamplingParams

MAX_SORTED = 1024
"""The largest top_k whose candidates are picked out; with a larger one the rest is masked."""

TILE = {"cpu": 2**18}
"""Logits that are worked on at a time: on a CPU what stays in its cache."""
LARGE_TILE = 2**24


@attrs.frozen
class Draw:
    """What one row of logits is to be sampled with."""

    params: SamplingParams
    """Resolved."""
    choice: int
    output_index: int


def sample(logits: Tensor, draws: Sequence[Draw], kernels: Kernels | None = None) -> list[int | None]:
    """Choose one token for each row.

    Args:
        logits: (rows, vocab), float32.
        draws: one for each row.
        kernels: draw with these where they can, which is quicker; now and then rounding gives another token.

    Returns:
        A token for each row; None where the largest logit is not finite: a NaN, an infinity, or nothing left to choose.
    """
    if kernels is not None:
        logits = logits.contiguous()
    best = _best(logits, kernels)
    random = [row for row, draw in enumerate(draws) if draw.params.temperature and best[row] >= 0]
    if random:
        quick = [] if kernels is None else [row for row in random if _is_plain(draws[row].params)]
        if kernels is not None and quick:
            for row, token in zip(quick, _draw_quickly(logits, draws, quick, kernels), strict=True):
                best[row] = token
            random = sorted(set(random) - set(quick))
        if random:
            for row, token in zip(random, _sample_random(logits, draws, random), strict=True):
                best[row] = token
    return [None if token < 0 else token for token in best]


def _best(logits: Tensor, kernels: Kernels | None) -> list[int]:
    """The largest logit of each row; -1 where it is not finite."""
    if kernels is not None:
        return kernels.best(logits)
    tokens = _argmax(logits)
    finite = logits.gather(-1, tokens[:, None]).isfinite().squeeze(-1)
    found: list[int] = torch.where(finite, tokens, -1).tolist()  # one wait for the device, not two
    return found


def _is_plain(params: SamplingParams) -> bool:
    return (params.top_k or 0) <= 0 and (params.typical_p or 1.0) >= 1


def _draw_quickly(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int], kernels: Kernels) -> list[int]:
    params = [draws[row].params for row in rows]
    return kernels.draw(
        logits,
        rows,
        [noise_key(draws[row]) for row in rows],
        [max(p.temperature or 0.0, 1e-30) for p in params],
        [1.0 if p.top_p is None else p.top_p for p in params],
        [p.min_p or 0.0 for p in params],
    )


def _sample_random(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[int]:
    """Draw for `rows`.  transformers' order: temperature, top_k, top_p, min_p, typical_p."""
    tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    vocab_size = logits.shape[-1]
    top_k = [k if 0 < (k := draw.params.top_k or 0) < vocab_size else 0 for draw in draws]
    few = [row for row in rows if 0 < top_k[row] <= MAX_SORTED]
    wide = [row for row in rows if row not in set(few)]
    if few:
        values, ids = logits[few].topk(max(top_k[row] for row in few) + 1)
        last = values.gather(-1, _column(values, [top_k[row] - 1 for row in few], torch.int64))
        # ties with the last of the top k stay, as in transformers; where they may reach further, all is looked at
        reaches = ((values[:, -1:] >= last) & (last > float("-inf"))).squeeze(-1).tolist()
        wide = sorted(wide + [row for row, further in zip(few, reaches, strict=True) if further])
        chosen = _race(values.masked_fill(values < last, float("-inf")), ids, [draws[row] for row in few])
        tokens[few] = ids.gather(-1, chosen[:, None]).squeeze(-1)
    ids = torch.arange(vocab_size, dtype=torch.int64, device=logits.device)[None]
    for tile in _tiles(wide, vocab_size, logits.device):
        values = logits[tile]
        for position, row in enumerate(tile):
            if top_k[row]:
                last = values[position].kthvalue(vocab_size - top_k[row] + 1).values
                values[position].masked_fill_(values[position] < last, float("-inf"))
        tokens[tile] = _race(values, ids, [draws[row] for row in tile])
    drawn: list[int] = tokens[rows].tolist()
    return drawn


def _tiles(rows: Sequence[int], vocab_size: int, device: torch.device) -> Iterator[list[int]]:
    size = max(1, TILE.get(device.type, LARGE_TILE) // vocab_size)
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])


def _race(values: Tensor, ids: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The winner of each row, as its position.

    Args:
        values: (rows, n), logits after top_k.
        ids: the vocabulary id of each, (rows, n) or (1, n).
        draws: one for each row.
    """
    # the best logit becomes 0, so that no temperature, however small, overflows to an infinity or a NaN
    temperature = _column(values, [max(draw.params.temperature or 0.0, 1e-30) for draw in draws])
    weights = (values - values.amax(-1, keepdim=True)).div_(temperature).exp_()
    race = exponential(ids, [noise_key(draw) for draw in draws]).div_(weights)
    if any(draw.params.min_p for draw in draws):
        # a division by zero takes part no more: it is infinite
        race /= _mask(torch.ge, weights, _column(weights, [draw.params.min_p or 0.0 for draw in draws]))
    share = [1.0 if draw.params.top_p is None else draw.params.top_p for draw in draws]
    order = weights
    typical = [row for row, draw in enumerate(draws) if (draw.params.typical_p or 1.0) < 1]
    if typical:
        inside = _nucleus(weights[typical], [draws[row].params for row in typical])
        order = weights.clone()
        weights[typical], order[typical] = inside, _typicality(inside)
        for row in typical:
            share[row] = draws[row].params.typical_p or 1.0

    winners = _argmin(race)
    limit = _column(weights, share) * weights.sum(-1, keepdim=True)
    splits_ties = _column(weights, [float(row not in typical) for row in range(len(draws))])
    rows = [row for row in range(len(draws)) if share[row] < 1]
    while rows:
        every = len(rows) == len(draws)  # spares a copy
        ahead = _ahead(*(x if every else x[rows] for x in (order, winners[:, None], splits_ties)))
        mass = (ahead * (weights if every else weights[rows])).sum(-1, keepdim=True)
        # whoever is the first of all stays, however small the share
        falls = ((mass >= limit[rows]) & (mass > 0)).squeeze(-1).tolist()
        fallen = [position for position, falls_out in enumerate(falls) if falls_out]
        rows = [rows[position] for position in fallen]
        race[rows] /= ahead[fallen]
        winners[rows] = _argmin(race[rows])
    return winners


def _ahead(order: Tensor, winners: Tensor, splits_ties: Tensor) -> Tensor:
    """1 for each candidate that comes before its row's winner, 0 for the others.

    Where `splits_ties` is 1, one of two equals comes before the other.
    """
    own = order.gather(-1, winners)
    ahead = _mask(torch.gt, order, own)
    ties = _mask(torch.eq, order, own)
    if bool((ties.sum(-1) > 1).any()):
        positions = torch.arange(order.shape[-1], dtype=torch.int64, device=order.device)
        ahead += ties.mul_(positions < winners).mul_(splits_ties)
    return ahead


def _nucleus(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The weights, 0 where top_p or min_p leaves a candidate out: its border is found by bisection."""
    low = torch.zeros_like(weights[:, :1])
    if any(p.top_p is not None and p.top_p < 1 for p in params):
        limit = _column(weights, [1.0 if p.top_p is None else p.top_p for p in params]) * weights.sum(-1, keepdim=True)
        high = torch.ones_like(low)
        for _ in range(32):
            middle = (low + high) / 2
            enough = (weights * _mask(torch.ge, weights, middle)).sum(-1, keepdim=True) >= limit
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    border = torch.maximum(low, _column(weights, [p.min_p or 0.0 for p in params]))
    return weights * _mask(torch.ge, weights, border)


def _typicality(weights: Tensor) -> Tensor:
    """How near each candidate's surprise is to the expected one: 0 at best, -inf for what is no candidate."""
    probabilities = weights / weights.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(probabilities).sum(-1, keepdim=True)
    return (probabilities.log() + entropy).abs_().neg_()


def _mask(compare: Callable[..., object], left: Tensor, right: Tensor) -> Tensor:
    """A comparison as 1 and 0 in `left`'s type, which on a CPU is much faster to go on with than true and false."""
    out = torch.empty_like(left)
    compare(left, right, out=out)
    return out


def _argmax(values: Tensor) -> Tensor:
    # numpy's is vectorised: a tenth of torch's time on a CPU
    return torch.from_numpy(values.numpy().argmax(-1)) if values.device.type == "cpu" else values.argmax(-1)


def _argmin(values: Tensor) -> Tensor:
    return torch.from_numpy(values.numpy().argmin(-1)) if values.device.type == "cpu" else values.argmin(-1)


def _column(like: Tensor, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]


def noise_key(draw: Draw) -> tuple[int, int]:
    """Two 32-bit words (as signed ints) from seed, choice and output index."""
    text = f"{draw.params.seed}/{draw.choice}/{draw.output_index}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def exponential(ids: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
    """Exponential noise for vocabulary ids.

    Args:
        ids: (rows, n) or (1, n), int64.
        keys: a noise key for each row.

    Returns:
        (rows, n), float32: exponentials made from a hash of id and key.
    """
    words = torch.tensor(keys, dtype=torch.int32, device=ids.device)
    bits = _mix(ids.to(torch.int32) ^ words[:, :1])
    bits ^= words[:, 1:]
    bits = _mix(bits)
    bits &= 0x7FFFFFFF
    # 31 bits, small values exact: the race is won by small exponentials
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash with low bias, in place: xor-shift and multiply, in wrapping int32.

    The constants are from Chris Wellons' public-domain "hash-prospector".
    """
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x21F0AAAD
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0xD35A2D97 - 2**32
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    return x
