"""Who is scheduled, who waits, who gives way."""

from __future__ import annotations

import pytest

from trio_llm.core.engine_core import EngineCore
from trio_llm.core.request import Request, Status

from .helpers import FaultyExecutor, expected_tokens, is_idle, make_core, make_request, run


def step(core: EngineCore) -> dict[tuple[str, int], tuple[int, ...]]:
    """One step, all that it gave read at once; what it gave, by request and choice."""
    outputs = core.step()
    core.check()
    for output in outputs:
        core.acknowledge(output.request_id, output.index, len(output.token_ids))
    return {(output.request_id, output.index): output.token_ids for output in outputs}


def add(core: EngineCore, name: str, length: int, **fields: object) -> Request:
    request = make_request(name, [len(name), *range(1, length)], **{"max_tokens": 40, **fields})
    core.add(request)
    return request


def statuses(*requests: Request) -> list[Status]:
    return [request.sequences[0].status for request in requests]


def test_who_decodes_gets_a_token_in_every_step_while_a_long_prompt_prefills() -> None:
    core = make_core(max_num_seqs=4, max_num_batched_tokens=8)
    for name in "abc":
        add(core, name, 3)
    while len(step(core)) < 3:
        pass
    long = add(core, "long", 80)
    num_steps = 0
    while True:
        gave = step(core)
        num_steps += 1
        assert {("a", 0), ("b", 0), ("c", 0)} <= gave.keys()
        if ("long", 0) in gave:
            break
    assert num_steps == 80 // 5, "the rest of the budget was the prompt's"
    assert statuses(long) == [Status.RUNNING]


def test_a_long_prompt_of_higher_priority_does_not_stop_who_decodes_either() -> None:
    core = make_core(max_num_seqs=4, max_num_batched_tokens=8)
    for name in "abc":
        add(core, name, 3)
    while len(step(core)) < 3:
        pass
    add(core, "long", 80, priority=-5)
    for _ in range(16):
        assert {("a", 0), ("b", 0), ("c", 0)} <= step(core).keys()


@pytest.mark.parametrize("max_num_seqs", [2, 4, 8])
def test_a_short_prompt_is_scheduled_while_all_others_decode(max_num_seqs: int) -> None:
    core = make_core(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + 1)
    for index in range(max_num_seqs - 1):
        add(core, f"r{index}", 1)
    while len(step(core)) < max_num_seqs - 1:
        pass
    add(core, "short", 2)
    gave = step(core)
    assert len(gave) == max_num_seqs
    assert ("short", 0) in gave


def test_the_smallest_budget_still_lets_a_prompt_into_a_full_batch() -> None:
    core = make_core(max_num_seqs=3, max_num_batched_tokens=4)
    for name in "ab":
        add(core, name, 1)
    while len(step(core)) < 2:
        pass
    add(core, "new", 12)
    steps = next(number for number in range(1, 20) if ("new", 0) in step(core))
    assert steps == 6, "two tokens of budget are left in each step"


def test_admission_is_by_priority_then_arrival() -> None:
    core = make_core(max_num_seqs=1, max_num_batched_tokens=8)
    for name, priority in (("late", 3), ("first", 1), ("second", 1), ("urgent", -2)):
        add(core, name, 2, priority=priority, max_tokens=1)
    order = [next(iter(step(core)))[0] for _ in range(4)]
    assert order == ["urgent", "first", "second", "late"]


def test_the_lowest_priority_and_then_the_newest_is_preempted() -> None:
    # three prompts of 8 tokens fill 6 blocks of 4, and then each decodes into a new block
    core = make_core(FaultyExecutor(num_blocks=7), max_num_seqs=4, max_num_batched_tokens=64)
    old_low = add(core, "old_low", 7, priority=5, max_tokens=16)
    high = add(core, "high", 8, priority=0, max_tokens=16)
    new_low = add(core, "new_low", 7, priority=5, max_tokens=16)
    step(core)
    assert core.statistics().num_free_blocks == 1
    assert statuses(old_low, high, new_low) == [Status.RUNNING] * 3
    preempted: list[str] = []
    for _ in range(30):
        step(core)
        for request in (old_low, high, new_low):
            if request.id not in preempted and statuses(request) == [Status.WAITING]:
                preempted.append(request.id)
        if len(preempted) == 2:
            break
    assert preempted == ["new_low", "old_low"]
    assert statuses(high) == [Status.RUNNING]


def test_who_is_preempted_keeps_its_tokens_and_comes_back_first() -> None:
    core = make_core(FaultyExecutor(num_blocks=6), max_num_seqs=4, max_num_batched_tokens=64)
    requests = [make_request(name, [ord(name)] * 7, max_tokens=9) for name in "abcd"]
    outputs, _ = run(core, requests)
    assert core.statistics().num_preemptions > 0
    assert outputs == {(request.id, 0): expected_tokens(request) for request in requests}
    assert is_idle(core)


def test_nothing_is_admitted_in_a_step_that_preempted_a_running_one() -> None:
    core = make_core(FaultyExecutor(num_blocks=4), max_num_seqs=4, max_num_batched_tokens=64)
    older, newer = (add(core, name, 8, max_tokens=8) for name in ("older", "newer"))
    step(core)
    tiny = add(core, "tiny", 1, max_tokens=1, priority=-1)
    # no block is free, so that one is preempted for the other; there would be room for the tiny one
    gave = step(core)
    assert statuses(older, newer, tiny) == [Status.RUNNING, Status.WAITING, Status.WAITING]
    assert gave.keys() == {("older", 0)}
    assert core.statistics().num_free_blocks > 0


def test_who_is_paused_gives_way_before_anyone_of_lower_priority() -> None:
    core = make_core(FaultyExecutor(num_blocks=7), max_num_seqs=4, max_num_batched_tokens=64, credit_window=2)
    paused = add(core, "paused", 7, priority=-9, max_tokens=16)
    others = [add(core, name, 7, priority=5, max_tokens=16) for name in ("x", "y")]
    for _ in range(2):  # nobody reads `paused`
        for output in core.step():
            if output.request_id != "paused":
                core.acknowledge(output.request_id, output.index, len(output.token_ids))
        core.check()
    while statuses(paused) == [Status.RUNNING]:
        assert step(core).keys() == {("x", 0), ("y", 0)}
    assert statuses(paused, *others) == [Status.PARKED, Status.RUNNING, Status.RUNNING]
    core.acknowledge("paused", 0, 2)
    core.check()
    assert statuses(paused) == [Status.WAITING]


def test_a_waiting_prompt_takes_the_blocks_of_who_is_paused() -> None:
    core = make_core(FaultyExecutor(num_blocks=4), max_num_seqs=4, max_num_batched_tokens=64, credit_window=1)
    add(core, "paused", 10, max_tokens=6)
    core.step()
    assert not core.has_work()
    assert core.step() == []
    add(core, "eager", 10, max_tokens=6)
    assert core.has_work()
    assert step(core).keys() == {("eager", 0)}


def test_paused_sequences_are_not_preempted_when_that_makes_no_room() -> None:
    core = make_core(
        FaultyExecutor(num_blocks=8),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        credit_window=2,
        enable_prefix_caching=False,
    )
    # `busy` holds blocks and reads; `paused` holds one block; `huge` would need more than the paused one's
    busy = add(core, "busy", 17, max_tokens=12)
    paused = add(core, "paused", 2, max_tokens=8)
    for _ in range(2):
        for output in core.step():
            if output.request_id == "busy":
                core.acknowledge("busy", 0, len(output.token_ids))
    huge = add(core, "huge", 20, max_tokens=4)
    step(core)
    assert statuses(busy, huge) == [Status.RUNNING, Status.WAITING]
    assert statuses(paused) == [Status.RUNNING], "it lost its blocks and nobody gained"


def test_nobody_runs_ahead_of_its_credit_and_reading_one_token_gives_one() -> None:
    core = make_core(credit_window=3)
    request = add(core, "a", 4, max_tokens=10)
    tokens: list[int] = []
    while core.has_work():
        for output in core.step():
            tokens += output.token_ids
    assert len(tokens) == 3
    core.acknowledge("a", 0, 1)
    while core.has_work():
        for output in core.step():
            tokens += output.token_ids
    assert len(tokens) == 4
    core.acknowledge("a", 0, 10**6)  # more than there was to read: no credit from nothing
    while core.has_work():
        for output in core.step():
            tokens += output.token_ids
    assert len(tokens) == 7
    assert tokens == expected_tokens(request)[:7]


def test_drafts_do_not_run_ahead_of_credit() -> None:
    core = make_core(credit_window=4, max_num_batched_tokens=64)
    request = add(core, "a", 4, max_tokens=30)
    produced: list[int] = []
    for _ in range(3):
        request.sequences[0].draft_token_ids = expected_tokens(request)[len(produced) :][:20]
        for output in core.step():
            produced += output.token_ids
        core.check()
        assert len(produced) <= 4
    assert produced == expected_tokens(request)[:4]


def test_right_drafts_give_several_tokens_in_one_step() -> None:
    core = make_core(max_num_batched_tokens=64)
    request = add(core, "a", 4, max_tokens=30)
    first = step(core)["a", 0]
    request.sequences[0].draft_token_ids = expected_tokens(request)[len(first) :][:5]
    assert step(core)["a", 0] == tuple(expected_tokens(request)[1:7])
    # what was accepted is in the cache and not computed again
    before = core.statistics().num_computed_tokens
    assert step(core)["a", 0] == tuple(expected_tokens(request)[7:8])
    assert core.statistics().num_computed_tokens == before + 1


def test_one_sequences_drafts_do_not_starve_another_that_decodes() -> None:
    core = make_core(max_num_seqs=3, max_num_batched_tokens=6)
    first, *_ = (add(core, name, 2) for name in "abc")
    while len(step(core)) < 3:
        pass
    first.sequences[0].draft_token_ids = [1] * 20
    assert step(core).keys() == {("a", 0), ("b", 0), ("c", 0)}


def test_drafts_are_dropped_before_anyone_is_preempted() -> None:
    # `a` has room in its block for one token but not for its drafts; `b` needs the last free block
    core = make_core(FaultyExecutor(num_blocks=4), max_num_seqs=3, max_num_batched_tokens=64)
    a, b = add(core, "a", 2, max_tokens=4), add(core, "b", 8, max_tokens=4)
    step(core)
    assert core.statistics().num_free_blocks == 1
    a.sequences[0].draft_token_ids = [1, 2, 3]
    assert step(core).keys() == {("a", 0), ("b", 0)}
    assert statuses(a, b) == [Status.RUNNING, Status.RUNNING]
    assert core.statistics().num_preemptions == 0


def test_drafts_leave_everyone_a_block_for_the_next_token() -> None:
    """The last free block would serve the drafts of `a`; in the step after, `b` needs it."""
    executor = FaultyExecutor(num_blocks=4)
    core = make_core(executor, max_num_seqs=3, max_num_batched_tokens=64)
    a, _ = add(core, "a", 2, max_tokens=4), add(core, "b", 7, max_tokens=4)
    step(core)
    a.sequences[0].draft_token_ids = [1, 2, 3]
    for _ in range(2):
        assert step(core).keys() == {("a", 0), ("b", 0)}
    assert executor.plans[1].rows[0].num_drafts == 1, "what its own block has room for"
    assert core.statistics().num_preemptions == 0


def test_who_prefills_is_not_starved_when_readers_come_back_all_at_once() -> None:
    """Paused sequences make room in the batch for newcomers; when they go on, more may run than fit a step."""
    core = make_core(max_num_seqs=2, max_num_batched_tokens=4, credit_window=1)
    unread = [add(core, f"u{index}", 2) for index in range(4)]
    for _ in range(6):
        core.step()
    assert all(request.sequences[0].num_output_tokens == 1 for request in unread)
    urgent = add(core, "urgent", 12, priority=-1)
    core.step()
    for request in unread:
        core.acknowledge(request.id, 0, 1)
    for _ in range(20):
        if ("urgent", 0) in step(core):
            break
    else:
        pytest.fail(f"the first of all got {urgent.sequences[0].num_computed_tokens} of 12 tokens in 20 steps")


# -- choices of one request


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(400, 128), (400, 8), (20, 64)])
def test_128_choices_compute_the_prompt_once_and_each_gives_its_own(num_blocks: int, max_num_seqs: int) -> None:
    core = make_core(
        FaultyExecutor(num_blocks=num_blocks), max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + 8
    )
    request = make_request("many", range(30), n=128, max_tokens=5)
    outputs, _ = run(core, [request])
    assert outputs == {("many", index): expected_tokens(request) for index in range(128)}
    assert is_idle(core)
    if num_blocks == 400:
        # the prompt once, its last token for each other choice (its last block for those who came when the first had
        # ended), and four tokens of each that follow the first
        assert core.statistics().num_computed_tokens <= 30 + 127 * 2 + 128 * 4


@pytest.mark.parametrize(("max_tokens", "num_blocks"), [(4, 64), (5, 5)], ids=["it has ended", "it gave way"])
def test_a_choice_that_cannot_fork_from_the_first_has_the_full_blocks_of_the_prompt(
    max_tokens: int, num_blocks: int
) -> None:
    """It waits without holding any, and finds them by their content or on the table of who gives way to it."""
    executor = FaultyExecutor(num_blocks=num_blocks)
    core = make_core(executor, max_num_seqs=1, credit_window=4)
    request = make_request("a", range(15), n=2, max_tokens=max_tokens)
    core.add(request)
    first, second = request.sequences
    while second.status is not Status.RUNNING:
        assert not second.block_table
        core.step()  # nobody reads: the first is paused after a window, if it has not ended
        core.check()
    assert first.status is (Status.FINISHED if max_tokens == 4 else Status.PARKED)
    (row,) = executor.plans[-1].rows
    assert (row.start, len(row.token_ids)) == (12, 3)
    assert not row.block_copies, "it copied a block that was there no more"


def test_choices_wait_for_who_runs_when_their_prompt_is_computed_and_for_nobody_later() -> None:
    """A row is taken from nobody: who came while the prompt was computed, and runs, stays before the choices
    that follow; who comes after them does not, however few rows there are."""
    core = make_core(max_num_seqs=4, max_num_batched_tokens=8)
    add(core, "choices", 9, n=2, max_tokens=6)
    step(core)
    add(core, "meanwhile", 3, max_tokens=20)
    while core.queues.num_running < 2:
        step(core)
    core._token_limit.ran_out(1)  # one row a step from now on, as when memory is short
    add(core, "later", 2, max_tokens=20)
    ends: list[tuple[str, int]] = []
    num_steps = 0
    while core.has_work():
        core._token_limit.ran_out(1)
        requests = dict(core._requests)
        step(core)
        num_steps += 1
        ends += [
            (name, sequence.index)
            for name, request in requests.items()
            for sequence in request.sequences
            if sequence.is_finished and (name, sequence.index) not in ends
        ]
        if ends and ends[-1] == ("choices", 1):
            assert num_steps <= 2 * (9 + 6) + 3 + 20
    assert ends == [("choices", 0), ("meanwhile", 0), ("choices", 1), ("later", 0)]
