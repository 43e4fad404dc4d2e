"""The event stream of a request, as a response body that is not an async generator.

A generator could be closed at a yield by another task or by the garbage collector; this class is
only ever advanced, and what it reads from belongs to the request's Exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

import trio
from quart import Response
from quart.wrappers.response import ResponseBody

from trio_llm.engine.choice import Delta
from trio_llm.errors import TrioLLMError
from trio_llm.server.exchange import Exchange

KEEP_ALIVE = b": keep-alive\n\n"


class Writer(Protocol):
    """How an endpoint spells what comes; each method gives complete events, or nothing."""

    def opening(self, index: int) -> bytes:
        """What a choice begins with, whatever comes."""

    def content(self, place: int, index: int, deltas: Sequence[Delta]) -> bytes:
        """What has come of a choice.

        Args:
            place: of its generation.
            index: of the choice in the answer.
        """

    def closing(self, index: int, finish_reason: str, *, is_last: bool) -> bytes:
        """The end of a choice; `is_last` if no other is left."""

    def end(self) -> bytes:
        """The end of all."""

    def failure(self, error: TrioLLMError) -> bytes:
        """What is said in place of all that would have come."""


class EventStream(ResponseBody):
    """Joins all that has arrived since the last write into one write.

    Args:
        exchange: of the request, with its generations entered.
        writer: the endpoint's spelling.
        keep_alive: seconds of silence after which a comment is sent.
        first: the deltas that were waited for before the status line went out; None if none came in time.
    """

    def __init__(
        self,
        exchange: Exchange,
        writer: Writer,
        *,
        keep_alive: float,
        first: list[tuple[int, Delta]] | None,
    ) -> None:
        self._exchange = exchange
        self._writer = writer
        self._keep_alive = keep_alive
        self._first = first
        self._opened = False
        self._done = False
        self._num_choices = exchange.generations[0].params.n
        """Of each prompt."""
        self._running = self._num_choices * len(exchange.generations)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing: the exchange owns the generation."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._done:
            raise StopAsyncIteration
        try:
            if not self._opened:
                self._opened = True
                opening = b"".join(self._writer.opening(index) for index in range(self._running))
                # the status line goes out with the first piece, so that must not be waited for
                return opening + self._encode(self._first or ()) or KEEP_ALIVE
            return await self._next()
        except TrioLLMError as error:
            self._exchange.error = error
            self._end()
            return self._writer.failure(error)

    def _end(self) -> None:
        self._done = self._exchange.said_all = True

    async def _next(self) -> bytes:
        silent_until = trio.current_time() + self._keep_alive
        while deltas := await self._exchange.receive(silent_until):
            if events := self._encode(deltas):
                return events
        return KEEP_ALIVE

    def _encode(self, arrived: Iterable[tuple[int, Delta]]) -> bytes:
        parts: dict[tuple[int, int], list[Delta]] = {}
        for place, delta in arrived:
            parts.setdefault((place, delta.index), []).append(delta)
        events = []
        for (place, choice), deltas in parts.items():
            index = place * self._num_choices + choice
            events.append(self._writer.content(place, index, deltas))
            reason = deltas[-1].finish_reason
            if reason is not None:
                self._running -= 1
                events.append(self._writer.closing(index, reason.value, is_last=self._running == 0))
        if self._running == 0:
            self._end()
            events.append(self._writer.end())
        return b"".join(events)


async def stream(exchange: Exchange, writer: Writer, *, patience: float, keep_alive: float) -> Response:
    """The streamed answer of entered generations.

    Their first result is awaited for `patience` seconds, so that what fails in prefill still gets a
    status of its own.

    Raises:
        TrioLLMError: a generation failed so early.
    """
    first: list[tuple[int, Delta]] | None = None
    with trio.move_on_after(patience):
        first = await exchange.receive()
    body = EventStream(exchange, writer, keep_alive=keep_alive, first=first)
    response = Response(body, content_type="text/event-stream; charset=utf-8")
    response.headers["cache-control"] = "no-cache"
    response.headers["x-accel-buffering"] = "no"  # nginx would collect the events
    return response
