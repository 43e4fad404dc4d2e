"""EngineCore: what is admitted, what is refused, and what happens when the executor fails."""

from __future__ import annotations

import pytest

from trio_llm.core.executor import Executor, FakeExecutor
from trio_llm.core.request import FinishReason
from trio_llm.core.step import StepPlan, StepResult
from trio_llm.errors import ContextLengthExceeded, RequestFailed

from .helpers import FaultyExecutor, expected_tokens, gather, is_idle, make_core, make_request, run

PROMPTS = {"a": [1, 2, 3], "b": [4] * 9, "c": [5, 6], "d": [7] * 6}
POISON = 39


def requests(**fields: object):
    return [make_request(name, prompt, **fields) for name, prompt in PROMPTS.items()]


def expected(these):
    return {(request.id, index): expected_tokens(request) for request in these for index in range(request.params.n)}


def test_the_fake_executor_speaks_the_protocol() -> None:
    assert isinstance(FakeExecutor(), Executor)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("budget", [5, 7, 64])
@pytest.mark.parametrize("num_blocks", [6, 64])
def test_chunked_batched_and_preempted_give_what_each_gives_alone(n: int, budget: int, num_blocks: int) -> None:
    these = requests(n=n, max_tokens=10)
    core = make_core(FaultyExecutor(num_blocks=num_blocks), max_num_batched_tokens=budget)
    outputs, reasons = run(core, these)
    assert outputs == expected(these)
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert (core.statistics().num_preemptions > 0) == (num_blocks == 6)
    assert is_idle(core)


def test_choices_that_end_in_the_same_step_all_end() -> None:
    request = make_request("a", [1, 2], n=3, max_tokens=2)
    core = make_core()
    _, reasons = run(core, [request])
    assert reasons == {("a", index): FinishReason.LENGTH for index in range(3)}
    assert is_idle(core)
    # and the id may come again
    run(core, [make_request("a", [1, 2], n=3, max_tokens=2)])


def test_end_tokens_and_stop_tokens_end_with_themselves() -> None:
    free = make_request("free", [3, 1], max_tokens=20)
    tokens = expected_tokens(free)
    third = next(token for token in tokens[2:] if token not in tokens[:2])
    position = tokens.index(third)
    for fields in ({"eos": [third]}, {"stop_token_ids": (third,)}):
        outputs, reasons = run(make_core(), [make_request("ends", [3, 1], max_tokens=20, **fields)])
        assert outputs["ends", 0] == tokens[: position + 1]
        assert reasons["ends", 0] is FinishReason.STOP


def test_an_end_token_at_the_last_place_is_a_stop() -> None:
    tokens = expected_tokens(make_request("free", [3, 1], max_tokens=20))
    position = next(i for i in range(2, 20) if tokens[i] not in tokens[:i])
    _, reasons = run(make_core(), [make_request("a", [3, 1], max_tokens=position + 1, eos=[tokens[position]])])
    assert reasons["a", 0] is FinishReason.STOP


def test_a_draft_beyond_the_end_token_is_not_given_out() -> None:
    tokens = expected_tokens(make_request("free", [3, 1], max_tokens=20))
    position = next(i for i in range(2, 20) if tokens[i] not in tokens[:i])
    request = make_request("a", [3, 1], max_tokens=20, eos=[tokens[position]])
    core = make_core(max_num_batched_tokens=64)

    def draft(_: object) -> None:
        request.sequences[0].draft_token_ids = tokens[request.sequences[0].num_output_tokens :]

    outputs, reasons = run(core, [request], before_step=draft)
    assert outputs["a", 0] == tokens[: position + 1]
    assert reasons["a", 0] is FinishReason.STOP
    assert core.statistics().num_steps <= 2


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("prompt_length", [1, 10, 15])
def test_a_request_of_exactly_the_pools_size_finishes(prompt_length: int, draft: bool) -> None:
    core = make_core(FaultyExecutor(num_blocks=4))
    assert core.max_total_tokens == 16
    request = make_request("exact", [3] * prompt_length, max_tokens=16 - prompt_length)

    def before(_: object) -> None:
        sequence = request.sequences[0]
        sequence.draft_token_ids = expected_tokens(request)[sequence.num_output_tokens :] + [1] * 9 if draft else []

    outputs, _ = run(core, [request], before_step=before)
    assert outputs == expected([request])
    assert is_idle(core)


@pytest.mark.parametrize(("prompt_length", "max_tokens"), [(10, 7), (16, 1), (17, 1), (65, 1), (1, 16)])
def test_what_can_never_fit_the_pool_is_refused_and_blocks_nobody(prompt_length: int, max_tokens: int) -> None:
    core = make_core(FaultyExecutor(num_blocks=4))
    with pytest.raises(ContextLengthExceeded) as caught:
        core.add(make_request("huge", [3] * prompt_length, max_tokens=max_tokens))
    assert caught.value.field
    assert "16" in caught.value.message and str(prompt_length) in caught.value.message
    core.check()
    assert is_idle(core) and not core.has_work()
    outputs, _ = run(core, [small := make_request("small", [1, 2], max_tokens=3)])
    assert outputs == expected([small])


def test_the_context_limit_is_the_least_of_model_setting_and_pool() -> None:
    executor = FaultyExecutor(num_blocks=64, max_model_len=40)
    assert make_core(executor).max_total_tokens == 40
    assert make_core(executor, max_model_len=30).max_total_tokens == 30
    assert make_core(executor, max_model_len=4000).max_total_tokens == 40
    core = make_core(executor, max_model_len=30)
    with pytest.raises(ContextLengthExceeded):
        core.add(make_request("a", [1] * 20, max_tokens=11))
    outputs, reasons = run(core, [make_request("b", [1] * 20, max_tokens=10)])
    assert len(outputs["b", 0]) == 10 and reasons["b", 0] is FinishReason.LENGTH


def test_drafts_never_reach_beyond_the_context() -> None:
    executor = FaultyExecutor(max_model_len=12)
    request = make_request("a", [1, 2, 3], max_tokens=9)

    def draft(_: object) -> None:
        request.sequences[0].draft_token_ids = expected_tokens(request)[request.sequences[0].num_output_tokens :][:2]
        request.sequences[0].draft_token_ids += [1] * 9

    outputs, _ = run(make_core(executor), [request], before_step=draft)
    assert outputs == expected([request])
    assert max(row.start + len(row.token_ids) for plan in executor.plans for row in plan.rows) < 12


def test_more_choices_than_fit_at_once_take_turns() -> None:
    request = make_request("many", [1, 2, 3], n=9, max_tokens=12)
    core = make_core(FaultyExecutor(num_blocks=5), max_num_seqs=3)
    outputs, _ = run(core, [request])
    assert outputs == expected([request])
    assert is_idle(core)


def test_finish_is_idempotent_gives_no_output_and_frees_at_once() -> None:
    core = make_core()
    for request in requests(n=2):
        core.add(request)
    core.step()
    core.finish("a", 1)
    core.finish("a", 1)
    core.finish("b")
    core.finish("b")
    core.finish("nobody")
    core.check()
    outputs, reasons = run(core, [])
    assert ("a", 1) not in outputs and not any(key[0] == "b" for key in outputs)
    assert set(reasons) == {("a", 0), ("c", 0), ("c", 1), ("d", 0), ("d", 1)}
    assert is_idle(core)
    assert core.executor.sequences == {}  # type: ignore[attr-defined]


def test_finishing_everything_at_every_step_leaves_the_pool_full() -> None:
    for num_steps in range(12):
        core = make_core(FaultyExecutor(num_blocks=6), max_num_seqs=3, max_num_batched_tokens=5)
        for request in requests(max_tokens=8):
            core.add(request)
        for _ in range(num_steps):
            core.step()
        for name in PROMPTS:
            core.finish(name)
            core.check()
        assert is_idle(core) and not core.has_work() and core.step() == []


# -- an executor that fails


@pytest.mark.parametrize("where", ["on_launch", "fail_collect"])
@pytest.mark.parametrize("num_blocks", [6, 64])
@pytest.mark.parametrize("failing_step", range(8))
def test_a_batch_that_raises_once_loses_nothing_and_gives_nothing_twice(
    where: str, num_blocks: int, failing_step: int
) -> None:
    executor = FaultyExecutor(num_blocks=num_blocks)
    seen: list[StepPlan] = []

    def fail(plan: StepPlan) -> None:
        seen.append(plan)
        if len(seen) == failing_step + 1:
            raise RuntimeError("injected")

    setattr(executor, where, fail)
    these = requests(max_tokens=6, n=2)
    core = make_core(executor, max_num_batched_tokens=9)
    outputs, reasons = run(core, these)
    assert len(seen) > failing_step
    assert outputs == expected(these)
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert is_idle(core)


def test_every_batch_that_raises_is_retried_row_by_row() -> None:
    executor = FaultyExecutor(num_blocks=6)

    def fail(plan: StepPlan) -> None:
        if len(plan.rows) > 1:
            raise MemoryError("no room for two")

    executor.on_launch = fail
    these = requests(max_tokens=6)
    outputs, _ = run(make_core(executor), these)
    assert outputs == expected(these)


@pytest.mark.parametrize("where", ["on_launch", "fail_collect"])
def test_a_row_that_always_raises_fails_its_own_request_only(where: str) -> None:
    executor = FaultyExecutor()
    poisoned: set[int] = set()

    def fail(plan: StepPlan) -> None:
        poisoned.update(row.sequence_id for row in plan.rows if POISON in row.token_ids)
        if any(row.sequence_id in poisoned for row in plan.rows):
            raise ValueError("poison")

    setattr(executor, where, fail)
    executor.next_token = lambda context, index: (sum(context) + index) % 30
    alone = {}
    for request in requests(max_tokens=6):
        outputs, _ = run(make_core(FakeExecutor(executor.info, executor.next_token)), [request])
        alone |= outputs
    core = make_core(executor, max_num_seqs=8)
    these = requests(max_tokens=6)
    for request in these[:2]:
        core.add(request)
    core.add(make_request("bad", [1, POISON, 2], n=2, max_tokens=6))
    outputs, reasons, errors = {}, {}, {}
    step_outputs = []
    for request in these[2:]:
        core.add(request)
    while core.has_work():
        step_outputs = core.step()
        core.check()
        gather(outputs, reasons, step_outputs)
        errors |= {(output.request_id, output.index): output.error for output in step_outputs if output.error}
    assert set(errors) == {("bad", 0), ("bad", 1)}
    for error in errors.values():
        assert isinstance(error, RequestFailed)
        assert str(POISON) not in error.message, "an error never tells the prompt"
    assert {key: reason for key, reason in reasons.items() if key[0] == "bad"} == {
        ("bad", 0): FinishReason.ERROR,
        ("bad", 1): FinishReason.ERROR,
    }
    assert outputs == alone | {("bad", 0): [], ("bad", 1): []}
    assert is_idle(core)


def test_an_executor_that_is_broken_ends_the_engine() -> None:
    executor = FaultyExecutor()

    def fail(plan: StepPlan) -> None:
        raise OSError("the device is gone")

    executor.on_launch = fail
    core = make_core(executor, max_num_seqs=1)
    for index in range(5):
        core.add(make_request(f"r{index}", [1, 2]))
    for _ in range(4):  # as long as it only fails requests, they fail one by one
        (output,) = core.step()
        assert output.finish_reason is FinishReason.ERROR
        core.check()
    executor.broken = OSError("the device is gone")
    with pytest.raises(OSError, match="the device is gone"):
        core.step()


def test_any_number_of_bad_requests_harms_no_other() -> None:
    executor = FaultyExecutor()
    core = make_core(executor, max_num_seqs=1)

    def fail(plan: StepPlan) -> None:
        if POISON in plan.rows[0].token_ids:
            raise ValueError("poison")

    executor.on_launch = fail
    executor.next_token = lambda context, index: 1
    for index in range(8):
        core.add(make_request(f"bad{index}", [POISON], max_tokens=2))
        core.add(make_request(f"good{index}", [1], max_tokens=2))
    _, reasons = run(core, [])
    assert all(reason is (FinishReason.ERROR if key[0].startswith("bad") else FinishReason.LENGTH)
               for key, reason in reasons.items())  # fmt: skip
    assert len(reasons) == 16


def test_an_executor_that_computes_one_row_is_not_asked_whether_it_is_broken() -> None:
    executor = FaultyExecutor()
    executor.broken = OSError("must not be asked")
    core = make_core(executor)

    def fail(plan: StepPlan) -> None:
        if any(POISON in row.token_ids for row in plan.rows):
            raise ValueError("poison")

    executor.on_launch = fail
    executor.next_token = lambda context, index: 1
    for number in range(6):
        core.add(make_request(f"bad{number}", [POISON]))
        core.add(make_request(f"good{number}", [1], max_tokens=1))
        assert len(core.step()) == 2
        core.check()
    assert is_idle(core)


def test_a_result_of_the_wrong_shape_commits_nothing() -> None:
    """A step that raises commits nothing, also when it is the result that is wrong."""

    class Forgetful(FaultyExecutor):
        forgets = True

        def collect(self, handle: StepPlan) -> StepResult:
            result = super().collect(handle)
            if self.forgets and len(handle.rows) > 1:
                self.forgets = False
                return StepResult(result.token_ids[:-1])
            return result

    these = requests(max_tokens=5)
    outputs, _ = run(make_core(Forgetful()), these)
    assert outputs == expected(these)


def test_a_retry_after_preemption_and_failure_sends_the_whole_block_table_again() -> None:
    """Plans alone must tell each block table: rebuilt here from the plans that succeeded."""
    executor = FaultyExecutor(num_blocks=6)
    calls = iter(range(10**6))

    def fail(plan: StepPlan) -> None:
        if next(calls) % 3 == 0 and len(plan.rows) > 1:
            raise RuntimeError("injected")

    executor.on_launch = fail
    these = requests(max_tokens=10)
    core = make_core(executor, max_num_batched_tokens=6)
    outputs, _ = run(core, these)
    assert core.statistics().num_preemptions > 0
    assert outputs == expected(these)
    tables: dict[int, list[int]] = {}
    for plan in executor.plans:  # those whose launch did not raise
        for row in plan.rows:
            table = tables.setdefault(row.sequence_id, [])
            assert row.num_prior_blocks <= len(table)
            table[row.num_prior_blocks :] = row.new_blocks
            assert len(table) * 4 >= row.start + len(row.token_ids)
            assert len(set(table)) == len(table)
        planned = [block for row in plan.rows for block in tables[row.sequence_id]]
        assert len(set(planned)) == len(planned), "two sequences of one step write the same block"


def test_statistics_add_up() -> None:
    core = make_core()
    these = requests(max_tokens=5)
    run(core, these)
    statistics = core.statistics()
    assert statistics.num_computed_tokens == sum(len(prompt) + 4 for prompt in PROMPTS.values())
    assert statistics.num_steps == len(core.executor.plans)  # type: ignore[attr-defined]
    assert statistics.kv_cache_usage == 0.0
    core.add(these := make_request("x", [1] * 30))
    core.step()
    assert core.statistics().kv_cache_usage == 1 - core.statistics().num_free_blocks / 64 > 0
    assert core.statistics().num_running == 1
    core.close()
    core.close()
