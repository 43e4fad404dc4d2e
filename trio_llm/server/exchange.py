"""One HTTP request and what it owns, from its first byte to the last of its answer."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import secrets
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

import attrs
import trio

from trio_llm.engine.choice import Delta
from trio_llm.engine.generation import Generation
from trio_llm.errors import RequestFailed, TrioLLMError

T = TypeVar("T")


_secret = secrets.token_bytes(32)
_numbers = itertools.count()


def new_request_id() -> str:
    """An id that no client can guess or choose: a keyed hash of a number, as the system takes long over random bytes.

    The process is in it too: one that was forked has the same key and goes on with the same numbers.
    """
    number = b"%d %d" % (os.getpid(), next(_numbers))
    return hashlib.blake2b(number, key=_secret, digest_size=12).hexdigest()


def _as_it_is(error: TrioLLMError) -> None:
    """Errors speak in the engine's words."""


@attrs.define(eq=False)
class Exchange:
    """What a request owns, so that every way out of it gives all of it back.

    Most have one generation; a request with several prompts has one for each.  The connection class
    holds it open around handler and response: whatever ends either, be it cancellation between the
    two, all generations are left.  `abandon` and `fail` are synchronous,
    because the handler may be stuck in a write when they are called.
    """

    method: str
    path: str
    request_id: str = attrs.field(factory=new_request_id)
    """Ours: the engine's id of the request too."""
    echoed_id: str = ""
    """What the x-request-id header of the answer says: the client's own, else ours."""
    model: str | None = None
    generations: list[Generation] = attrs.field(factory=list)
    """Those that were admitted, in the order of the prompts."""
    explain: Callable[[TrioLLMError], object] = _as_it_is
    """Lets an error of a generation speak in the client's words."""
    failure: TrioLLMError | None = None
    """Why the server ended it; takes the place of the abort that carried it out."""
    error: TrioLLMError | None = None
    """What it was answered with."""
    started: float = attrs.field(factory=trio.current_time)
    first_token: float | None = None
    prompt_tokens: int | None = None
    """Of a request that has no generation."""
    status: int | None = None
    client_gone: bool = False
    said_all: bool = False
    """The piece of a stream that is written now is its last."""
    _stack: contextlib.AsyncExitStack = attrs.field(factory=contextlib.AsyncExitStack, init=False)
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _arrived: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def end(self) -> None:
        """Give back all that it owns, before it is left; nothing is to be entered any more."""
        await self._stack.aclose()

    def at_end(self, function: Callable[[], object]) -> None:
        """Have something called when it ends, however it does."""
        self._stack.callback(function)

    async def enter(self, generation: Generation) -> None:
        """Start a generation that ends with this exchange, at the latest.

        Raises:
            TrioLLMError: it was refused, or the server is ending this exchange.
        """
        generation.on_arrival = self._note_arrival
        await self._stack.enter_async_context(generation)
        if self.failure is not None:  # it came while the prompt was being tokenised
            raise self.failure
        self.generations.append(generation)

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Wait for something that needs no generation, at most until the server ends this exchange.

        Raises:
            TrioLLMError: it failed, or the server ended the exchange.
        """
        with self._scope:
            return await work()
        assert self.failure is not None
        raise self.failure

    async def receive(self, silent_until: float = math.inf) -> list[tuple[int, Delta]]:
        """Wait until something has come of any generation, and take all that is there.

        Being cancelled here loses nothing.

        Args:
            silent_until: for how long to wait where nothing comes, on Trio's clock.

        Returns:
            Deltas, each with the place of its generation; none if nothing has come.

        Raises:
            TrioLLMError: a generation failed and all that it made before was taken, or the server
                ended the exchange.
        """
        with trio.move_on_at(silent_until):
            while not (deltas := self._take()):
                await self._arrived.wait()
                self._arrived = trio.Event()
            return deltas
        return self._take()

    def _take(self) -> list[tuple[int, Delta]]:
        deltas = [(place, delta) for place, generation in enumerate(self.generations) for delta in generation.drain()]
        if self.failure is not None:
            raise self.failure
        if deltas:
            if self.first_token is None:
                self.first_token = trio.current_time()
            return deltas
        for generation in self.generations:
            if generation.failure is not None:
                self.explain(generation.failure)
                raise generation.failure from generation.failure.__cause__
        if self._is_over():
            raise RequestFailed("the generation ended early")
        return deltas

    def _is_over(self) -> bool:
        return all(generation.is_over for generation in self.generations)

    def _note_arrival(self) -> None:
        self._arrived.set()

    def abandon(self) -> None:
        """The client is gone: take its generations out of the engine at once."""
        for generation in self.generations:
            generation.abort()

    def fail(self, error: TrioLLMError) -> None:
        """End the exchange with an error of the server's: a status or, mid-stream, an error frame."""
        if self.failure is None:
            self.failure = error
            self.abandon()
            self._scope.cancel(reason="the server ends the exchange")
