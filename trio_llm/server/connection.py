"""Fenced HTTP/1.1 connections with write deadlines, on top of Hypercorn's protocol classes.

What differs from Hypercorn's own server, and why:

* A connection that fails ends alone: in Hypercorn any exception but OSError ends the process.
* A write that the peer does not take ends the connection at a deadline; Hypercorn waits for ever,
  and shields that wait from cancellation.
* The peer is listened to even while h11 is paused behind bytes that came too early: else one
  trailing byte hides a disconnect.
* HTTP/1.1 only.  Hypercorn cannot turn cleartext HTTP/2 off, and its HTTP/2 has no back-pressure;
  a WebSocket upgrade is an ordinary GET.
* What the HTTP parser refuses gets an error body like every other failure.
* Few writes: the head of an answer goes out with the first of its body, and the last of it with its end.

This leans on private parts of Hypercorn, hence the pin of its minor version.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import ssl
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import attrs
import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Request, Response
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.task_group import _handle as run_app
from hypercorn.trio.worker_context import EventWrapper, WorkerContext
from hypercorn.typing import AppWrapper, ASGIReceiveEvent, ConnectionState, Scope
from hypercorn.utils import parse_socket_addr

from trio_llm.server.openai.error_bodies import http_error_body

logger = logging.getLogger(__name__)

READ_SIZE = 2**16
READ_AHEAD = 2**16
"""Bytes that are read while a request still runs."""
AHEAD_PATIENCE = 1.0
"""Seconds for which a peer may have sent more than that.  The next request may well overtake the last
words about the one before; but a peer that goes on like this is cut off, since its disconnect could
not be seen behind bytes that are not read."""
WRITE_SIZE = 2**16
"""A write is cut into pieces of this size, and each has the whole deadline: a slow reader of a
large answer is not a stalled one."""
LINGER = 2.0
"""Seconds that a closed connection still reads, so that the peer can read the last answer: to close
with unread bytes would reset the connection and could destroy it."""


class PeerGone(Exception):
    """The peer closed the connection, or sent too much too early."""


class _ReadingPause(EventWrapper):
    """H11Protocol.can_read: while h11 is paused, keep reading, so that a close is still seen."""

    def __init__(self, stream: trio.abc.ReceiveStream, protocol: _HTTP1Protocol) -> None:
        super().__init__()
        self._stream = stream
        self._protocol = protocol
        self._reading: trio.CancelScope | None = None

    async def wait(self) -> None:
        ahead = 0
        while not self.is_set():
            with trio.CancelScope() as self._reading:
                if ahead >= READ_AHEAD:
                    await trio.sleep(AHEAD_PATIENCE)
                    raise PeerGone
                try:
                    data = await self._stream.receive_some(READ_SIZE)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    raise PeerGone from None
                if not data:
                    raise PeerGone
                ahead += len(data)
                self._protocol.connection.receive_data(bytes(data))

    async def set(self) -> None:
        await super().set()
        if self._reading is not None:
            self._reading.cancel(reason="h11 goes on")


class _Tasks(TaskGroup):
    """Hypercorn's, but that a message to the application gives nobody a turn where there is room for it."""

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[[Any], Awaitable[None]]
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        to_app, from_server = trio.open_memory_channel[ASGIReceiveEvent](config.max_app_queue_size)

        async def put(message: ASGIReceiveEvent) -> None:
            try:
                to_app.send_nowait(message)
            except trio.WouldBlock:
                await to_app.send(message)

        run_sync, run = trio.to_thread.run_sync, trio.from_thread.run
        self.spawn(run_app, app, config, scope, from_server.receive, send, run_sync, run)
        return put


class _HTTPStream(HTTPStream):
    """Knows which piece of a body is the last before it is written; the others take a shorter way."""

    protocol: _HTTP1Protocol
    is_last = False

    async def app_send(self, message: Any) -> None:
        is_body = message is not None and message["type"] == "http.response.body"
        self.is_last = is_body and not message.get("more_body", False)
        if not is_body or self.is_last or not self.protocol.takes_pieces(self):
            await super().app_send(message)
        elif body := message.get("body"):
            await self.protocol.send_piece(body)


class _HTTP1Protocol(H11Protocol):
    stream: _HTTPStream | None
    broken = False
    """A message was cut off in the middle; whatever is said after that is lost, and no error."""
    held = b""
    """Of the message, what is to be written together with what follows at once."""
    _is_chunked = False
    """Whether the answer's body is, or with HEAD would be, cut in chunks: h11 decides."""

    async def handle(self, event: Event) -> None:
        try:
            await super().handle(event)
        except h11.RemoteProtocolError as error:
            await self._send_error_response(error.error_status_hint)
            await self.send(Closed())

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response) and event.status_code >= 200:
            headers = [*event.headers, *self.config.response_headers("h11")]
            if self.keep_alive_requests >= self.config.keep_alive_max_requests:
                headers.append((b"connection", b"close"))
            status = event.status_code
            await self._send_h11_event(h11.Response(status_code=status, headers=headers, reason=_reason_phrase(status)))
        else:
            await super().stream_send(event)

    def takes_pieces(self, stream: _HTTPStream) -> bool:
        """Whether a stream's body is under way, and one of chunks."""
        is_body = self.stream is stream and stream.scope["method"] != "HEAD"
        return is_body and self._is_chunked and self.connection.our_state is h11.SEND_BODY and not self.broken

    async def send_piece(self, body: bytes) -> None:
        """Write a piece of a body that is not its last: what Hypercorn and h11 make of it, for a quarter of the work.

        A stream has many, and they change the state of neither.
        """
        data, self.held = b"%b%x\r\n%b\r\n" % (self.held, len(body), body), b""
        await self.send(RawData(data=data))

    async def _send_h11_event(self, event: Any) -> None:
        try:
            data = self.connection.send(event)
        except h11.LocalProtocolError:
            if not self.broken and self.connection.their_state is not h11.ERROR:
                raise
            return
        if type(event) is h11.Response:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in data.lower()
        if self.held:
            data, self.held = self.held + data, b""
        if type(event) is h11.Response or (type(event) is h11.Data and self._ends_with_it()):
            self.held = data
        elif data:
            await self.send(RawData(data=data))

    def _ends_with_it(self) -> bool:
        """Whether what the application says now is the last of its answer."""
        return self.stream is not None and self.stream.is_last

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.http_version not in (b"1.0", b"1.1"):
            raise h11.RemoteProtocolError("only HTTP/1.1 is spoken here", error_status_hint=505)

    async def _create_stream(self, request: h11.Request) -> None:
        # Hypercorn's makes WebSockets, too
        self.stream = _HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        self.stream.protocol = self
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1

    async def _send_error_response(self, status_code: int) -> None:
        error = sys.exception()  # always called by the one who caught it
        body = http_error_body(status_code, f"no HTTP request that can be served: {error}" if error else None)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await self._send_h11_event(
            h11.Response(
                status_code=status_code,
                headers=[*headers, *self.config.response_headers("h11")],
                reason=_reason_phrase(status_code),
            )
        )
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _reason_phrase(status_code: int) -> bytes:
    with contextlib.suppress(ValueError):
        return HTTPStatus(status_code).phrase.encode()
    return b""


@attrs.define(eq=False)
class Connection:
    """One accepted connection; `run` serves it to its end and raises nothing but cancellation."""

    app: ASGIWrapper
    config: Config
    context: WorkerContext
    write_timeout: float
    stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]
    _send_lock: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _is_idle: bool = attrs.field(default=False, init=False)
    _reading: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _serving: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _closing: bool = attrs.field(default=False, init=False)
    _tasks: _Tasks = attrs.field(factory=_Tasks, init=False)
    _protocol: _HTTP1Protocol = attrs.field(init=False)
    _socket: trio.socket.SocketType = attrs.field(init=False)
    _has_to_wait: bool = attrs.field(init=False)
    """Its socket cannot be written to directly."""

    async def run(self) -> None:
        """Serve the connection to its end.  What fails inside is logged here and ends nothing else."""
        try:
            await self._serve()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except* Exception:
            logger.exception("a connection failed")

    def __attrs_post_init__(self) -> None:
        self._socket = (self.stream.transport_stream if isinstance(self.stream, trio.SSLStream) else self.stream).socket
        self._has_to_wait = isinstance(self.stream, trio.SSLStream) or sys.platform == "win32"

    async def _serve(self) -> None:
        socket = self._socket
        try:
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
        except OSError:
            return  # gone before it was looked at
        if isinstance(self.stream, trio.SSLStream):
            with trio.move_on_after(self.config.keep_alive_timeout) as deadline:
                await self.stream.do_handshake()
            if deadline.cancelled_caught:
                return
        async with self._tasks:
            self._protocol = _HTTP1Protocol(
                self.app,
                self.config,
                self.context,
                self._tasks,
                ConnectionState({}),
                isinstance(self.stream, trio.SSLStream),
                client,
                server,
                self._send,
            )
            self._protocol.can_read = _ReadingPause(self.stream, self._protocol)
            self._tasks.spawn(self._leave_when_told)
            self._set_idle(True)
            try:
                with self._reading:
                    await self._read()
            except PeerGone:
                pass
            await self._protocol.handle(Closed())
            self._serving.cancel(reason="the connection is closed")

    async def _read(self) -> None:
        while True:
            try:
                data = await self.stream.receive_some(READ_SIZE)
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                return
            if not self._closing:
                await self._protocol.handle(RawData(bytes(data)))
            if not data:
                return

    async def _send(self, event: Event) -> None:
        """What the protocol calls to write, to close, and to say whether a request is under way."""
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Closed):
            await self._begin_close()
            await self._protocol.handle(Closed())
        elif isinstance(event, Updated):
            self._set_idle(event.idle)

    async def _write(self, data: bytes) -> None:
        view = memoryview(data)
        if self._send_lock.locked():
            await self._send_lock.acquire()
        else:
            # needs no lock, as it gives nobody a turn
            view = view[self._write_now(view) :]
            if not view:
                return
            self._send_lock.acquire_nowait()
        taken = False
        try:
            taken = await self._write_slowly(view)
        finally:
            self._send_lock.release()
            if not taken:
                # half a message may be out: the connection is of no more use.  Closing the
                # socket ends the reader, which tells the request that its client is gone
                self._protocol.broken = True
                self._socket.close()
        if not taken:
            await self._protocol.handle(Closed())

    def _write_now(self, data: memoryview) -> int:
        """Write what the socket takes at once, mostly all of it; gives how much that is.

        It needs no deadline, and to wait for nothing costs more than the write itself: a stream has many small ones.
        """
        if self._has_to_wait:
            return 0
        try:
            return os.write(self._socket.fileno(), data)
        except OSError:
            return 0  # full, or broken: the next that writes will see

    async def _write_slowly(self, data: memoryview) -> bool:
        """Write as the peer takes it; whether it took all."""
        with (
            contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError),
            trio.move_on_after(self.write_timeout) as deadline,
        ):
            for start in range(0, len(data), WRITE_SIZE):
                deadline.deadline = trio.current_time() + self.write_timeout
                await self.stream.send_all(data[start : start + WRITE_SIZE])
            return True
        return False

    async def _begin_close(self) -> None:
        """Say that nothing more comes; listen on a little if the peer is still sending its request."""
        self._closing = True
        still_sending = self._protocol.connection.their_state in {h11.SEND_BODY, h11.ERROR}
        self._reading.deadline = trio.current_time() + (LINGER if still_sending else 0)
        if isinstance(self.stream, trio.SSLStream):
            return  # TLS has no end of one direction; what closes the stream says good bye
        try:
            with trio.move_on_after(LINGER):
                await self.stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass

    def _set_idle(self, is_idle: bool) -> None:
        """No request is under way, or one is: a peer that is silent between two is let go after a while."""
        self._is_idle = is_idle
        if not self._closing:
            timeout = self.config.keep_alive_timeout if is_idle else math.inf
            self._reading.deadline = trio.current_time() + timeout

    async def _leave_when_told(self) -> None:
        with self._serving:
            await self.context.terminated.wait()
            if self._is_idle:  # else the end of its request does it
                self._reading.cancel(reason="no more connections")


async def serve_connections(
    app: Any,
    listeners: list[trio.SocketListener],
    *,
    config: Config,
    write_timeout: float,
    tls: ssl.SSLContext | None = None,
    stop: Callable[[], Awaitable[None]],
    grace: float = math.inf,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Accept connections and serve them until `stop()` returns, then let go of all.

    Args:
        app: an ASGI application.
        listeners: bound and listening; closed here.
        config: Hypercorn's, of which the limits of the HTTP parser and keep_alive_timeout are used.
        write_timeout: seconds in which a peer must take what is written to it.
        tls: speak HTTPS, with the certificate that is in it.
        stop: returns when no connection is to be accepted any more.  Idle connections are closed
            then, the others after their request.
        grace: seconds that running requests have from there.
    """
    context = WorkerContext(None)
    wrapped = ASGIWrapper(app)

    async def handle(stream: trio.SocketStream) -> None:
        if tls is None:
            await Connection(wrapped, config, context, write_timeout, stream).run()
            return
        # HTTP says itself where a message ends, so a peer may close without a word
        secured = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        await Connection(wrapped, config, context, write_timeout, secured).run()
        with trio.move_on_after(LINGER):
            await secured.aclose()

    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(partial(trio.serve_listeners, handle, listeners, handler_nursery=connections))
            task_status.started()
            await stop()
            accepting.cancel_scope.cancel(reason="no more connections")
        await context.terminated.set()
        connections.cancel_scope.deadline = trio.current_time() + grace
