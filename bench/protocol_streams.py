"""The same streams read in process, from the application without Hypercorn, and over real sockets."""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import attrs
import orjson
import trio
from hand_over import paced_engine, watch
from http_client import Client
from hypercorn.config import Config
from report import repeats

from trio_llm.config import EngineSettings, ServerSettings
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.step import StepPlan
from trio_llm.engine.engine import Engine
from trio_llm.engine.generation import Generation
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.registry import Registry
from trio_llm.engine.simulation import FakeModel
from trio_llm.server.app import create_app
from trio_llm.server.connection import serve_connections
from trio_llm.server.http import App

INFO = ExecutorInfo(num_blocks=4096, block_size=16, vocab_size=256, max_model_len=4096)
PATH = "/v1/completions"
HEADERS = {"Content-Type": "application/json"}


def body_of(index: int, tokens: int) -> bytes:
    """The request of one stream."""
    body = {"model": "fake", "prompt": [index % 200 + 1] * 16, "max_tokens": tokens, "ignore_eos": True}
    return orjson.dumps({**body, "stream": True})


async def all_at_once(count: int, read: Callable[[int], Awaitable[object]]) -> float:
    """Processor seconds of this process, for so many streams at once."""
    began = time.process_time()
    async with trio.open_nursery() as nursery:
        for index in range(count):
            nursery.start_soon(read, index)
    return time.process_time() - began


async def read_in_process(engine: Engine, tokens: int, index: int) -> Generation:
    """One stream, without a server."""
    async with engine.generate([index % 200 + 1] * 16, max_tokens=tokens, ignore_eos=True) as generation:
        async for _ in generation:
            generation.drain()
    return generation


async def read_from_app(app: App, tokens: int, index: int) -> None:
    """One stream from the application, its messages taken by nobody."""
    messages = [{"type": "http.request", "body": body_of(index, tokens), "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await trio.sleep_forever()
        return messages.pop()

    async def send(message: Any) -> None:
        pass

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
    }
    scope |= {"headers": [(b"host", b"bench"), (b"content-type", b"application/json")], "http_version": "1.1"}
    scope |= {"scheme": "http", "root_path": "", "client": ("bench", 1), "server": ("bench", 80), "extensions": {}}
    await app(scope, receive, send)


async def read_over_http(port: int, tokens: int, index: int, *, leave_after: int | None = None) -> int:
    """One stream over a socket; the events that came.

    Args:
        leave_after: events after which the client goes away.
    """
    client = Client(partial(trio.open_tcp_stream, "127.0.0.1", port), "bench")
    seen = 0
    await client.request("POST", PATH, HEADERS, body_of(index, tokens))
    while piece := await client.receive_body():
        seen += piece.count(b"data: ")
        if leave_after is not None and seen >= leave_after:
            break
    await client.aclose()
    return seen


@asynccontextmanager
async def served(app: App) -> AsyncIterator[int]:
    """The application over real sockets; gives its port."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    config = Config()
    config.errorlog = None
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        serve = partial(serve_connections, app, listeners, config=config, write_timeout=30.0, stop=stop.wait)
        await nursery.start(serve)
        yield listeners[0].socket.getsockname()[1]
        stop.set()


async def streams(count: int, tokens: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """What a token costs on each way, what waits in channels, and what is left when clients go away."""
    found: dict[str, list[float]] = {}

    def note(name: str, *values: float) -> None:
        found.setdefault(name, []).extend(values)

    for _ in repeats(args):
        note("token: outside Hypercorn", await outside_hypercorn(count, tokens))
    for _ in repeats(args):
        in_process, over_http = await one_alone(tokens)
        note("one request in process, milliseconds on the clock", in_process)
        note("the same over HTTP, milliseconds on the clock", over_http)

    def step(plan: StepPlan) -> None:
        time.sleep(args.step_ms / 1e3)

    info = attrs.evolve(INFO, num_blocks=160 * count)
    executor = FakeExecutor(info, on_launch=step, next_token=lambda context, index: ord("a"))
    settings = EngineSettings(max_num_seqs=count, max_num_batched_tokens=max(512, 16 * count))
    async with open_engine(FakeModel(), executor=executor, settings=settings) as engine:
        async with served(application(engine)) as port:
            await all_at_once(count, partial(read_over_http, port, 8))
            for _ in repeats(args):
                generations: list[Generation] = []

                async def alone(index: int, generations: list[Generation] = generations) -> None:
                    generations.append(await read_in_process(engine, tokens, index))

                in_process = await all_at_once(count, alone)
                waits = [1e3 * generation.timings.queue for generation in generations]
                note("request: queue wait, milliseconds on the clock", *waits)
                events = 0

                async def through(index: int) -> None:
                    nonlocal events
                    seen = await read_over_http(port, tokens, index)
                    events += seen

                with waiting() as lengths:
                    over_http = await all_at_once(count, through)
                note("channel: tokens that wait for their reader", *lengths)
                note("token: HTTP, both ends", 1e6 * (over_http - in_process) / (count * tokens))
                note("event: tokens joined in one", count * tokens / events)
            before = engine.statistics()
            await all_at_once(count, partial(read_over_http, port, 2000, leave_after=2))
            while engine.statistics().num_requests:  # noqa: ASYNC110  what is waited for has no event
                await trio.sleep(0.001)
            after, core = engine.statistics(), await engine.settled()
            note("clients that left", count)
            note("aborted for it", after.finished.get("abort", 0) - before.finished.get("abort", 0))
            note("blocks not given back", core.num_blocks - core.num_free_blocks)
    return found


def application(engine: Engine, **settings: Any) -> App:
    """A server's application for it."""
    return create_app(ServerSettings(log_level="error", **settings), registry=Registry({"fake": engine}))


async def outside_hypercorn(count: int, tokens: int) -> float:
    """Microseconds a token, from the core's output to the bytes of its event, when each has an event of its own."""
    async with paced_engine(None, count, tokens) as (engine, turns):
        app = application(engine)
        await all_at_once(count, partial(read_from_app, app, 2))
        seconds = []
        for length in (1, tokens):  # what a request costs is in both, and is taken off
            so_far = watch(turns)
            await all_at_once(count, partial(read_from_app, app, length))
            seconds.append(so_far()[0])
    return 1e6 * (seconds[1] - seconds[0]) / (count * (tokens - 1))


async def one_alone(tokens: int) -> tuple[float, float]:
    """Milliseconds of one request, in process and over HTTP, from an engine that computes nothing."""
    executor = FakeExecutor(INFO, next_token=lambda context, index: ord("a"))
    async with open_engine(FakeModel(), executor=executor) as engine, served(application(engine)) as port:
        await read_over_http(port, tokens, 0)
        began = time.perf_counter()
        await read_in_process(engine, tokens, 1)
        between = time.perf_counter()
        await read_over_http(port, tokens, 2)
        return 1e3 * (between - began), 1e3 * (time.perf_counter() - between)


@contextmanager
def waiting() -> Iterator[list[int]]:
    """How many tokens were in a channel whenever its reader took them."""
    lengths: list[int] = []
    drain = Generation.drain

    def counted(generation: Generation) -> Any:
        deltas = drain(generation)
        if deltas:
            lengths.append(sum(len(delta.token_ids) for delta in deltas))
        return deltas

    Generation.drain = counted  # type: ignore[assignment,method-assign]
    try:
        yield lengths
    finally:
        Generation.drain = drain  # type: ignore[method-assign]
