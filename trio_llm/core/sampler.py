"""From logits to tokens, with noise that belongs to the token and not to the batch.

A token is drawn by a race of exponentials (the Gumbel-max trick): of all candidates the
one with the largest `logit - log(e)` wins, where e is exponential noise.  Here e is a hash of
(seed, choice, output index, vocabulary id), so a draw depends on nothing else: not on the
neighbours, the chunking, a preemption or a draft.  That is what makes speculation exact:
the target is sampled at each drafted position with that position's own noise, and the
draft is right where it agrees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from trio_llm.core.sampling_params import SamplingParams

MAX_SORTED = 1024
"""Candidates that are ever sorted.  A nucleus that is larger is found by bisection."""


@attrs.frozen
class Draw:
    """What one row of logits is to be sampled with."""

    params: SamplingParams
    """Resolved."""
    choice: int
    output_index: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose one token for each row.

    Args:
        logits: (rows, vocab), float32.
        draws: one for each row.

    Raises:
        FloatingPointError: a row has no finite logit at its top.
    """
    best, tokens = logits.max(dim=-1)
    if not bool(best.isfinite().all()):
        raise FloatingPointError("the model gave logits that are not finite")
    random = [row for row, draw in enumerate(draws) if draw.params.temperature]
    if random:
        chosen = _sample_random(logits[random], [draws[row] for row in random])
        tokens[random] = chosen
    return [int(token) for token in tokens.tolist()]


def _sample_random(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """transformers' order of warpers: temperature, top_k, top_p, min_p.  Gives (rows,) ids."""
    # the best logit becomes 0, so that no temperature, however small, overflows to an infinity or a NaN
    best = logits.max(dim=-1, keepdim=True).values
    scaled = (logits - best) / _column(logits, [max(draw.params.temperature or 0.0, 1e-30) for draw in draws])
    tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    few = [row for row, draw in enumerate(draws) if _can_sort(draw, logits.shape[-1])]
    wide = sorted(set(range(len(draws))) - set(few))
    if few:
        unfinished = _sample_sorted(scaled[few], [draws[row] for row in few], tokens, few)
        wide += unfinished
    for row in wide:  # row by row: a tile that stays in the processor's cache
        tokens[row] = _sample_wide(scaled[row], draws[row])
    return tokens


def _can_sort(draw: Draw, vocab_size: int) -> bool:
    top_k = draw.params.top_k or 0
    if 0 < top_k < vocab_size:
        return top_k <= MAX_SORTED
    return _top_p(draw) < 1


def _sample_sorted(scaled: Tensor, draws: Sequence[Draw], tokens: Tensor, rows: Sequence[int]) -> list[int]:
    """Sample among each row's first MAX_SORTED candidates, writing into `tokens` at `rows`.
    Gives the rows whose nucleus is larger than that."""
    size = min(MAX_SORTED, scaled.shape[-1])
    values, ids = scaled.topk(size, dim=-1)
    top_k = _column(scaled, [draw.params.top_k if 0 < (draw.params.top_k or 0) <= size else size for draw in draws])
    has_top_k = _column(scaled, [float(0 < (draw.params.top_k or 0) <= size) for draw in draws]) > 0
    # 1 must keep the last candidate, whatever the sum before it rounds to
    top_p = _column(scaled, [_top_p(draw) if _top_p(draw) < 1 else 2.0 for draw in draws])
    # ties with the last of the top k stay, as in transformers
    last = values.gather(-1, top_k.long() - 1)
    values = values.masked_fill(values < last, float("-inf"))
    # with a top_k the nucleus is one of the top k alone, else one of the whole vocabulary
    total = torch.where(has_top_k, values.logsumexp(-1, keepdim=True), scaled.logsumexp(-1, keepdim=True))
    probabilities = (values - total).exp()
    before = probabilities.cumsum(-1) - probabilities
    keep = before < top_p
    keep[:, 0] = True
    keep &= values >= values[:, :1] + _log_min_p(scaled, draws)
    covered = has_top_k | (probabilities.sum(-1, keepdim=True) >= top_p) | (size == scaled.shape[-1])
    scores = values.masked_fill(~keep, float("-inf")) + gumbel(ids, [noise_key(draw) for draw in draws])
    chosen = ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
    unfinished = []
    for position, (row, done) in enumerate(zip(rows, covered.squeeze(-1).tolist(), strict=True)):
        if done:
            tokens[row] = chosen[position]
        else:
            unfinished.append(row)
    return unfinished


def _sample_wide(scaled: Tensor, draw: Draw) -> Tensor:
    """Sample one row (vocab,) from any number of candidates, without sorting."""
    top_k = draw.params.top_k or 0
    if 0 < top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.kthvalue(scaled.numel() - top_k + 1).values, float("-inf"))
    keep = scaled >= scaled.max() + _log_min_p(scaled, [draw]).squeeze()
    if _top_p(draw) < 1:
        keep &= scaled >= _nucleus_threshold(scaled, _top_p(draw))
    ids = torch.arange(scaled.numel(), dtype=torch.int64, device=scaled.device)
    scores = scaled.masked_fill(~keep, float("-inf")) + gumbel(ids[None], [noise_key(draw)])[0]
    return scores.argmax()


def _nucleus_threshold(scaled: Tensor, top_p: float) -> Tensor:
    """The logit at which the tokens above hold a mass of top_p, by bisection."""
    probabilities = scaled.softmax(-1)
    low, high = torch.zeros_like(probabilities[0]), probabilities.max()
    for _ in range(32):
        middle = (low + high) / 2
        enough = probabilities.masked_fill(probabilities < middle, 0).sum() >= top_p
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return scaled.masked_fill(probabilities < low, float("inf")).min()


def _top_p(draw: Draw) -> float:
    return 1.0 if draw.params.top_p is None else draw.params.top_p


def _log_min_p(like: Tensor, draws: Sequence[Draw]) -> Tensor:
    return _column(like, [draw.params.min_p or 0.0 for draw in draws]).log()


def _column(like: Tensor, values: Sequence[float | None]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def noise_key(draw: Draw) -> tuple[int, int]:
    """Two 32-bit words (as signed ints) from seed, choice and output index."""
    text = f"{draw.params.seed}/{draw.choice}/{draw.output_index}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def gumbel(ids: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
    """Gumbel noise for vocabulary ids.

    Args:
        ids: (rows, n), int64.
        keys: a noise key for each row.

    Returns:
        (rows, n), float32: -log of an exponential made from a hash of id and key.
    """
    words = torch.tensor(keys, dtype=torch.int32, device=ids.device)
    bits = _mix(_mix(ids.to(torch.int32) ^ words[:, :1]) ^ words[:, 1:])
    # 31 bits, small values exact: the race is won by small exponentials
    uniform = ((bits & 0x7FFFFFFF).float() + 0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash with low bias: xor-shift and multiply, in wrapping int32.

    The constants are from Chris Wellons' public-domain "hash-prospector".
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x21F0AAAD
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0xD35A2D97 - 2**32)
    return x ^ ((x >> 15) & 0x1FFFF)
