"""Memory that runs out, and rows that fail by themselves: who cannot go on ends, and nobody else."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import attrs
import pytest
import torch

from trio_llm.core.faults import RECOVERY_STEPS, TokenLimit, is_out_of_memory
from trio_llm.core.request import FinishReason
from trio_llm.core.step import StepPlan, StepResult
from trio_llm.errors import RequestFailed

from .helpers import FaultyExecutor, expected_tokens, is_idle, make_core, make_request, run

OutOfMemory = Callable[[], Exception]


def cuda() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def cpu() -> Exception:
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 4096000000000000 bytes. Error code 12 (Cannot allocate memory)"
    )


def python() -> Exception:
    return MemoryError()


every_kind = pytest.mark.parametrize("out_of_memory", [cuda, cpu, python])


def limited(limit: int, out_of_memory: OutOfMemory, executor: FaultyExecutor) -> list[int]:
    """Let steps above `limit` tokens run out of memory; gives the sizes of all that are tried."""
    tried: list[int] = []

    def fail(plan: StepPlan) -> None:
        tried.append(plan.num_tokens)
        if plan.num_tokens > limit:
            raise out_of_memory()

    executor.on_launch = fail
    return tried


def test_what_the_allocators_raise_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8, device="cpu")
    assert is_out_of_memory(caught.value)
    assert all(is_out_of_memory(kind()) for kind in (cuda, cpu, python))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


@every_kind
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("num_blocks", [6, 64])
def test_a_step_that_runs_out_of_memory_is_made_smaller_and_nobody_fails(
    out_of_memory: OutOfMemory, limit: int, num_blocks: int
) -> None:
    executor = FaultyExecutor(num_blocks=num_blocks)
    limited(limit, out_of_memory, executor)
    these = [make_request(name, [number] * length, n=2, max_tokens=6)
             for number, (name, length) in enumerate({"a": 3, "b": 9, "c": 2, "d": 13}.items())]  # fmt: skip
    core = make_core(executor)
    outputs, reasons = run(core, these)
    assert outputs == {(request.id, index): expected_tokens(request) for request in these for index in range(2)}
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert is_idle(core)
    statistics = core.statistics()
    assert statistics.num_failed_steps == statistics.num_out_of_memory > 0


def test_the_rule_halves_rows_then_tokens_and_lowers_the_budget_for_a_while() -> None:
    executor = FaultyExecutor()
    core = make_core(executor, max_num_seqs=4, max_num_batched_tokens=16)
    core.add(make_request("a", [1] * 14, max_tokens=4 * RECOVERY_STEPS))
    core.add(make_request("b", [2] * 2, max_tokens=4 * RECOVERY_STEPS))
    tried = limited(4, cuda, executor)
    core.step()
    core.check()
    # both rows, each alone, and what is too long alone in halves; the rest is left for later steps
    assert tried == [16, 14, 7, 3, 2]
    tried.clear()
    core.step()
    assert tried == [3], "the largest part that went through is the budget now"
    executor.on_launch = lambda plan: tried.append(plan.num_tokens)
    core.add(make_request("c", [3] * 80, max_tokens=1))
    tried.clear()
    for _ in range(2 * RECOVERY_STEPS):
        core.step()
        for name in "ab":
            core.acknowledge(name, 0, 1)
    assert max(tried[: RECOVERY_STEPS - 2]) == 3
    assert max(tried[RECOVERY_STEPS : 2 * RECOVERY_STEPS - 2]) == 6, "twice as much after so many good steps"


def test_the_limit_comes_back_to_what_is_configured_and_never_falls_below_one() -> None:
    limit = TokenLimit(10)
    limit.ran_out(0)
    assert limit.current == 1
    seen = set()
    for _ in range(5 * RECOVERY_STEPS):
        limit.went_well()
        seen.add(limit.current)
    assert seen == {1, 2, 4, 8, 10}
    limit.ran_out(64)
    assert limit.current == 10


@every_kind
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_who_runs_out_even_alone_fails_alone(out_of_memory: OutOfMemory, name: str) -> None:
    executor = FaultyExecutor()
    these = [make_request(each, [ord(each) % 40] * 5, max_tokens=8) for each in "abc"]
    core = make_core(executor)

    def fail(plan: StepPlan) -> None:
        bad = next(request for request in these if request.id == name).sequences[0]
        if any(row.sequence_id == bad.id and row.output_index >= 3 for row in plan.rows):
            raise out_of_memory()

    executor.on_launch = fail
    outputs, reasons = run(core, these)
    for request in these:
        failed = request.id == name
        assert reasons[request.id, 0] is (FinishReason.ERROR if failed else FinishReason.LENGTH)
        assert outputs[request.id, 0] == expected_tokens(request)[: 3 if failed else None]
    assert is_idle(core)
    assert core.statistics().num_out_of_memory == 1


@every_kind
def test_a_lone_token_that_runs_out_once_is_tried_again(out_of_memory: OutOfMemory) -> None:
    executor = FaultyExecutor()
    calls = iter(range(100))

    def fail(plan: StepPlan) -> None:
        if next(calls) == 0:
            raise out_of_memory()

    executor.on_launch = fail
    request = make_request("a", [1], max_tokens=3)
    outputs, _ = run(make_core(executor), [request])
    assert outputs["a", 0] == expected_tokens(request)


def test_drafts_are_the_first_to_go() -> None:
    executor = FaultyExecutor()
    core = make_core(executor, max_num_batched_tokens=64)
    request = make_request("a", [1, 2], max_tokens=20)
    core.add(request)
    core.step()
    tried = limited(1, cpu, executor)
    request.sequences[0].draft_token_ids = expected_tokens(request)[1:6]
    (output,) = core.step()
    core.check()
    assert tried == [6, 1]
    assert list(output.token_ids) == expected_tokens(request)[1:2]


def test_the_memory_of_the_step_that_failed_is_given_back_before_the_next_is_tried() -> None:
    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def fail(plan: StepPlan) -> None:
        alive.extend(tensor() is not None for tensor in held)
        activations = Tensor()
        held.append(weakref.ref(activations))
        if plan.num_tokens > 2:
            try:
                raise ValueError("what led to it")
            except ValueError:
                raise cuda() from None

    executor = FaultyExecutor()
    executor.on_launch = fail
    core = make_core(executor)
    core.add(make_request("a", [1] * 12, max_tokens=1))
    core.step()
    assert len(alive) > 2 and not any(alive)


@attrs.define(slots=False)
class NotFinite(FaultyExecutor):
    """The rows of one sequence have no finite logits from some output on."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = -1
        self.collected: list[StepPlan] = []

    def collect(self, handle: StepPlan) -> StepResult:
        self.collected.append(handle)
        result = super().collect(handle)
        failures: dict[int, Exception] = {
            place: FloatingPointError("not finite")
            for place, row in enumerate(handle.rows)
            if row.sequence_id == self.bad and row.sample and row.output_index >= 2
        }
        tokens = tuple(() if place in failures else each for place, each in enumerate(result.token_ids))
        return StepResult(tokens, failures=failures)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_row_that_fails_by_itself_does_not_make_the_others_run_twice(name: str) -> None:
    executor = NotFinite()
    core = make_core(executor)
    these = [make_request(each, [ord(each) % 40] * 3, max_tokens=6) for each in "abc"]

    def poison(_: object) -> None:
        executor.bad = next(request for request in these if request.id == name).sequences[0].id

    outputs, reasons = run(core, these, before_step=poison)
    for request in these:
        failed = request.id == name
        assert reasons[request.id, 0] is (FinishReason.ERROR if failed else FinishReason.LENGTH)
        assert outputs[request.id, 0] == expected_tokens(request)[: 2 if failed else None]
    assert len(executor.collected) == core.statistics().num_steps
    assert core.statistics().num_failed_steps == 0
    assert is_idle(core)


def test_a_row_that_fails_by_itself_says_so() -> None:
    executor = NotFinite()
    core = make_core(executor)
    request = make_request("a", [1], max_tokens=6)
    core.add(request)
    executor.bad = request.sequences[0].id
    errors = []
    while core.has_work():
        errors += [output.error for output in core.step() if output.error is not None]
    (error,) = errors
    assert isinstance(error, RequestFailed)
    assert isinstance(error.__cause__, FloatingPointError)
