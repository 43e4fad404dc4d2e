"""What prompts may have of a step beside those who decode, in simulated time."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

import pytest

from trio_llm.config import EngineSettings
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.pace import MAX_MIXED_STEPS, MIN_TOKENS, Estimate
from trio_llm.core.step import Row, StepPlan, StepResult
from trio_llm.errors import ConfigurationError

from .helpers import expected_tokens, make_core, make_request, random_clock, run
from .traffic import prompt_of

PIECE = EngineSettings().max_num_mixed_prompt_tokens or 0


class Timed(FakeExecutor):
    """Takes the time that a model would, by a clock of its own."""

    def __init__(self, attention: float = 0.36e-6) -> None:
        super().__init__(ExecutorInfo(num_blocks=20_000, block_size=16, vocab_size=512, max_model_len=16_384))
        self.attention = attention
        """Seconds for a token of a prompt and one of the context before it."""
        self.now = 0.0
        self.overhead = 5e-3
        self.took: list[float] = []

    def row(self, row: Row) -> float:
        count = len(row.token_ids)
        if count == 1:
            return 0.65e-3 + 0.5e-6 * row.start
        return count * (0.2e-3 + self.attention * (row.start + count / 2))

    def collect(self, handle: StepPlan) -> StepResult:
        self.took.append(self.overhead + sum(map(self.row, handle.rows)))
        self.now += self.took[-1]
        return StepResult(tuple((1,) if row.sample else () for row in handle.rows))


def timed_core(executor: Timed, **settings: object) -> EngineCore:
    return EngineCore(executor, EngineSettings(**settings), clock=lambda: executor.now)


def step(core: EngineCore) -> list[str]:
    """One step, all read at once; the requests that got a token."""
    outputs = core.step()
    for output in outputs:
        core.acknowledge(output.request_id, output.index, len(output.token_ids))
    return [output.request_id for output in outputs]


def prompt_tokens(plan: StepPlan) -> int:
    return sum(len(row.token_ids) for row in plan.rows if len(row.token_ids) > 1)


def decoding_core(executor: Timed, count: int, **settings: object) -> EngineCore:
    """As many as asked decode, and have done so for some time."""
    core = timed_core(executor, **settings)
    for number in range(count):
        core.add(make_request(f"d{number}", prompt_of(100, number), max_tokens=10_000))
    for _ in range(60):
        step(core)
    executor.took.clear()
    executor.plans.clear()
    return core


def play_until_first_token(core: EngineCore, name: str) -> None:
    for _ in range(2000):
        if name in step(core):
            return
    pytest.fail(f"{name} never got a token")


def percentile(values: Sequence[float], fraction: float) -> float:
    return sorted(values)[int(fraction * (len(values) - 1))]


@pytest.mark.parametrize("attention", [0.12e-6, 0.36e-6])
def test_a_long_prompt_slows_those_who_decode_by_no_more_than_is_set(attention: float) -> None:
    """Sixteen decode, a prompt of 4,096 tokens comes: the 99th percentile stays under three times their median."""
    executor = Timed(attention)
    core = decoding_core(executor, 16)
    for _ in range(100):
        step(core)
    alone = statistics.median(executor.took)
    executor.took.clear()
    core.add(make_request("long", prompt_of(4096), max_tokens=1))
    play_until_first_token(core, "long")
    assert percentile(executor.took, 0.99) < 3 * alone
    # at its end, the least that a prompt gets takes longer than is allowed where attention is slow
    assert statistics.median(executor.took) == pytest.approx(2 * alone, rel=0.1)


def test_without_a_ratio_it_slows_them_many_times() -> None:
    executor = Timed()
    core = decoding_core(executor, 16, max_mixed_step_ratio=None)
    step(core)
    alone = executor.took[-1]
    core.add(make_request("long", prompt_of(4096), max_tokens=1))
    play_until_first_token(core, "long")
    assert percentile(executor.took, 0.99) > 10 * alone


@pytest.mark.parametrize("attention", [0.36e-6, 1.0])
@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_a_prompt_gets_on_whatever_it_costs(attention: float, ratio: float) -> None:
    executor = Timed(attention)
    core = decoding_core(executor, 16, max_mixed_step_ratio=ratio)
    core.add(make_request("long", prompt_of(2000), max_tokens=1))
    play_until_first_token(core, "long")
    for first in range(len(executor.plans) - 2):
        # at most one step goes without prompts, and the others have the least at least
        pieces = [prompt_tokens(plan) for plan in executor.plans[first : first + MAX_MIXED_STEPS]]
        assert sum(piece < MIN_TOKENS for piece in pieces[:-2]) <= 1
        assert max(pieces) <= PIECE


def test_what_decoding_takes_is_looked_at_while_prompts_never_end() -> None:
    """The machine becomes four times as fast, and so do the steps that prompts share."""
    executor = Timed(0.03e-6)
    executor.overhead = 40e-3
    core = decoding_core(executor, 8)
    for number in range(8):
        core.add(make_request(f"long{number}", prompt_of(16_000, 100 + number), max_tokens=1))
    for _ in range(50):
        step(core)
    executor.overhead = 5e-3
    executor.plans.clear()
    executor.took.clear()
    for _ in range(6 * MAX_MIXED_STEPS):
        step(core)
    alone = [took for plan, took in zip(executor.plans, executor.took, strict=True) if not prompt_tokens(plan)]
    assert 5 <= len(alone) <= 6
    assert max(executor.took[:5]) > 3 * alone[-1]
    assert max(executor.took[-5:]) < 2.3 * alone[-1]


def test_short_prompts_are_computed_whole() -> None:
    executor = Timed()
    core = decoding_core(executor, 4)
    for number in range(3):
        core.add(make_request(f"short{number}", prompt_of(60, 100 + number), max_tokens=5))
    step(core)
    assert [len(row.token_ids) for row in executor.plans[-1].rows] == [1, 1, 1, 1, 60, 60, 8]
    core = decoding_core(executor, 4)
    core.add(make_request("long", prompt_of(PIECE + 1, 100), max_tokens=5))
    step(core)
    assert prompt_tokens(executor.plans[-1]) < 60


def test_where_more_wait_than_decode_prompts_have_more() -> None:
    def first_piece(num_prompts: int) -> int:
        executor = Timed()
        core = decoding_core(executor, 4)
        for number in range(num_prompts):
            core.add(make_request(f"long{number}", prompt_of(1000, 100 + number), max_tokens=5))
        for _ in range(20):
            step(core)
        return prompt_tokens(executor.plans[-1])

    assert first_piece(1) == pytest.approx(first_piece(4), rel=0.3)
    assert first_piece(12) > 2 * first_piece(4)


def closed_loop(num_clients: int, num_requests: int, **settings: object) -> float:
    """Tokens a second of clients that ask again as soon as they were answered."""
    executor = Timed()
    core = timed_core(executor, **settings)
    requests = iter([make_request(str(i), prompt_of(110, i), max_tokens=96) for i in range(num_requests)])
    for _ in range(num_clients):
        core.add(next(requests))
    while core.has_work():
        step(core)
        while core.queues.num_running + core.queues.num_waiting < num_clients and (request := next(requests, None)):
            core.add(request)
    return 96 * num_requests / executor.now


def test_many_short_prompts_lose_nothing() -> None:
    assert closed_loop(32, 128) >= 0.98 * closed_loop(32, 128, max_mixed_step_ratio=None)


def test_the_same_times_give_the_same_plans() -> None:
    def plans(clock: Callable[[], float]) -> list[StepPlan]:
        executor = Timed()
        core = EngineCore(executor, EngineSettings(), clock=clock)
        for number in range(20):
            core.add(make_request(str(number), prompt_of(20 + 90 * number, number), max_tokens=30))
        while core.has_work():
            step(core)
        return executor.plans

    assert plans(random_clock(1)) == plans(random_clock(1))
    assert plans(random_clock(1)) != plans(random_clock(2))


def test_times_change_no_token() -> None:
    for seed in range(20):
        core = make_core(clock=random_clock(seed), max_num_seqs=4, max_num_batched_tokens=40)
        requests = [
            make_request(str(number), [number] * random.Random(number).randrange(1, 60), max_tokens=12)
            for number in range(12)
        ]
        outputs, _ = run(core, requests)
        assert outputs == {(request.id, 0): expected_tokens(request) for request in requests}


def test_an_estimate_finds_both_coefficients() -> None:
    numbers = random.Random(0)
    estimate = Estimate()
    assert estimate(3, 4) == 0
    for _ in range(200):
        x, y = numbers.random(), numbers.random()
        estimate.learn(x, y, 2 * x + 5 * y)
    assert estimate.coefficients == pytest.approx((2, 5), rel=1e-3)
    estimate.learn(1, 1, 0)
    estimate.learn(1, 1, -100)
    assert estimate(1, 1) == 0


def test_a_step_with_prompts_cannot_be_shorter_than_one_without() -> None:
    with pytest.raises(ConfigurationError, match="max_mixed_step_ratio must be at least 1"):
        EngineSettings(max_mixed_step_ratio=0.5)
