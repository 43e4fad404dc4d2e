"""What scheduling costs, counted in operations: it grows with what is scheduled, not with what waits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.queues import COMPACT_ABOVE
from trio_llm.core.step import StepResult

from .helpers import count_calls, is_idle, make_core, make_request

WAITING = [10, 100, 1_000, 10_000]


class Priority(int):
    """A priority that counts how often it is compared: all that a queue does with it."""

    num_comparisons = 0

    def __lt__(self, other: int) -> bool:
        Priority.num_comparisons += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        Priority.num_comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


def core_with_waiting(num_waiting: int, kind: type[int] = int) -> EngineCore:
    """Eight sequences run, and as many as asked wait behind them."""
    info = ExecutorInfo(num_blocks=400, block_size=4, vocab_size=128, max_model_len=128)
    core = make_core(FakeExecutor(info, lambda context, index: index), max_num_seqs=8, max_num_batched_tokens=32)
    for number in range(8 + num_waiting):
        # the last comes first, so that nothing is in order already
        priority = kind(-number if number >= 8 else -(10**6))
        prompt = [number % 128, number // 128, 1, 2, 3]  # no two alike: nothing is found in the cache
        core.add(make_request(str(number), prompt, max_tokens=12, priority=priority))
    for _ in range(3):
        step(core)
    assert (core.queues.num_running, core.queues.num_waiting) == (8, num_waiting)
    return core


def step(core: EngineCore) -> None:
    for output in core.step():
        core.acknowledge(output.request_id, output.index, len(output.token_ids))


def steps(core: EngineCore) -> None:
    """Eight end, eight are admitted in their place, and all of them decode."""
    for _ in range(12):
        step(core)
    assert core.queues.num_running == 8


def cost(num_waiting: int, function: Callable[[EngineCore], object]) -> int:
    core = core_with_waiting(num_waiting)
    return count_calls(lambda: function(core))


@pytest.mark.parametrize(
    "function",
    [
        steps,
        lambda core: core.add(make_request("new", [1, 2, 3])),
        lambda core: core.finish("15"),
        lambda core: core.finish("0"),
        lambda core: core.has_work(),
        lambda core: core.statistics(),
    ],
    ids=["step", "add", "finish who waits", "finish who runs", "has_work", "statistics"],
)
def test_the_number_waiting_costs_nothing(function: Callable[[EngineCore], object]) -> None:
    costs = {num_waiting: cost(num_waiting, function) for num_waiting in WAITING}
    assert len(set(costs.values())) == 1, costs


def test_admission_compares_as_often_as_a_heap_does() -> None:
    for num_waiting in WAITING:
        core = core_with_waiting(num_waiting, Priority)
        Priority.num_comparisons = 0
        steps(core)
        # three a level and admission, equal and less counted, and what the eight who run are sorted by
        assert Priority.num_comparisons <= 8 * (6 * math.log2(num_waiting) + 60)


def test_a_step_costs_what_it_schedules() -> None:
    def calls(num_running: int) -> float:
        info = ExecutorInfo(num_blocks=4000, block_size=16, vocab_size=128, max_model_len=128)
        core = make_core(
            FakeExecutor(info, lambda context, index: index), max_num_seqs=512, max_num_batched_tokens=4096
        )
        for number in range(num_running):
            core.add(make_request(str(number), [number % 100], max_tokens=100))
        step(core)
        return count_calls(core.scheduler.schedule) / num_running

    assert calls(500) == pytest.approx(calls(50), rel=0.1)


def test_a_sequence_that_decodes_costs_few_calls() -> None:
    """Planning a token and committing it is some thirty calls; `bench/step.py --scheduler` has the time."""
    info = ExecutorInfo(num_blocks=4000, block_size=16, vocab_size=128, max_model_len=128)
    core = make_core(FakeExecutor(info), max_num_seqs=512, max_num_batched_tokens=4096)
    for number in range(256):
        core.add(make_request(str(number), [number % 100], max_tokens=100))
    step(core)

    def plan_and_commit() -> None:
        core.scheduler.update(core.scheduler.schedule(), result)

    result = StepResult(((1,),) * 256)
    assert count_calls(plan_and_commit) / 256 <= 40


def test_the_queue_forgets_who_has_ended() -> None:
    """While the first of those who wait cannot run, thousands come and go behind it; no prompt of theirs is kept."""
    core = make_core(max_num_seqs=1, max_num_batched_tokens=8)
    core.add(make_request("runs", [1] * 4, max_tokens=100))
    step(core)
    core.add(make_request("waits", [1] * 4, max_tokens=4))
    requests = [make_request(str(number), [2] * 20) for number in range(5_000)]

    def come_and_go() -> None:
        for request in requests:
            core.add(request)
            core.finish(request.id)

    total = count_calls(come_and_go)
    assert len(core.queues._waiting) <= 2 + COMPACT_ABOVE
    core.check()
    # and that costs each of them a constant
    assert total < 5_000 * 60
    while core.has_work():
        step(core)
        core.check()
    assert is_idle(core)
