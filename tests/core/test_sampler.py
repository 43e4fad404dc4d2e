"""The sampler against transformers' warpers, and its noise against pure Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from trio_llm.core import sampler
from trio_llm.core.kernels import load
from trio_llm.core.sampler import MAX_SORTED, Draw, exponential, noise_key, sample
from trio_llm.core.sampling_params import SamplingParams

EULER = 0.5772156649015329


def gumbel(ids: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
    """The noise as it would be added to logits: what is easy to say of it."""
    return -exponential(ids, keys).log()


def draw(seed: int = 0, choice: int = 0, output_index: int = 0, **fields: float) -> Draw:
    params = SamplingParams(**{"temperature": 1.0, **fields})
    return Draw(params.resolved(SamplingParams(), max_tokens=1, seed=seed), choice, output_index)


def reference(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Tensor:
    """Probabilities (vocab,) after transformers' warpers, in transformers' order."""
    scores = logits[None].clone()
    ids = torch.zeros((1, 1), dtype=torch.int64)
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k > 0 else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p > 0 else []
    warpers += [TypicalLogitsWarper(typical_p)] if typical_p < 1 else []
    for warper in warpers:
        scores = warper(ids, scores)
    return scores.softmax(-1)[0]


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch):
    """A function that gives the set of tokens that can be drawn at all.

    The noise is replaced by one that makes a chosen token win wherever it may take part.
    """
    monkeypatch.setattr(sampler, "noise_key", lambda draw: (draw.output_index, 0))

    def favour(ids: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
        return torch.where(ids == torch.tensor([key[0] for key in keys])[:, None], 1e-35, 1.0)

    monkeypatch.setattr(sampler, "exponential", favour)

    def find(logits: Tensor, ids: Sequence[int] | None = None, **fields: float) -> set[int]:
        wanted = range(len(logits)) if ids is None else ids
        found = set()
        for chunk in _chunks(wanted, 64):
            draws = [draw(output_index=token, **fields) for token in chunk]
            tokens = sample(logits.expand(len(draws), -1), draws)
            found |= {token for token, favoured in zip(tokens, chunk, strict=True) if token == favoured}
        return found

    return find


def _chunks(values: Sequence[int], size: int):
    for start in range(0, len(values), size):
        yield values[start : start + size]


def random_logits(size: int, spread: float, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


SMALL_GRID = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product(
        (0.3, 1.0, 2.0), (-1, 0, 1, 3, 8, 20, 50), (1.0, 0.9, 0.5, 1e-6), (0.0, 0.05, 0.4, 1.0)
    )
]


@pytest.mark.parametrize("seed", range(3))
def test_the_candidates_are_transformers_own(candidates, seed: int) -> None:
    logits = random_logits(20, 2.0, seed)
    for fields in SMALL_GRID:
        wanted = set(reference(logits, **fields).nonzero().flatten().tolist())
        assert candidates(logits, **fields) == wanted, fields


@pytest.mark.parametrize("seed", range(2))
def test_the_candidates_of_typical_p_are_transformers_own(candidates, seed: int) -> None:
    logits = random_logits(20, 2.0, seed + 10)
    for typical_p in (1e-6, 0.2, 0.5, 0.9, 0.99):
        for fields in SMALL_GRID[seed::7]:
            wanted = set(reference(logits, typical_p=typical_p, **fields).nonzero().flatten().tolist())
            assert candidates(logits, typical_p=typical_p, **fields) == wanted, (typical_p, fields)


def test_equally_typical_tokens_all_stay_as_in_transformers(candidates) -> None:
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0, -3.0])
    wanted = set(reference(logits, typical_p=0.3).nonzero().flatten().tolist())
    assert candidates(logits, typical_p=0.3) == wanted == {0, 1, 2, 3}


WIDE_GRID = [
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 0.2},  # a nucleus that can be sorted
    {"top_p": 0.9, "min_p": 0.6},
    {"top_p": 0.5, "min_p": 0.6},
    {"min_p": 0.5},
    {"top_k": 500},
    {"top_k": 500, "top_p": 0.7},
    {"top_k": 1024, "top_p": 0.99},
    {"top_k": 2000},
    {"top_k": 2000, "min_p": 0.6},
    {"top_k": 2000, "top_p": 0.9},
    {"top_k": 2000, "top_p": 0.3},
    {"top_k": 2000, "top_p": 0.2},
    {"top_k": 4000, "top_p": 0.8, "min_p": 0.6},
    {"top_k": 5000, "top_p": 0.9},
    {"top_k": 100_000, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.95},
    {"typical_p": 0.5},
    {"typical_p": 0.8, "top_p": 0.9},
    {"typical_p": 0.8, "top_k": 2000, "min_p": 0.4},
]


@pytest.mark.parametrize("fields", WIDE_GRID, ids=str)
def test_the_candidates_are_transformers_own_where_the_nucleus_is_too_large_to_sort(candidates, fields) -> None:
    logits = random_logits(5000, 0.3, 5)
    # in float32 its own rounding would decide who is the last of thousands
    probabilities = reference(logits.double(), **fields)
    wanted = set(probabilities.nonzero().flatten().tolist())
    order = logits.argsort(descending=True).tolist()
    # every tenth, and all around where the candidates end
    border = len(wanted)
    looked_at = sorted(set(order[::10]) | set(order[max(0, border - 40) : border + 40]))
    assert candidates(logits, looked_at, **fields) == wanted & set(looked_at)


@pytest.mark.parametrize("fields", [{"top_k": 3}, {"top_k": 3, "top_p": 0.9}], ids=str)
def test_ties_at_the_last_place_of_top_k_all_stay_as_in_transformers(candidates, fields) -> None:
    logits = torch.tensor([2.0, 0.5, 1.0, 1.0, 1.0, -1.0, 1.5])
    probabilities = reference(logits, **fields)
    assert candidates(logits, **fields) == set(probabilities.nonzero().flatten().tolist())


@pytest.mark.parametrize("size", [40, 5000])
def test_among_ties_a_nucleus_is_no_smaller_than_needed_and_skips_no_better_token(candidates, size: int) -> None:
    logits = torch.zeros(size)
    logits[: size // 4] = 1.0
    found = candidates(logits, range(0, size, size // 40), top_p=0.9)
    mass = logits.softmax(-1)[:: size // 40]
    assert float(mass[[token // (size // 40) for token in found]].sum()) >= 0.9 * float(mass.sum()) - 1e-5
    assert set(range(0, size // 4, size // 40)) <= found


def test_a_nucleus_that_is_reached_exactly_takes_nobody_more(candidates) -> None:
    assert len(candidates(torch.zeros(4), top_p=0.5)) == int((reference(torch.zeros(4), top_p=0.5) > 0).sum()) == 2


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-37, 1e-40, 5e-324])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = random_logits(3000, 3.0, 1)
    for fields in ({}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 2000}, {"min_p": 0.1}):
        draws = [draw(seed=seed, temperature=temperature, **fields) for seed in range(8)]
        assert sample(logits.expand(8, -1), draws) == [int(logits.argmax())] * 8, fields


@pytest.mark.parametrize("fields", [{"top_p": 1e-9}, {"top_p": 5e-324}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
@pytest.mark.parametrize("size", [1, 2, 50, 3000])
def test_the_tightest_limits_leave_the_best_token(fields: dict[str, float], size: int) -> None:
    logits = random_logits(size, 1.0, 2)
    draws = [draw(seed=seed, temperature=2.0, **fields) for seed in range(8)]
    assert sample(logits.expand(8, -1), draws) == [int(logits.argmax())] * 8


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.full((2000,), float("-inf"))
    logits[[3, 1500]] = torch.tensor([0.0, 0.1])
    for fields in ({}, {"top_p": 0.9999}, {"top_k": 50}, {"top_k": 1500}, {"min_p": 0.01}):
        tokens = sample(logits.expand(200, -1), [draw(seed=seed, **fields) for seed in range(200)])
        assert set(tokens) == {3, 1500}, fields


CHI_SQUARE_CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.3, "top_p": 0.95, "typical_p": 0.9},
]


def chi_square_excess(counts: Tensor, probabilities: Tensor) -> float:
    """Of a chi-square test, the deviation in standard normal units (Wilson and Hilferty)."""
    kept = probabilities > 0
    assert int(counts[~kept].sum()) == 0, "drew what is no candidate"
    expected = probabilities[kept].double() * counts.sum()
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("varied", ["seed", "output_index", "choice"])
@pytest.mark.parametrize("fields", CHI_SQUARE_CASES, ids=str)
def test_draws_are_distributed_as_the_softmax_says(fields: dict[str, float], varied: str) -> None:
    count = 6000
    logits = random_logits(16, 1.5, 3)
    draws = [draw(**{varied: number}, **fields) for number in range(count)]
    tokens = torch.tensor(sample(logits.expand(count, -1), draws))
    counts = torch.bincount(tokens, minlength=16).double()
    assert abs(chi_square_excess(counts, reference(logits, **fields))) < 4


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_k": 2000, "min_p": 0.3}], ids=str)
def test_draws_of_a_wide_nucleus_are_distributed_as_the_softmax_says(fields: dict[str, float]) -> None:
    count, buckets = 1500, 10
    logits = random_logits(5000, 0.5, 4)
    draws = [draw(seed=11, output_index=number, **fields) for number in range(count)]
    tokens = torch.tensor(sample(logits.expand(count, -1), draws))
    probabilities = reference(logits, **fields)
    assert bool((probabilities[tokens] > 0).all())
    # candidates from the best to the worst, in ten groups of equal size
    rank = logits.argsort(descending=True).argsort()
    bucket = (rank * buckets // int((probabilities > 0).sum())).clamp(max=buckets - 1)
    mass = torch.zeros(buckets).index_add_(0, bucket, probabilities)
    counts = torch.bincount(bucket[tokens], minlength=buckets).double()
    assert abs(chi_square_excess(counts, mass)) < 4


# -- the noise


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0xD35A2D97 & 0xFFFFFFFF
    return x ^ x >> 15


def test_the_noise_is_this_hash_and_no_other() -> None:
    """Pinned: a change here changes what a seed gives."""
    ids = [0, 1, 2, 77, 49151, 151_935, 262_143]
    for one in (draw(seed=0), draw(seed=-(2**63), choice=3, output_index=9), draw(seed=2**64 - 1, output_index=4095)):
        key = noise_key(one)
        assert all(-(2**31) <= word < 2**31 for word in key)
        first, second = (word & 0xFFFFFFFF for word in key)
        noise = gumbel(torch.tensor([ids]), [key])[0].tolist()
        for token, value in zip(ids, noise, strict=True):
            uniform = ((_mix(_mix(token ^ first) ^ second) & 0x7FFFFFFF) + 0.5) / 2**31
            assert value == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-4, abs=1e-5)


def test_a_pinned_draw() -> None:
    logits = random_logits(1000, 1.0, 0)
    draws = [draw(seed=seed, choice=choice, output_index=i) for seed in (1, 2) for choice in (0, 1) for i in (0, 1)]
    assert len(set(map(noise_key, draws))) == len(draws)
    assert noise_key(draw(seed=1)) == (164869117, -21862628)
    assert sample(logits.expand(len(draws), -1), draws) == [393, 770, 285, 393, 432, 810, 30, 475]


def test_keys_do_not_collide_by_concatenation() -> None:
    triples = itertools.product((0, 1, -1, 11, 2**64 - 1), (0, 1, 11, 111), (0, 1, 11, 111, 1111))
    keys = {noise_key(draw(seed=seed, choice=choice, output_index=index)) for seed, choice, index in triples}
    assert len(keys) == 5 * 4 * 5


def test_the_noise_is_gumbel_and_finite() -> None:
    ids = torch.arange(200_000)[None]
    noise = gumbel(ids.expand(5, -1), [noise_key(draw(seed=seed)) for seed in range(5)])
    assert bool(noise.isfinite().all())
    assert noise.dtype == torch.float32
    for row in noise:
        assert float(row.mean()) == pytest.approx(EULER, abs=0.02)
        assert float(row.var()) == pytest.approx(math.pi**2 / 6, abs=0.04)
        # large values decide races: their share must be right too
        for height in (5.0, 8.0):
            share = float((row > height).float().mean())
            wanted = 1 - math.exp(-math.exp(-height))
            assert abs(share - wanted) < 5 * math.sqrt(wanted / 200_000)


@pytest.mark.parametrize("other", [{"seed": 8}, {"seed": 7, "choice": 1}, {"seed": 7, "output_index": 1}, {"seed": -8}])
def test_noises_of_different_draws_and_of_neighbouring_tokens_are_independent(other: dict[str, int]) -> None:
    size = 200_000
    ids = torch.arange(size)[None].expand(2, -1)
    one, two = gumbel(ids, [noise_key(draw(seed=7)), noise_key(draw(**other))]).double()
    limit = 5 / math.sqrt(size)
    for left, right in ((one, two), (one[1:], two[:-1]), (one[:-1], one[1:]), (one[: size // 2], one[size // 2 :])):
        assert abs(float(torch.corrcoef(torch.stack((left, right)))[0, 1])) < limit


def test_one_tokens_noise_over_output_indices_seeds_and_choices_is_independent() -> None:
    size = 20_000
    limit = 5 / math.sqrt(size)
    for varied in ("output_index", "seed", "choice"):
        keys = [noise_key(draw(**{varied: number})) for number in range(size)]
        noise = gumbel(torch.tensor([[0, 1, 5000]]).expand(size, -1), keys).double()
        matrix = torch.corrcoef(torch.cat((noise[1:].T, noise[:-1].T)))
        assert float((matrix - torch.eye(6)).abs().max()) < limit


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    """Rows of every kind side by side: greedy, sorted, wide."""
    logits = torch.stack([random_logits(3000, 0.5, seed) for seed in range(12)])
    kinds = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 40},
        {"top_p": 0.1, "min_p": 0.02},
        {"top_k": 2000, "typical_p": 0.4},
    ]
    draws = [draw(seed=seed, output_index=seed % 3, **kinds[seed % 6]) for seed in range(12)]
    together = sample(logits, draws)
    assert together == [sample(logits[row : row + 1], [draws[row]])[0] for row in range(12)]
    assert together == sample(logits.flip(0), draws[::-1])[::-1]


class _Operations(TorchDispatchMode):
    """Counts torch's operations, and the largest row that one of them sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.largest_sorted = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        result = function(*args, **(kwargs or {}))
        if "sort" in str(function):
            self.largest_sorted = max(self.largest_sorted, args[0].shape[-1])
        if "topk" in str(function):
            self.largest_sorted = max(self.largest_sorted, result[0].shape[-1])
        return result


def test_mixed_rows_cost_one_pass_and_no_vocabulary_is_sorted() -> None:
    """About as many operations for forty rows of all kinds as for ten."""
    kinds = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.1}, {"typical_p": 0.5}]

    def operations(num_rows: int) -> _Operations:
        logits = torch.stack([random_logits(5000, 3.0, seed % 10) for seed in range(num_rows)])
        draws = [draw(seed=seed % 10, **kinds[seed % 5]) for seed in range(num_rows)]
        with _Operations() as counted:
            sample(logits, draws)
        return counted

    ten, forty = operations(10), operations(40)
    assert forty.count <= 1.1 * ten.count < 400
    assert max(ten.largest_sorted, forty.largest_sorted) <= MAX_SORTED + 1


def test_greedy_is_untouched_by_seed_and_limits() -> None:
    logits = random_logits(500, 1.0, 9)
    best = int(logits.argmax())
    fields = [{"seed": seed, "top_p": 0.5, "top_k": 7, "min_p": 0.2} for seed in range(5)]
    assert sample(logits.expand(5, -1), [draw(temperature=0.0, **field) for field in fields]) == [best] * 5


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = torch.stack([random_logits(100, 1.0, 0)] * 3)
    before = logits.clone()
    sample(logits, [draw(temperature=0.0), draw(top_p=0.5), draw(temperature=0.3)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_has_no_token_and_the_others_have_theirs(bad: float, temperature: float) -> None:
    logits = random_logits(50, 1.0, 0).repeat(4, 1)
    draws = [draw(temperature=temperature, seed=seed, top_k=seed % 2 * 7, top_p=0.9) for seed in range(4)]
    expected = sample(logits.clone(), draws)
    for row in range(4):
        broken = logits.clone()
        broken[row, 7] = bad
        assert sample(broken, draws) == [*expected[:row], None, *expected[row + 1 :]]
    assert sample(torch.full((1, 50), float("-inf")), [draw(temperature=temperature)]) == [None]


def test_the_border_of_picking_out_is_where_the_tests_think() -> None:
    assert MAX_SORTED == 1024


QUICK = [{}, {"top_p": 0.95}, {"top_p": 0.3}, {"min_p": 0.1}, {"top_p": 0.9, "min_p": 0.05}, {"top_p": 0.999}]


@pytest.mark.parametrize("vocab_size", [5000, 37, 16, 1])
@pytest.mark.parametrize("temperature", [0.8, 1.5, 1e-6])
def test_the_kernel_draws_what_torch_draws(vocab_size: int, temperature: float) -> None:
    kernels = load() or pytest.skip("there is no C++ compiler here")
    generator = torch.Generator().manual_seed(vocab_size)
    num_apart = 0
    for fields in QUICK:
        logits = torch.randn(40, vocab_size, generator=generator) * 3
        logits[5] = 1.0
        logits[6, 3:] = -torch.inf
        logits[7] = logits[7].round()
        logits[8, 0] = torch.nan
        draws = [
            Draw(
                SamplingParams(temperature=temperature, **fields).resolved(SamplingParams(), max_tokens=3, seed=row),
                0,
                row,
            )
            for row in range(40)
        ]
        ours, torchs = sample(logits.clone(), draws, kernels), sample(logits.clone(), draws)
        assert ours[8] is None
        num_apart += sum(one != other for one, other in zip(ours, torchs, strict=True))
    assert num_apart <= 1, "rounding may decide one in hundreds"


def test_rows_of_all_kinds_share_a_batch_with_the_kernels() -> None:
    kernels = load() or pytest.skip("there is no C++ compiler here")
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(9))
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4}, {"temperature": 1.0, "typical_p": 0.5},
             {"temperature": 0.7, "top_p": 0.5}, {"temperature": 1.0, "top_k": -1}]  # fmt: skip
    draws = [
        Draw(SamplingParams(**kind).resolved(SamplingParams(), max_tokens=3, seed=row), 0, row)
        for row, kind in enumerate(kinds)
    ]
    assert sample(logits.clone(), draws, kernels) == sample(logits.clone(), draws)
