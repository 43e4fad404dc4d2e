"""How often outputs are handed over: at once while one is served, together while many are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio.testing

from trio_llm.config import EngineSettings
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.request import FinishReason
from trio_llm.core.step import SequenceOutput, StepPlan, TokenLogprobs
from trio_llm.engine.choice import Delta
from trio_llm.engine.engine import Engine
from trio_llm.engine.outbox import SECONDS_PER_SEQUENCE, Outbox
from trio_llm.engine.simulation import FakeModel, open_simulation
from trio_llm.errors import ConfigurationError, EngineDead, RequestFailed

INFO = ExecutorInfo(num_blocks=256, block_size=4, vocab_size=256, max_model_len=512)
STEP = 1 / 64
MANY = 1 + round(1 / SECONDS_PER_SEQUENCE)
"""Sequences with which the interval alone counts."""


def output(*token_ids: int, request_id: str = "a", **fields: object) -> SequenceOutput:
    return SequenceOutput(request_id, 0, token_ids, **fields)  # type: ignore[arg-type]


def take(outbox: Outbox, num_running: int = MANY, *, nothing_follows: bool = False) -> list[SequenceOutput]:
    """As the worker does."""
    return outbox.take(everything=nothing_follows or outbox.is_due(num_running))


def filled(interval: float = 1.0) -> Outbox:
    """One that handed something over at 0, and has two tokens since, at 0.25 and 0.5."""
    outbox = Outbox(interval)
    outbox.put([output(1, is_first=True)], 0.0)
    assert take(outbox)
    for number in (1, 2):
        outbox.put([output(1 + number)], number / 4)
    return outbox


@pytest.mark.parametrize(("interval", "num_running"), [(1.0, 1), (0.0, MANY), (0.0, 1)])
def test_one_alone_waits_for_nothing_and_nobody_does_without_an_interval(interval: float, num_running: int) -> None:
    outbox = Outbox(interval)
    for number in range(5):
        outbox.put([output(number)], 0.001 * number)
        assert take(outbox, num_running) == [output(number)]


def test_the_more_are_served_the_longer_is_joined_up_to_the_interval() -> None:
    for num_running, steps in ((1, 1), (2, 1), (11, 2), (21, 4), (MANY, 8), (10 * MANY, 8)):
        outbox = Outbox(8 * STEP)
        outbox.put([output(0)], 0.0)
        take(outbox, num_running)
        gaps = []
        last = 0
        for number in range(1, 40):
            outbox.put([output(number)], STEP * number)
            if take(outbox, num_running):
                gaps.append(number - last)
                last = number
        assert gaps == [steps] * (39 // steps), "the last that comes in time is waited for, and no later one"


def test_what_is_joined_is_all_that_there_was() -> None:
    logprobs = [TokenLogprobs(token, -1.0) for token in (2, 3, 4)]
    outbox = Outbox(1.0)
    outbox.put([], 0.0)
    take(outbox, nothing_follows=True)
    outbox.put([output(2, logprobs=(logprobs[0],), started_at=5.0, num_cached_tokens=7)], 0.1)
    outbox.put([output(9, request_id="b"), output(3, 4, logprobs=tuple(logprobs[1:]), started_at=5.0)], 0.2)
    assert take(outbox) == []
    outbox.put([output(5, finish_reason=FinishReason.STOP, started_at=5.0, num_cached_tokens=7)], 0.3)
    (joined,) = take(outbox)
    assert joined == output(
        2, 3, 4, 5, logprobs=tuple(logprobs), started_at=5.0, num_cached_tokens=7, finish_reason=FinishReason.STOP
    )
    assert take(outbox, nothing_follows=True) == [output(9, request_id="b")], "others wait on"
    assert take(outbox, nothing_follows=True) == []


def test_a_first_token_waits_for_nothing_and_takes_no_other_along() -> None:
    outbox = filled()
    first = output(7, request_id="b", is_first=True, prompt_logprobs=())
    outbox.put([output(4), first], 0.6)
    assert take(outbox) == [first]
    assert take(outbox, nothing_follows=True) == [output(2, 3, 4)]


def test_an_error_comes_after_what_was_made_before() -> None:
    outbox = filled()
    error = output(finish_reason=FinishReason.ERROR, error=RequestFailed("it failed"))
    outbox.put([error], 0.6)
    assert take(outbox) == [output(2, 3), error]
    outbox.put([error], 0.7)
    assert take(outbox) == [error]


@pytest.mark.parametrize("nothing_follows", [False, True])
def test_an_error_of_one_choice_comes_after_what_the_others_have_made(nothing_follows: bool) -> None:
    outbox = Outbox(1.0)
    outbox.put([], 0.0)
    take(outbox, nothing_follows=True)
    outbox.put([SequenceOutput("a", 1, (2,)), SequenceOutput("a", 0, (3,)), output(8, request_id="b")], 0.1)
    error = SequenceOutput("a", 1, (), FinishReason.ERROR, RequestFailed("it failed"))
    outbox.put([SequenceOutput("a", 0, (4,)), error], 0.2)
    taken = [each for each in take(outbox, nothing_follows=nothing_follows) if each.request_id == "a"]
    assert taken == [SequenceOutput("a", 0, (3, 4)), SequenceOutput("a", 1, (2,)), error]


def test_after_a_pause_what_comes_is_handed_over_at_once() -> None:
    outbox = filled()
    assert take(outbox) == []
    outbox.put([output(4)], 60.0)
    assert take(outbox) == [output(2, 3, 4)]


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="stream_interval"):
        EngineSettings(stream_interval=-1)


# -- in an engine


async def arrivals(count: int, tokens: int, **settings: float) -> list[list[tuple[float, Delta]]]:
    """When each of so many readers got what."""
    executor = FakeExecutor(INFO, next_token=lambda context, index: ord("a") + index % 26)
    found: list[list[tuple[float, Delta]]] = [[] for _ in range(count)]
    async with open_simulation(FakeModel(), executor=executor, seconds_per_turn=STEP, **settings) as engine:
        began = trio.current_time()

        async def read(number: int) -> None:
            async with engine.generate([number + 1] * 3, max_tokens=tokens) as generation:
                async for delta in generation:
                    found[number].append((trio.current_time() - began, delta))
                assert generation.usage.completion_tokens == tokens

        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(read, number)
        core = await engine.settled()
        assert core.num_free_blocks == core.num_blocks
    return found


def text(of: list[tuple[float, Delta]]) -> str:
    return "".join(delta.text for _, delta in of)


async def test_readers_get_the_same_however_it_is_joined(autojump_clock: trio.testing.MockClock) -> None:
    each = await arrivals(20, 40, stream_interval=0.0)
    joined = await arrivals(20, 40, stream_interval=8 * STEP)
    assert [text(reader) for reader in joined] == [text(reader) for reader in each]
    for one, many in zip(each, joined, strict=True):
        assert len(one) == 40
        assert len(many) < 20
        assert one[0][0] == many[0][0], "a first token waits for nothing"
        assert one[-1][0] == many[-1][0], "nor does an end"
        gaps = [later - sooner for (sooner, _), (later, _) in pairwise(many)]
        assert max(gaps) <= 8 * STEP


async def test_one_alone_gets_each_token_when_it_comes(autojump_clock: trio.testing.MockClock) -> None:
    (alone,) = await arrivals(1, 12)
    assert [later - sooner for (sooner, _), (later, _) in pairwise(alone)] == [STEP] * 11


async def test_a_window_that_is_smaller_than_what_is_joined_does_not_stop_the_engine(
    autojump_clock: trio.testing.MockClock,
) -> None:
    found = await arrivals(30, 24, stream_interval=1000.0, credit_window=4)
    assert all(len(text(reader)) == 24 for reader in found)


async def test_what_was_made_before_the_engine_broke_is_read(autojump_clock: trio.testing.MockClock) -> None:
    def step(plan: StepPlan) -> None:
        if len(executor.plans) == 12:
            executor.broken = RuntimeError("broken")
            raise executor.broken

    executor = FakeExecutor(INFO, on_launch=step, next_token=lambda context, index: ord("a") + index)
    texts: list[str] = []

    async def read(engine: Engine, number: int) -> None:
        async with engine.generate([number + 1] * 3, max_tokens=50) as generation:
            try:
                async for _ in generation:
                    pass
            finally:
                texts.append(generation.text)

    async def run() -> None:
        async with open_simulation(FakeModel(), executor=executor, seconds_per_turn=STEP) as engine:
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(read, engine, number)

    with pytest.raises(EngineDead):
        await run()
    assert texts == ["abcdefghijkl"] * 20
