"""A small HTTP/1.1 and server-sent-events client for measuring: little work a chunk, arrival times kept.

A general client costs several times as much processor time a chunk, and the load
generator often shares its processors with the server under test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import attrs
import trio

MAX_LINE = 65536


class ProtocolError(Exception):
    """The server's answer is not HTTP as we know it, or it ended too early."""


class _Unanswered(ProtocolError):
    """The connection ended before the first byte of an answer."""


Connect = Callable[[], Awaitable[trio.abc.Stream]]


@attrs.frozen
class Head:
    """Status and headers (names in lower case) of a response."""

    status: int
    headers: Mapping[str, str]


class Client:
    """One connection, opened when needed and kept alive; one request at a time.

    Args:
        connect: opens a stream to the server.
        host: the value of the Host header.
        read_size: bytes that are taken from the connection at a time.
    """

    def __init__(self, connect: Connect, host: str, *, read_size: int = 65536) -> None:
        self._connect = connect
        self._host = host
        self._read_size = read_size
        self._stream: trio.abc.Stream | None = None
        self._buffer = bytearray()
        # of the body being read: bytes left in its chunk or in all; None is until the connection closes
        self._left: int | None = 0
        self._chunked = False
        self._ended = True
        self._keep_alive = False
        self.received_at = 0.0
        """When the bytes that were last taken from the connection arrived, on Trio's clock."""

    async def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Head:
        """Send a request and return the head of its response; the body is then read with `receive_body`.

        Raises:
            ProtocolError: the answer is malformed or missing.
            OSError, trio.BrokenResourceError: there is no connection.
        """
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        message = "\r\n".join([*lines, "", ""]).encode() + body
        if not self._ended or not self._keep_alive:
            await self.aclose()
        if self._stream is not None:
            try:
                return await self._exchange(self._stream, message)
            except (_Unanswered, trio.BrokenResourceError):
                # the server closed the idle connection while we wrote: ask again on a new one
                await self.aclose()
        self._stream = await self._connect()
        return await self._exchange(self._stream, message)

    async def _exchange(self, stream: trio.abc.Stream, message: bytes) -> Head:
        self._ended = False
        await stream.send_all(message)
        head = await self._read_head()
        while 100 <= head.status < 200:
            head = await self._read_head()
        self._chunked = head.headers.get("transfer-encoding", "").lower() == "chunked"
        length = head.headers.get("content-length")
        self._left = 0 if self._chunked else None if length is None else _number(length, 10)
        self._ended = self._left == 0 and not self._chunked
        self._keep_alive = head.headers.get("connection", "").lower() != "close"
        return head

    async def receive_body(self) -> bytes:
        """The next piece of the body; empty after its end.

        Raises:
            ProtocolError: the connection ended inside the body.
        """
        if self._ended:
            return b""
        if self._chunked and self._left == 0:
            self._left = _number((await self._read_line()).split(b";")[0], 16)
            if self._left == 0:
                while await self._read_line():
                    pass  # trailers
                self._ended = True
                return b""
        if not self._buffer and not await self._fill():
            if self._left is not None:
                raise ProtocolError("the connection closed inside the body")
            self._ended, self._keep_alive = True, False
            return b""
        piece = bytes(self._buffer[: self._left])
        del self._buffer[: len(piece)]
        if self._left is not None:
            self._left -= len(piece)
            if self._left == 0:
                if not self._chunked:
                    self._ended = True
                elif await self._read_line():
                    raise ProtocolError("a chunk is longer than it said")
        return piece

    async def aclose(self) -> None:
        """Close the connection, if there is one."""
        self._buffer.clear()
        self._ended, self._keep_alive = True, False
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await trio.aclose_forcefully(stream)

    async def _read_head(self) -> Head:
        if not self._buffer and not await self._fill():
            raise _Unanswered("the connection closed without an answer")
        words = (await self._read_line()).split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise ProtocolError("the answer has no HTTP/1 status line")
        headers: dict[str, str] = {}
        while line := await self._read_line():
            name, _, value = line.partition(b":")
            headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
        return Head(int(words[1]), headers)

    async def _read_line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE:
                raise ProtocolError("a header or chunk line is too long")
            if not await self._fill():
                raise ProtocolError("the connection closed inside the response")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line.removesuffix(b"\r")

    async def _fill(self) -> bool:
        assert self._stream is not None
        data = await self._stream.receive_some(self._read_size)
        self.received_at = trio.current_time()
        self._buffer += data
        return bool(data)


def _number(text: str | bytes, base: int) -> int:
    try:
        return int(text, base)
    except ValueError:
        raise ProtocolError(f"{text!r} is no length") from None


class EventParser:
    """Server-sent events from the bytes of a body, whatever way those are cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that `piece` completes; comments and events without data give none."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
