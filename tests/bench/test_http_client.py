"""The measuring client's HTTP/1.1 and event parsing, over streams in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from http_client import Client, EventParser, ProtocolError
from trio.testing import memory_stream_pair

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Server:
    """Answers each request on each connection with the next of `answers`, in pieces of `size` bytes."""

    def __init__(self, nursery: trio.Nursery, *answers: bytes, size: int = 65536, close: bool = False) -> None:
        self.nursery = nursery
        self.answers = list(answers)
        self.size = size
        self.close = close
        self.num_connections = 0
        self.received = b""

    async def connect(self) -> trio.abc.Stream:
        ours, theirs = memory_stream_pair()
        self.num_connections += 1
        self.nursery.start_soon(self._serve, ours)
        return theirs

    async def _serve(self, stream: trio.abc.Stream) -> None:
        async with stream:
            while request := await stream.receive_some():
                self.received += request
                answer = self.answers.pop(0)
                for start in range(0, len(answer), self.size):
                    await stream.send_all(answer[start : start + self.size])
                if self.close:
                    return


async def body_of(client: Client) -> bytes:
    await client.request("GET", "/", {})
    body = b""
    while piece := await client.receive_body():
        body += piece
    return body


@pytest.mark.parametrize("size", [1, 2, 3, 7, 65536])
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", b""),
        (CHUNKED + b"3\r\nhel\r\n2;name=value\r\nlo\r\n0\r\n\r\n", b"hello"),
        (CHUNKED + b"A\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n", b"0123456789"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    ],
)
async def test_bodies_however_they_are_cut(answer: bytes, body: bytes, size: int, nursery: trio.Nursery) -> None:
    server = Server(nursery, answer, answer, size=size)
    client = Client(server.connect, "server")

    assert await body_of(client) == body
    assert await body_of(client) == body

    assert server.num_connections == 1
    await client.aclose()


async def test_a_body_may_end_with_its_connection(nursery: trio.Nursery) -> None:
    server = Server(nursery, b"HTTP/1.1 200 OK\r\n\r\nuntil the end", close=True)
    client = Client(server.connect, "server")

    assert await body_of(client) == b"until the end"


async def test_a_connection_closed_while_idle_is_opened_again(nursery: trio.Nursery) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    server = Server(nursery, answer, answer, close=True)
    client = Client(server.connect, "server")

    assert [await body_of(client), await body_of(client)] == [b"ok", b"ok"]
    assert server.num_connections == 2
    await client.aclose()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "inside the response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", "inside the body"),
        (CHUNKED + b"5\r\nhel", "inside the body"),
        (CHUNKED + b"5\r\nhello\r\n", "inside the response"),
        (CHUNKED + b"3\r\nhello\r\n0\r\n\r\n", "longer than it said"),
        (b"SSH-2.0-server\r\n", "no HTTP/1 status line"),
    ],
)
async def test_an_answer_cut_short_is_an_error(answer: bytes, message: str, nursery: trio.Nursery) -> None:
    client = Client(Server(nursery, answer, close=True).connect, "server")

    with pytest.raises(ProtocolError, match=message):
        await body_of(client)
    await client.aclose()


async def test_what_is_sent(nursery: trio.Nursery) -> None:
    server = Server(nursery, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    client = Client(server.connect, "server:80")

    head = await client.request("POST", "/v1/x", {"Accept": "text/event-stream"}, b"{}")

    assert head.status == 200
    assert server.received == (
        b"POST /v1/x HTTP/1.1\r\nHost: server:80\r\nContent-Length: 2\r\nAccept: text/event-stream\r\n\r\n{}"
    )
    await client.aclose()


def split(data: bytes, size: int) -> list[bytes]:
    parser = EventParser()
    return [event for at in range(0, len(data), size) for event in parser.feed(data[at : at + size])]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("change", [lambda data: data, lambda data: data.replace(b"\n", b"\r\n")])
def test_events_however_they_are_cut(size: int, change: Callable[[bytes], bytes]) -> None:
    data = b": keep-alive\n\ndata: one\n\nevent: ping\n\nid: 1\ndata:two\ndata: lines\n\ndata: [DONE]\n\ndata: cut"

    assert split(change(data), size) == [b"one", b"two\nlines", b"[DONE]"]
