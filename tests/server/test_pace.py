"""How often a stream writes: at once while it is alone, joined while many are served."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

import trio.testing

from trio_llm.config import ServerSettings
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.registry import Registry
from trio_llm.engine.simulation import FakeModel, open_simulation
from trio_llm.server.app import create_app
from trio_llm.server.exchange import Exchange
from trio_llm.server.http import SECONDS_PER_STREAM
from trio_llm.server.openai.sse import QUIET, EventStream

INFO = ExecutorInfo(num_blocks=256, block_size=4, vocab_size=256, max_model_len=512)
STEP = 0.01


class Words:
    """A writer of the plainest kind: a token is a byte."""

    def opening(self, index):
        return b""

    def content(self, place, index, deltas):
        return "".join(delta.text for delta in deltas).encode()

    def closing(self, index, finish_reason, *, is_last):
        return b"."

    def end(self):
        return b""

    def failure(self, error):
        return b"!"


@asynccontextmanager
async def exchange_of(tokens, *, step):
    """An exchange whose engine makes so many tokens, one every `step` seconds."""
    executor = FakeExecutor(INFO, next_token=lambda context, index: ord("a"))
    async with (
        open_simulation(FakeModel(), executor=executor, seconds_per_turn=step) as engine,
        Exchange("POST", "/") as exchange,
    ):
        await exchange.enter(engine.generate([1], max_tokens=tokens))
        yield exchange


async def writes(pace, *, tokens=20):
    """(time since the first, text) of each write of a stream whose engine makes a token every STEP."""
    async with exchange_of(tokens, step=STEP) as exchange:
        first = await exchange.receive()
        async with EventStream(exchange, Words(), keep_alive=15, first=first, pace=pace) as stream:
            found = [(trio.current_time(), text.decode()) async for text in stream]
    began = found[0][0]
    return [(round(time - began, 6), text) for time, text in found]


async def test_alone_every_token_is_written_when_it_comes(autojump_clock: trio.testing.MockClock) -> None:
    found = await writes(float)
    assert [text for _, text in found] == ["a"] * 19 + ["a."]
    assert [round(later - sooner, 6) for (sooner, _), (later, _) in pairwise(found)] == [STEP] * 19


async def test_among_many_tokens_are_joined_and_the_end_does_not_wait(autojump_clock: trio.testing.MockClock) -> None:
    found = await writes(lambda: 0.055)
    assert found[1][1] in ("a" * 4, "a" * 5)
    assert "".join(text for _, text in found) == "a" * 20 + "."
    gaps = [round(later - sooner, 6) for (sooner, _), (later, _) in pairwise(found)]
    assert all(gap >= QUIET * 0.055 for gap in gaps[:-1])
    assert all(gap <= 0.055 for gap in gaps)
    # the last token came 19 steps after the first
    assert found[-1][0] <= 19 * STEP + 1e-9


async def test_the_last_that_comes_in_time_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    """Once it is known how often one comes."""
    found = await writes(lambda: 0.0925, tokens=60)
    assert {text for _, text in found[2:-1]} == {"a" * 9}


async def test_what_comes_seldom_is_written_at_once(autojump_clock: trio.testing.MockClock) -> None:
    found = await writes(lambda: 0.9 * STEP)
    assert [round(later - sooner, 6) for (sooner, _), (later, _) in pairwise(found)] == [STEP] * 19


async def test_what_nothing_follows_is_written_when_it_is_due(autojump_clock: trio.testing.MockClock) -> None:
    """A step takes longer than the quiet part of the pace, and one comes within it."""
    async with exchange_of(3, step=1.0) as exchange:
        first = await exchange.receive()
        began = trio.current_time()
        assert await exchange.receive(quiet_until=began + 1.5, due=began + 1.75) != []
        assert trio.current_time() == began + 1.75, "one token came after a second"
        assert await exchange.receive(quiet_until=began + 9, due=began + 9) != []
        assert trio.current_time() == began + 2, "the end waits for nothing"
        assert first


async def test_where_nothing_comes_waiting_ends(autojump_clock: trio.testing.MockClock) -> None:
    async with exchange_of(3, step=10.0) as exchange:
        began = trio.current_time()
        assert await exchange.receive(quiet_until=began + 1, due=began + 2, silent_until=began + 3) == []
        assert trio.current_time() == began + 3


async def test_the_pace_goes_by_how_many_are_served() -> None:
    app = create_app(ServerSettings(stream_interval=0.05), registry=Registry())
    exchanges = [Exchange("POST", "/") for _ in range(40)]
    paces = []
    for exchange in exchanges:
        app.exchanges.add(exchange)
        paces.append(app.stream_pace())
    assert paces[0] == 0
    assert paces[3] == 3 * SECONDS_PER_STREAM
    assert paces[-1] == 0.05
    assert paces == sorted(paces)
    hasty = create_app(ServerSettings(stream_interval=0), registry=Registry())
    hasty.exchanges.update(exchanges)
    assert hasty.stream_pace() == 0


async def test_streams_over_a_socket_say_the_same_however_they_are_joined(serving) -> None:
    bodies = {}
    for interval in (0.0, 0.2):
        executor = FakeExecutor(INFO, next_token=lambda context, index: ord("a") + index % 26)
        async with serving(executor=executor, stream_interval=interval) as server:
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
