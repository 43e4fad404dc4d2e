"""Streams say the same, however their tokens are joined, and break a long silence."""

from __future__ import annotations

from functools import partial

import trio.testing

from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.simulation import FakeModel, open_simulation
from trio_llm.server.exchange import Exchange
from trio_llm.server.openai.sse import KEEP_ALIVE, EventStream

INFO = ExecutorInfo(num_blocks=256, block_size=4, vocab_size=256, max_model_len=512)


class Halves:
    """A writer that says only every other token, as one that cannot tell yet what it is does."""

    def __init__(self):
        self.held = ""

    def opening(self, index):
        return b""

    def content(self, place, index, deltas):
        self.held += "".join(delta.text for delta in deltas)
        said, self.held = (self.held, "") if len(self.held) > 1 else ("", self.held)
        return said.encode()

    def closing(self, index, finish_reason, *, is_last):
        return b"."

    def end(self):
        return b""

    def failure(self, error):
        return b"!"


async def test_silence_is_what_is_not_written_whatever_comes(autojump_clock: trio.testing.MockClock) -> None:
    """A token every ten seconds, of which every other is written; a comment after fifteen."""
    executor = FakeExecutor(INFO, next_token=lambda context, index: ord("a"))
    async with (
        open_simulation(FakeModel(), executor=executor, seconds_per_turn=10.0) as engine,
        Exchange("POST", "/") as exchange,
    ):
        await exchange.enter(engine.generate([1], max_tokens=6))
        async with EventStream(exchange, Halves(), keep_alive=15, first=None) as stream:
            began = trio.current_time()
            found = [(trio.current_time() - began, text) async for text in stream]
    assert [text for _, text in found[1:]] == [KEEP_ALIVE, b"aa"] * 2 + [KEEP_ALIVE, b"aa."]
    times = [time for time, _ in found[1:]]
    assert [time - times[1] for time in times] == [-5, 0, 15, 20, 35, 40]


async def test_where_nothing_comes_waiting_ends(autojump_clock: trio.testing.MockClock) -> None:
    executor = FakeExecutor(INFO, next_token=lambda context, index: ord("a"))
    async with (
        open_simulation(FakeModel(), executor=executor, seconds_per_turn=10.0) as engine,
        Exchange("POST", "/") as exchange,
    ):
        await exchange.enter(engine.generate([1], max_tokens=3))
        assert len(await exchange.receive()) == 1
        began = trio.current_time()
        assert await exchange.receive(began + 3) == []
        assert trio.current_time() == began + 3


async def test_streams_over_a_socket_say_the_same_however_they_are_joined(serving) -> None:
    bodies = {}
    for interval in (0.0, 0.2):
        executor = FakeExecutor(INFO, next_token=lambda context, index: ord("a") + index % 26)
        async with serving(executor=executor, engine={"stream_interval": interval}) as server:
            texts = {}

            async def ask(number, server=server, texts=texts):
                body = {"model": "fake", "prompt": [number + 1] * 8, "max_tokens": 40, "stream": True}
                answer = await server.ask("POST", "/v1/completions", body)
                texts[number] = "".join(event["choices"][0]["text"] for event in answer.events[:-1])

            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(partial(ask, number))
            await server.assert_all_free()
            bodies[interval] = texts
    assert bodies[0.0] == bodies[0.2]
    assert set(map(len, bodies[0.0].values())) == {40}
