"""serve() in this process: loading, signals, drain, death."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from trio_llm.config import ServerSettings
from trio_llm.core.executor import FakeExecutor
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.simulation import FakeModel
from trio_llm.errors import ConfigurationError, EngineDead, ModelLoadError
from trio_llm.server.serve import serve

CHAT = "/v1/chat/completions"
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}


@asynccontextmanager
async def running(make_server, executor, *, expect=None, **settings):
    """serve() as a task; the block gets a Server, and ends when serve() has."""
    opener = partial(open_engine, FakeModel(), executor=executor)
    closed = trio.Event()
    found = {}

    async def run(*, task_status):
        try:
            await serve(
                ServerSettings(port=0, **settings),
                open_engine=opener,
                on_ready=lambda url, app: found.update(url=url, app=app),
                task_status=task_status,
            )
        except Exception as error:
            found["error"] = error
        closed.set()

    async with trio.open_nursery() as nursery:
        url = await nursery.start(run)
        app = found["app"]
        server = make_server(app, app.registry.get("fake"), executor, int(url.rpartition(":")[2]), trio.Event(), closed)
        try:
            yield server
            with trio.fail_after(10):
                await closed.wait()
        finally:
            for client in server.clients:
                client.stream.socket.close()
            if executor.on_launch is not None:
                executor.on_launch.open()
        assert type(found.get("error")) is (expect or type(None))


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


async def test_drain(make_server, gated):
    executor, gate = gated
    async with running(make_server, executor) as server:
        idle = await server.connect()
        await idle.send("GET", "/health/ready")
        assert (await idle.receive()).status == 200
        clients = [await server.connect() for _ in range(8)]
        for index, client in enumerate(clients):
            await client.send("POST", CHAT, {**HI, "stream": index % 2 == 0})
        await server.admitted(8)
        terminate()
        await server.until(lambda: server.app.lifecycle.draining)
        answer = await server.ask("GET", "/health/ready")
        assert (answer.status, answer.json["status"]) == (503, "shutting_down")
        assert (await server.ask("GET", "/health/live")).status == 200
        answer = await server.ask("POST", CHAT, HI)
        assert (answer.status, answer.json["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in answer.headers
        gate.open()
        for index, client in enumerate(clients):
            answer = await client.receive()
            assert answer.status == 200
            if index % 2 == 0:
                assert answer.events[-2]["choices"][0]["finish_reason"] == "length"
        assert await idle.stream.receive_some() == b""


async def test_drain_delay_still_takes_requests(make_server, gated):
    executor, gate = gated
    gate.open()
    async with running(make_server, executor, drain_delay=60) as server:
        terminate()
        await server.until(lambda: server.app.lifecycle.leaving)
        assert (await server.ask("GET", "/health")).status == 503
        assert (await server.ask("POST", CHAT, HI)).status == 200
        terminate()


@pytest.mark.parametrize("hurried", [False, True])
async def test_what_does_not_finish_in_time_is_told_so(make_server, gated, hurried):
    executor, gate = gated
    async with running(make_server, executor, shutdown_timeout=60 if hurried else 0.01) as server:
        stream, unary = [await server.connect() for _ in range(2)]
        gate.let(3)
        await stream.send("POST", CHAT, {**HI, "stream": True, "max_tokens": 500})
        await stream.until(b'"content":""')
        await unary.send("POST", CHAT, {**HI, "max_tokens": 500})
        await server.admitted(2)
        terminate()
        if hurried:
            await server.until(lambda: server.app.lifecycle.draining)
            terminate()
        await stream.until(b'"code":"shutting_down"}}\n\n')
        await stream.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        answer = await unary.receive()
        assert (answer.status, answer.json["error"]["code"]) == (503, "shutting_down")
        gate.open()


async def test_engine_death(make_server, gated):
    executor, gate = gated
    async with running(make_server, executor, expect=EngineDead) as server:
        client = await server.connect()
        gate.let(2)
        await client.send("POST", CHAT, {**HI, "stream": True, "max_tokens": 500})
        await client.until(b'"role"')

        def step(now):
            raise MemoryError("gone")

        server.engine._worker.core.step = step
        gate.open()
        await client.until(b'"code":"engine_dead"}}\n\n')
        await client.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_it_listens_while_it_loads(make_server, gated):
    executor, gate = gated
    gate.open()
    go_on = trio.Event()

    @asynccontextmanager
    async def slow_engine():
        await go_on.wait()
        async with open_engine(FakeModel(), executor=executor) as engine:
            yield engine

    with trio.socket.socket() as probe:  # a port that is free
        await probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ready = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(
                serve,
                ServerSettings(port=port, served_model_name=("a", "b")),
                open_engine=slow_engine,
                on_ready=lambda url, app: ready.set(),
            )
        )
        server = make_server(None, None, executor, port, trio.Event(), trio.Event())
        with trio.fail_after(5):
            while True:
                try:
                    answer = await server.ask("GET", "/health/live")
                    break
                except OSError:
                    await trio.sleep(0.005)
        assert answer.status == 200
        for path in ("/health/ready", "/v1/models"):
            assert (await server.ask("GET", path)).status == 503
        go_on.set()
        await ready.wait()
        cards = (await server.ask("GET", "/v1/models")).json["data"]
        assert [card["id"] for card in cards] == ["a", "b"]
        for client in server.clients:
            client.stream.socket.close()
        terminate()


async def test_told_to_stop_while_loading():
    left = []

    @asynccontextmanager
    async def endless_engine():
        terminate()
        await trio.sleep_forever()
        yield

    def leave(code):
        left.append(code)
        raise SystemExit(code)

    with pytest.RaisesGroup(SystemExit, flatten_subgroups=True):
        await serve(ServerSettings(port=0), open_engine=endless_engine, leave=leave)
    assert left == [0]


@pytest.mark.parametrize("error", [ModelLoadError("no such model"), ZeroDivisionError("no such model")])
async def test_load_failure(error):
    @asynccontextmanager
    async def no_engine():
        raise error
        yield

    with pytest.raises(ModelLoadError, match="no such model"):
        await serve(ServerSettings(port=0), open_engine=no_engine)


async def test_busy_port():
    with trio.socket.socket() as taken:
        await taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve(ServerSettings(port=port))


async def test_unix_socket(make_server, tmp_path):
    path = tmp_path / "socket"
    ready = trio.Event()
    opener = partial(open_engine, FakeModel(), executor=FakeExecutor())
    async with trio.open_nursery() as nursery:
        settings = ServerSettings(uds=str(path))
        nursery.start_soon(partial(serve, settings, open_engine=opener, on_ready=lambda url, app: ready.set()))
        await ready.wait()
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        terminate()
    assert not path.exists()
