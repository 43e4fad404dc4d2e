"""Clients that take a few tokens a second of a long answer, so that the server has to hold back."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio
from answers import Answer
from http_client import Client, EventParser
from load import Load

RECEIVE_BUFFER = 4096
"""Bytes that the system may hold for such a client: with much more it would read the whole answer for it."""
READ_SIZE = 512
"""Bytes that it takes at a time: some two events."""
LENGTH = 4000
"""Tokens that it asks for."""


@attrs.define
class Taken:
    """What the slow clients got while they were there."""

    answers: list[Answer] = attrs.Factory(list)

    @property
    def chunks(self) -> int:
        """Chunks of text."""
        return sum(answer.num_chunks for answer in self.answers)

    @property
    def errors(self) -> int:
        """Answers that failed."""
        return sum(answer.failure is not None for answer in self.answers)


async def connect_slowly(host: str, port: int) -> trio.SocketStream:
    """A connection with a small buffer on this side."""
    family, _, _, _, address = (await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)  # a window is never taken back: set it first
    await sock.connect(address)
    return trio.SocketStream(sock)


@asynccontextmanager
async def slow_readers(
    count: int, host: str, port: int, path: str, load: Load, run: str, *, pause: float
) -> AsyncIterator[Taken]:
    """So many clients that read for as long as the block runs, and are gone then.

    Args:
        load: its `max_tokens` do not count for them: each asks for more than it will live to read.
        pause: seconds between two reads.
    """
    taken = Taken()
    load = attrs.evolve(load, max_tokens=LENGTH)

    async def read(index: int) -> None:
        client = Client(lambda: connect_slowly(host, port), f"{host}:{port}", read_size=READ_SIZE)
        answer = Answer(trio.current_time())
        taken.answers.append(answer)
        try:
            head = await client.request("POST", f"{path}/chat/completions", load.headers, load.body(run, index))
            if head.status != 200:
                answer.failure = f"HTTP {head.status}"
                return
            parser = EventParser()
            while piece := await client.receive_body():
                for event in parser.feed(piece):
                    answer.take(event, client.received_at)
                await trio.sleep(pause)
        finally:
            await client.aclose()

    async with trio.open_nursery() as nursery:
        for index in range(count):
            nursery.start_soon(read, index)
        yield taken
        nursery.cancel_scope.cancel(reason="the others are done")
