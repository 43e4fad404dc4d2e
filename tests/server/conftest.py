"""A server with a fake model, in this process and over real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Literal

import attrs
import hypercorn.trio
import orjson
import pytest
import trio
from hypercorn.config import Config

from trio_llm.config import ServerSettings
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.step import StepPlan
from trio_llm.engine.engine import Engine
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.registry import Registry
from trio_llm.engine.simulation import FakeModel
from trio_llm.server.app import create_app
from trio_llm.server.connection import serve_connections
from trio_llm.server.http import App

Launch = Literal["own", "hypercorn"]
INFO = ExecutorInfo(num_blocks=256, block_size=4, vocab_size=256, max_model_len=1024)
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
LONG = {**HI, "max_tokens": 900, "ignore_eos": True}


@attrs.define(eq=False)
class Gate:
    """Lets an executor's steps through one by one."""

    permits: threading.Semaphore = attrs.field(factory=lambda: threading.Semaphore(0))
    is_open: bool = False

    def __call__(self, plan: StepPlan) -> None:
        if not self.is_open:
            assert self.permits.acquire(timeout=60)

    def let(self, steps: int) -> None:
        """Let so many steps through."""
        self.permits.release(steps)

    def open(self) -> None:
        """Hold nothing back any more."""
        self.is_open = True
        self.permits.release(1000)


@attrs.frozen
class Answer:
    """A parsed HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of an event stream, parsed; comments are left out."""
        lines = [line for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [orjson.loads(line[6:]) if line != "data: [DONE]" else "DONE" for line in lines]


@attrs.define(eq=False)
class Client:
    """One raw HTTP/1.1 connection."""

    stream: trio.SocketStream
    buffer: bytes = b""

    async def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        """Write a request."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {path} HTTP/1.1", "host: test"]
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            headers = {"content-type": "application/json", "content-length": str(len(data)), **headers}
        head += [f"{name}: {value}" for name, value in headers.items()]
        await self.stream.send_all("\r\n".join([*head, "", ""]).encode() + data)

    async def until(self, mark: bytes) -> bytes:
        """Read up to and with a mark."""
        while mark not in self.buffer:
            data = await self.stream.receive_some(65536)
            if not data:
                raise EOFError(self.buffer)
            self.buffer += data
        before, _, self.buffer = self.buffer.partition(mark)
        return before + mark

    async def receive(self) -> Answer:
        """Read one answer to its end."""
        head = (await self.until(b"\r\n\r\n")).decode().split("\r\n")
        headers: dict[str, str] = {}
        for name, _, value in (line.partition(":") for line in head[1:] if line):
            before = headers.get(name.lower())
            headers[name.lower()] = value.strip() if before is None else f"{before}, {value.strip()}"
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await self.until(b"\r\n")).strip(), 16):
                while len(self.buffer) < size + 2:
                    self.buffer += await self.stream.receive_some(65536)
                body += self.buffer[:size]
                self.buffer = self.buffer[size + 2 :]
            await self.until(b"\r\n")
        else:
            while len(self.buffer) < int(headers.get("content-length", 0)):
                self.buffer += await self.stream.receive_some(65536)
            body, self.buffer = self.buffer, b""
        return Answer(int(head[0].split()[1]), headers, body)


@attrs.define(eq=False)
class Server:
    """A running server."""

    app: App
    engine: Engine
    executor: FakeExecutor
    port: int
    stop: trio.Event
    """Set to have it closed as a signal would."""
    closed: trio.Event
    clients: list[Client] = attrs.field(factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self, *, receive_buffer: int | None = None) -> Client:
        """A new connection, closed at the latest with the server."""
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, receive_buffer)
        try:
            await sock.connect(("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        client = Client(trio.SocketStream(sock))
        self.clients.append(client)
        return client

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own."""
        client = await self.connect()
        async with client.stream:
            await client.send(method, path, body, **headers)
            return await client.receive()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that happens on this thread."""
        with trio.fail_after(20):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await trio.sleep(0.001)

    async def admitted(self, count: int) -> None:
        """Wait until so many requests of those in flight are with the engine."""
        await self.until(lambda: sum(bool(exchange.generations) for exchange in self.app.exchanges) == count)

    async def assert_all_free(self) -> None:
        """Nothing is in flight, and every block is back."""
        await self.until(lambda: self.engine.statistics().num_requests == 0)
        core = await self.engine.settled()
        assert (core.num_running, core.num_waiting) == (0, 0)
        assert core.num_free_blocks == core.num_blocks


@asynccontextmanager
async def serving(
    launch: Launch = "own",
    *,
    executor: FakeExecutor | None = None,
    model: FakeModel | None = None,
    engine: dict[str, Any] | None = None,
    prepare: Callable[[App], object] = lambda app: None,
    **settings: Any,
) -> AsyncIterator[Server]:
    """A server under one of the two launches.

    Args:
        launch: "own" is what serve() uses, "hypercorn" what `hypercorn -k trio` uses.
        engine: fields of EngineSettings.
        prepare: called with the application before it is served.
        settings: fields of ServerSettings.
    """
    executor = executor or FakeExecutor(INFO)
    async with open_engine(model or FakeModel(), executor=executor, **(engine or {})) as running:
        app = create_app(ServerSettings(**settings), registry=Registry({"fake": running}))
        prepare(app)
        config = Config()
        config.errorlog = None
        stop, closed = trio.Event(), trio.Event()

        async def run(serve: Any, *, task_status: trio.TaskStatus[Any]) -> None:
            await serve(task_status=task_status)
            closed.set()

        async with trio.open_nursery() as nursery:
            if launch == "own":
                listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
                config.keep_alive_timeout = app.settings.keep_alive_timeout
                serve = partial(serve_connections, app, listeners, config=config, grace=0.1)
                await nursery.start(run, partial(serve, write_timeout=app.settings.write_timeout, stop=stop.wait))
                port = listeners[0].socket.getsockname()[1]
            else:
                config.bind = ["127.0.0.1:0"]
                (bind,) = await nursery.start(
                    run, partial(hypercorn.trio.serve, app, config, shutdown_trigger=stop.wait)
                )
                port = int(bind.rpartition(":")[2])
            server = Server(app, running, executor, port, stop, closed)
            try:
                yield server
            finally:
                for client in server.clients:
                    client.stream.socket.close()
                if isinstance(getattr(executor, "on_launch", None), Gate):
                    executor.on_launch.open()
            nursery.cancel_scope.cancel(reason="the test is over")


Serving = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture(params=["own", "hypercorn"])
def launch(request: pytest.FixtureRequest) -> Any:
    """Both ways to serve the application."""
    return request.param


@pytest.fixture(name="serving")
def _serving() -> Serving:
    return serving


@pytest.fixture(autouse=True)
def _drawn_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that names no seed gets the same in every run: what a random model says must not differ from run to run."""
    monkeypatch.setattr("trio_llm.engine.engine.draw_seed", lambda: 0)


@pytest.fixture
def gated() -> tuple[FakeExecutor, Gate]:
    """An executor whose steps wait for the test."""
    gate = Gate()
    return FakeExecutor(INFO, on_launch=gate), gate


@pytest.fixture
def make_server() -> type[Server]:
    """To look at a server that the test itself started."""
    return Server
