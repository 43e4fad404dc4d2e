"""Every door out of a request: what the reader sees, what is counted, and that all is given back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_llm.core.executor import FakeExecutor
from trio_llm.core.request import FinishReason
from trio_llm.core.step import StepPlan
from trio_llm.engine.choice import Delta
from trio_llm.engine.detokenizer import TokenDecoder
from trio_llm.engine.engine import Engine
from trio_llm.engine.generation import Generation, Usage
from trio_llm.engine.simulation import ByteTokenizer, FakeModel, open_simulation
from trio_llm.errors import EngineDead, InvalidRequest, RequestFailed, ShuttingDown

OpenFake = Callable[..., AbstractAsyncContextManager[Engine]]
CheckFree = Callable[[Engine], Any]


def says(text: str) -> FakeExecutor:
    """An executor whose every choice goes on with this text, and with dots after it."""
    tokens = text.encode()
    return FakeExecutor(next_token=lambda context, index: tokens[index] if index < len(tokens) else ord("."))


async def read(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation]


def ended(engine: Engine) -> dict[str, int]:
    """How requests ended, where any did."""
    return {reason: count for reason, count in engine.statistics().finished.items() if count}


async def test_end_token(open_fake: OpenFake, check_free: CheckFree) -> None:
    async with open_fake(says("Hi\nthere"), FakeModel(eos_token_ids={ord("\n")})) as engine:
        async with engine.generate("hello") as generation:
            deltas = await read(generation)
        assert generation.text == "".join(delta.text for delta in deltas) == "Hi"
        assert generation.finish_reason == "stop"
        assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]
        assert generation.usage == Usage(prompt_tokens=5, completion_tokens=3)
        assert generation.choices[0].token_ids == list(b"Hi\n")
        assert ended(engine) == {"stop": 1}
        await check_free(engine)


async def test_end_token_ignored(open_fake: OpenFake) -> None:
    async with open_fake(says("Hi\nthere"), FakeModel(eos_token_ids={ord("\n")})) as engine:
        async with engine.generate("hello", ignore_eos=True, max_tokens=8) as generation:
            await read(generation)
        assert generation.text == "Hi\nthere"


async def test_stop_token(open_fake: OpenFake, check_free: CheckFree) -> None:
    async with open_fake(says("one;two")) as engine:
        async with engine.generate("hello", stop_token_ids=[ord(";")]) as generation:
            await read(generation)
        assert (generation.text, generation.finish_reason) == ("one", "stop")
        assert generation.choices[0].stop_string is None
        assert generation.usage.completion_tokens == 4
        await check_free(engine)


async def test_stop_string(open_fake: OpenFake, check_free: CheckFree) -> None:
    async with open_fake(says("abcXYZdef")) as engine:
        async with engine.generate("hello", stop=["YZ", "zzz"], max_tokens=50) as generation:
            deltas = await read(generation)
        assert generation.text == "".join(delta.text for delta in deltas) == "abcX"
        assert generation.finish_reason == "stop"
        assert generation.choices[0].stop_string == deltas[-1].stop_string == "YZ"
        assert generation.usage.completion_tokens == 6
        await check_free(engine)
        statistics = engine.statistics()
        assert ended(engine) == {"stop": 1}
        assert statistics.generation_tokens == 6
        # what the core made meanwhile is not the reader's to pay
        assert statistics.core.num_computed_tokens - 5 <= 6 + statistics.wasted_tokens


async def test_stop_string_completed_by_the_last_token(open_fake: OpenFake) -> None:
    async with open_fake(says("abcd")) as engine:
        async with engine.generate("hello", stop="cd", max_tokens=4) as generation:
            await read(generation)
        assert (generation.text, generation.finish_reason) == ("ab", "stop")


async def test_length_gives_back_what_was_held(open_fake: OpenFake, check_free: CheckFree) -> None:
    async with open_fake(says("ab€")) as engine:
        async with engine.generate("hello", stop="b€€", max_tokens=4) as generation:
            deltas = await read(generation)
        assert generation.text == "".join(delta.text for delta in deltas) == "ab\ufffd"
        assert generation.finish_reason == "length"
        assert ended(engine) == {"length": 1}
        await check_free(engine)


async def test_rest_of_the_context(open_fake: OpenFake) -> None:
    async with open_fake() as engine:
        async with engine.generate([1, 2, 3]) as generation:
            await read(generation)
        assert generation.usage.total_tokens == engine.max_model_len == 128
        assert generation.finish_reason == "length"


async def test_deadline(autojump_clock: trio.testing.MockClock, check_free: CheckFree) -> None:
    async with open_simulation(executor=says("0123456789"), seconds_per_turn=1) as engine:
        with trio.move_on_after(3.5) as scope:
            async with engine.generate(list(b"hello")) as generation:
                await read(generation)
        assert scope.cancelled_caught
        assert generation.text == "012"
        assert generation.finish_reason == "abort"
        assert generation.usage == Usage(5, 3)
        await check_free(engine)
        assert ended(engine) == {"abort": 1}


async def test_cancelled_next_loses_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with open_simulation(executor=says("0123456789"), seconds_per_turn=1) as engine:
        async with engine.generate(list(b"hello"), max_tokens=10) as generation:
            text = ""
            while generation.finish_reason is None or generation.text != text:
                with trio.move_on_after(0.3):
                    text += (await anext(generation)).text
        assert text == "0123456789"


async def test_abort(open_fake: OpenFake, check_free: CheckFree) -> None:
    async with open_fake(says("0123456789"), credit_window=4) as engine:
        async with engine.generate("hello") as generation:
            seen = [await anext(generation)]
            generation.abort()
            generation.abort()
            generation.abort()
            seen += await read(generation)
            assert [delta.finish_reason for delta in seen] == [None] * (len(seen) - 1) + ["abort"]
            assert "".join(delta.text for delta in seen) == generation.text
        assert generation.finish_reason is FinishReason.ABORT
        assert ended(engine) == {"abort": 1}
        await check_free(engine)


async def test_abort_by_id(open_fake: OpenFake, check_free: CheckFree) -> None:
    async with open_fake(credit_window=4) as engine:
        async with engine.generate("hello", request_id="mine") as generation:
            assert not engine.abort("other")
            assert engine.abort("mine")
            assert not engine.abort("mine")
            await read(generation)
        assert not engine.abort("mine")
        assert ended(engine) == {"abort": 1}
        await check_free(engine)


async def test_abort_after_the_end(open_fake: OpenFake) -> None:
    async with open_fake() as engine:
        async with engine.generate("hello", max_tokens=2) as generation:
            await read(generation)
            generation.abort()
        generation.abort()
        assert generation.finish_reason == "length"
        assert ended(engine) == {"length": 1}


async def test_abort_before_the_beginning(open_fake: OpenFake, check_free: CheckFree) -> None:
    async with open_fake() as engine:
        generation = engine.generate("hello", n=2)
        generation.abort()
        async with generation:
            assert await read(generation) == [
                Delta(0, "", (), FinishReason.ABORT),
                Delta(1, "", (), FinishReason.ABORT),
            ]
        assert ended(engine) == {}, "it was never admitted"
        await check_free(engine)


async def test_abort_while_queued(autojump_clock: trio.testing.MockClock, check_free: CheckFree) -> None:
    async with open_simulation(max_num_seqs=1, max_num_batched_tokens=8, seconds_per_turn=1) as engine:
        async with engine.generate([1]) as first, engine.generate([2]) as second:
            await anext(first)
            assert (await engine.settled()).num_waiting == 1
            second.abort()
            assert await read(second) == [Delta(0, "", (), FinishReason.ABORT)]
            assert (await engine.settled()).num_waiting == 0
            await read(first)
        assert ended(engine) == {"abort": 1, "length": 1}
        await check_free(engine)


async def test_exception_in_the_block(open_fake: OpenFake, check_free: CheckFree) -> None:
    async with open_fake(credit_window=4) as engine:
        mine = KeyError("mine")
        with pytest.raises(KeyError) as caught:  # noqa: PT012
            async with engine.generate("hello") as generation:
                await anext(generation)
                raise mine
        assert caught.value is mine
        assert generation.finish_reason == "abort"
        assert ended(engine) == {"abort": 1}
        await check_free(engine)


async def test_leaving_without_reading(open_fake: OpenFake, check_free: CheckFree) -> None:
    async with open_fake(credit_window=4) as engine:
        async with engine.generate("hello"):
            pass
        assert ended(engine) == {"abort": 1}
        await check_free(engine)


async def test_a_failed_step_fails_who_was_in_it(check_free: CheckFree) -> None:
    """The faulty row ends its own request; its neighbour in the same step goes on."""

    def fault(plan: StepPlan) -> None:
        if any(row.sequence_id == 1 and row.output_index == 2 for row in plan.rows):
            raise MemoryError

    async with open_simulation(executor=FakeExecutor(on_launch=fault)) as engine:
        async with engine.generate("good", max_tokens=9) as good, engine.generate("bad", max_tokens=9) as bad:
            with pytest.raises(RequestFailed):
                await read(bad)
            await read(good)
        assert bad.finish_reason == "error"
        assert good.finish_reason == "length"
        assert good.usage.completion_tokens == 9
        assert ended(engine) == {"error": 1, "length": 1}
        await check_free(engine)


async def test_a_request_that_cannot_be_added(check_free: CheckFree) -> None:
    class Picky(FakeExecutor):
        def admit(self, sequence_id: int, *args: Any) -> None:
            if sequence_id == 0:
                raise ValueError("no")
            super().admit(sequence_id, *args)

    async with open_simulation(executor=Picky()) as engine:
        async with engine.generate("bad") as bad:
            with pytest.raises(RequestFailed) as caught:
                await read(bad)
        assert isinstance(caught.value.__cause__, ValueError)
        async with engine.generate("good", max_tokens=2) as good:
            await read(good)
        assert ended(engine) == {"error": 1, "length": 1}
        await check_free(engine)


async def test_a_broken_tokenizer_fails_its_request_alone(open_fake: OpenFake, check_free: CheckFree) -> None:
    class Broken(ByteTokenizer):
        def decode(self, token_ids: Any, **options: Any) -> str:
            if ord("!") in token_ids:
                raise UnicodeError("broken")
            return super().decode(token_ids, **options)

    executor = FakeExecutor(next_token=lambda context, index: context[0])
    async with open_fake(executor, FakeModel(tokenizer=Broken())) as engine:
        async with engine.generate("!", max_tokens=20) as bad, engine.generate("?", max_tokens=20) as good:
            with pytest.raises(RequestFailed, match="UnicodeError"):
                await read(bad)
            await read(good)
        assert (bad.finish_reason, good.text) == ("error", "?" * 20)
        assert ended(engine) == {"error": 1, "length": 1}
        await check_free(engine)


async def test_death_ends_everything(open_fake: OpenFake) -> None:
    """A crash of the worker: every request fails, the block is cancelled, one EngineDead leaves."""
    crash = ZeroDivisionError("crash")
    causes: list[BaseException | None] = []
    dead = trio.Event()

    def step(now: float) -> Any:
        raise crash

    async def reader(engine: Engine, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with engine.generate("hello") as generation:
            task_status.started()
            await dead.wait()
            try:
                await read(generation)
            except EngineDead as error:
                causes.append(error.__cause__)
        assert generation.finish_reason == "error"
        assert len(generation.text) == 4, "what was made before is still there"

    async with trio.open_nursery() as nursery:
        with pytest.raises(EngineDead) as caught:  # noqa: PT012
            async with open_fake(credit_window=4) as engine:
                await nursery.start(reader, engine)
                await nursery.start(reader, engine)
                while (await engine.settled()).num_running < 2 or engine.statistics().generation_tokens < 8:
                    pass
                engine._worker.core.step = step  # type: ignore[method-assign]
                async with engine.generate("straw") as straw:
                    async for _ in straw:
                        pass
        dead.set()
        assert caught.value.__cause__ is crash
        assert engine.state == "dead"
        assert ended(engine) == {"error": 3}
        with pytest.raises(EngineDead):
            await engine.settled()
        with pytest.raises(EngineDead):
            async with engine.generate("late"):
                pass
    assert causes == [crash, crash]


async def test_shutdown_ends_what_runs(open_fake: OpenFake) -> None:
    """A request that outlives its engine's block ends with ShuttingDown."""
    failures = []

    async def reader(engine: Engine, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with engine.generate("hello") as generation:
            task_status.started()
            try:
                async for _ in generation:
                    await wait_all_tasks_blocked()
            except ShuttingDown as error:
                failures.append(error)
        assert generation.finish_reason == "abort"

    async with trio.open_nursery() as nursery:
        async with open_fake(credit_window=2) as engine:
            await nursery.start(reader, engine)
        core = await engine.settled()
        assert core.num_free_blocks == core.num_blocks
        assert ended(engine) == {"abort": 1}
        with pytest.raises(ShuttingDown):
            async with engine.generate("late"):
                pass
    assert len(failures) == 1


async def test_drain(open_fake: OpenFake) -> None:
    async with open_fake() as engine:
        async with engine.generate("hello", max_tokens=9) as generation:
            engine.drain()
            assert engine.state == "draining"
            with pytest.raises(ShuttingDown):
                async with engine.generate("late"):
                    pass
            await read(generation)
        assert generation.finish_reason == "length"


async def test_choices_end_one_by_one(open_fake: OpenFake, check_free: CheckFree) -> None:
    async with open_fake(says("0123456789"), stream_interval=0.0) as engine:
        async with engine.generate("hello", n=3, max_tokens=10) as generation:
            deltas = await read(generation)
        for choice in generation.choices:
            mine = [delta for delta in deltas if delta.index == choice.index]
            assert [delta.finish_reason for delta in mine] == [None] * 9 + ["length"]
            assert "".join(delta.text for delta in mine) == choice.text == "0123456789"
        assert generation.usage == Usage(5, 30)
        assert ended(engine) == {"length": 1}
        await check_free(engine)


async def test_an_id_can_be_used_again(open_fake: OpenFake, check_free: CheckFree) -> None:
    """Outputs of the first bearer of an id never reach the second."""
    async with open_fake(says("0123456789"), credit_window=2) as engine:
        for _ in range(20):
            async with engine.generate("hello", request_id="same") as generation:
                with pytest.raises(InvalidRequest, match="in use"):
                    async with engine.generate("hello", request_id="same"):
                        pass
                assert (await anext(generation)).text == "0"
        assert ended(engine) == {"abort": 20}
        await check_free(engine)


async def test_a_generation_is_entered_once(open_fake: OpenFake) -> None:
    async with open_fake() as engine:
        generation = engine.generate("hello", max_tokens=1)
        with pytest.raises(RuntimeError):
            await anext(generation)
        assert generation.drain() == []
        async with generation:
            pass
        with pytest.raises(RuntimeError):
            await generation.__aenter__()


@attrs.define
class Log:
    events: list[str] = attrs.field(factory=list)

    def first_token(self, seconds: float) -> None:
        self.events.append(f"first {seconds:g}")

    def inter_token(self, seconds: float, count: int) -> None:
        self.events += [f"next {seconds:g}"] * count

    def finished(self, reason: str, prompt_tokens: int, completion_tokens: int) -> None:
        self.events.append(f"{reason} {prompt_tokens} {completion_tokens}")
        raise RuntimeError("an observer's fault is its own")


async def test_observers(autojump_clock: trio.testing.MockClock) -> None:
    log = Log()
    async with open_simulation(seconds_per_turn=2) as engine:
        engine.observers.append(log)
        async with engine.generate(list(b"hello"), max_tokens=3) as generation:
            await read(generation)
        statistics = engine.statistics()
    assert log.events == ["first 2", "next 2", "next 2", "length 5 3"]
    assert (statistics.prompt_tokens, statistics.generation_tokens) == (5, 3)


async def test_a_newline_made_of_a_byte_token_stops(open_fake: OpenFake) -> None:
    """Such a token is certain only with the next one, which is not part of the output then."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenDecoder, "_find_byte_ids", lambda *_: frozenset({ord("\n")}))
        async with open_fake(says("ab\ncd")) as engine:
            async with engine.generate("hello", stop="\n") as generation:
                await read(generation)
    assert generation.text == "ab"
    assert generation.choices[0].token_ids == list(b"ab\n")
