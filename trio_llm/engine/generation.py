"""Generation: one request as an `async with` block.

All that the request owns belongs to the block.  There are many doors out of it and one
exit: `_end`.  Here, on the Trio thread, it is decided how a request ended and what it
used: the first end in token order wins, and tokens that the core computed beyond it are
dropped and counted as wasted.

Back-pressure is credit.  A choice may run `credit_window` tokens ahead of its reader; the
core plans nothing for it beyond that, and what the reader takes is acknowledged.  So the
channel, which has room for every choice's window and last word, is never full.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import attrs
import trio

from trio_llm.core.request import FinishReason
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import SequenceOutput, TokenLogprobs
from trio_llm.engine.admission import (
    Prompt,
    check_length,
    compile_grammar,
    tokenize,
    tokenize_bad_words,
    tokenize_truncated,
)
from trio_llm.engine.choice import Choice, Delta, Track
from trio_llm.engine.token_bytes import TokenBytes
from trio_llm.engine.worker import Acknowledge, Finish
from trio_llm.errors import TrioLLMError
from trio_llm.prompt.truncation import Dropped, Truncation

if TYPE_CHECKING:
    from trio_llm.engine.engine import Engine


@attrs.frozen
class Usage:
    """Tokens of a request; an end token counts, and so does the token that completes a stop string."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt: tokens whose KV blocks were found in the prefix cache."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@attrs.frozen
class Timings:
    """Where the time of a request went, in seconds; what has not happened yet has taken none."""

    queue: float = 0.0
    """From its admission to the first step that computed some of it."""
    prefill: float = 0.0
    """From there to its first token."""
    decode: float = 0.0
    """From its first token to its last."""


class Generation:
    """A request in flight; made by `Engine.generate`, used as `async with` and `async for`.

    Entering admits the request.  Iterating gives Deltas until every choice has ended.
    Leaving the block, by whatever door, takes the request out of the engine; it never
    waits, so it holds up nobody's cancellation.  What was made so far stays readable.

    Entering raises:
        InvalidRequest: the prompt is empty or wrong, the id is in use, or the structured output cannot be compiled.
        ContextLengthExceeded: prompt and wanted tokens do not fit.
        QueueFull: the engine holds as many requests as it may.
        ShuttingDown: the engine drains or is closed.
        EngineDead: the engine died.

    Iterating raises, after all that was made before:
        RequestFailed: this request failed.
        ReaderStalled: the reader took nothing for longer than the stall limit.
        ShuttingDown: the engine was closed under the request.
        EngineDead: the engine died.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int,
        cache_salt: str,
        truncation: Truncation | None = None,
    ) -> None:
        self.request_id = request_id
        self.priority = priority
        self.cache_salt = cache_salt
        self.prompt_token_ids: list[int] = []
        """Known once the block is entered."""
        self.dropped: Dropped | None = None
        """What `truncation` took from the prompt; None if nothing.  Known once the block is entered."""
        self.params = params
        """Resolved (no None left) once the block is entered."""
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        """Of the prompt's tokens after the first, where the request asks for them; known with the first delta."""
        self.choices = [Choice(index) for index in range(params.n)]
        self.on_arrival: Callable[[], object] | None = None
        """Called on the Trio thread whenever there is something to drain, or nothing more will come.
        For who reads several at once; must be quick, never awaits."""
        self.core_id = ""
        """The core's name for it, never used again; empty until it is admitted."""
        self._engine = engine
        self._prompt = prompt
        self._truncation = truncation
        self._tracks: list[Track] = []
        self._send: trio.MemorySendChannel[Delta] | None = None
        self._receive: trio.MemoryReceiveChannel[Delta] | None = None
        self._num_waiting = 0
        """Deltas in the channel."""
        self._admitted_at = 0.0
        self._started_at = 0.0
        self._first_token_at = 0.0
        self._last_token_at = 0.0
        self._cached_tokens = 0
        self._has_token = False
        self._full_since: float | None = None
        """When the reader last moved, while some choice's window is full."""
        self._abort_requested = False
        self._ended = False
        self._failure: TrioLLMError | None = None

    async def __aenter__(self) -> Generation:
        if self._send is not None:
            raise RuntimeError("a Generation can be entered only once")
        engine = self._engine
        await trio.lowlevel.checkpoint()
        engine._reserve(self)
        # nothing is paused or cancelled between admission and the return: no request is left behind
        capacity = self.params.n * (engine.settings.credit_window + 1)
        self._send, self._receive = trio.open_memory_channel(capacity)
        try:
            limiter = engine.tokenizing
            truncation = self._truncation
            if truncation is None:
                check_length(self._prompt, engine._max_characters, max_model_len=engine.max_model_len)
                prompt_token_ids = await tokenize(engine.tokenizer, self._prompt, limiter)
            else:
                room = engine._room_for(truncation, self.params.max_tokens)
                prompt_token_ids, self.dropped = await tokenize_truncated(
                    engine.tokenizer, self._prompt, truncation, room, limiter
                )
            bad_words = await tokenize_bad_words(engine.tokenizer, self.params.bad_words, limiter)
            grammar = await compile_grammar(engine._compiler, self.params.structured_output, engine._compiling)
            if self._failure is not None:
                raise self._failure
            if not self._ended and not self._abort_requested:
                engine._admit(self, prompt_token_ids, bad_words, grammar)
        except BaseException:
            if not self._ended:
                self._ended = True
                engine._choices_ended(self.params.n)
                engine._release(self)
                self._send.close()
            self._receive.close()
            raise
        if self._abort_requested:
            self._end(FinishReason.ABORT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._receive is not None
        self._end(FinishReason.ABORT)
        self._receive.close()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        """The next delta; being cancelled here loses nothing."""
        if self._receive is None:
            raise RuntimeError("enter the Generation with `async with` before iterating over it")
        try:
            delta = await self._receive.receive()
        except trio.EndOfChannel:
            delta = None
        if delta is None:
            if self._failure is not None:
                raise self._failure from self._failure.__cause__
            raise StopAsyncIteration
        self._take(delta)
        return delta

    def drain(self) -> list[Delta]:
        """Everything that has arrived, without waiting; empty if nothing has."""
        deltas: list[Delta] = []
        # counted, as to find the channel empty is an exception, which costs more than all else here
        while self._num_waiting and self._receive is not None:
            try:
                delta = self._receive.receive_nowait()
            except trio.WouldBlock:  # it is on its way to somebody who waits for it
                break
            self._take(delta)
            deltas.append(delta)
        return deltas

    def abort(self) -> None:
        """End the request now; idempotent, never waits, and may be called from any task.

        Each choice that had not ended gets the finish reason "abort", and iterating ends
        normally after what was already made.
        """
        self._abort_requested = True
        if self.core_id:
            self._end(FinishReason.ABORT)

    @property
    def text(self) -> str:
        """Text of the first choice so far."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the first choice ended; None while it has not."""
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and of all choices so far."""
        completion_tokens = sum(len(choice.token_ids) for choice in self.choices)
        return Usage(len(self.prompt_token_ids), completion_tokens, self._cached_tokens)

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended; there may still be something to drain."""
        return self._ended

    @property
    def failure(self) -> TrioLLMError | None:
        """What iterating raises after all that was made before, once that is known."""
        return self._failure

    @property
    def timings(self) -> Timings:
        """Where the time went so far."""
        if not self._has_token:
            return Timings()
        return Timings(
            self._started_at - self._admitted_at,
            self._first_token_at - self._started_at,
            self._last_token_at - self._first_token_at,
        )

    @property
    def token_bytes(self) -> TokenBytes:
        """What single tokens of the output stand for."""
        return self._engine._decoders.token_bytes(self.params)

    # --- for the engine ---

    def _begin(self, core_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """The engine admitted the request."""
        self.core_id = core_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self._admitted_at = self._engine._worker.clock()
        decoder = self._engine._decoders.decoder(params)
        self._tracks = [Track(choice, decoder, prompt_token_ids, params) for choice in self.choices]

    def _accept(self, output: SequenceOutput) -> None:
        """Take an output of the core.  May raise what the tokenizer raises."""
        track = self._tracks[output.index]
        counters = self._engine._counters
        if self._ended or track.choice.finish_reason is not None:
            counters.wasted_tokens += len(output.token_ids)
            return
        if output.error is not None:
            self._fail(output.error)
            return
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        try:
            delta = track.absorb(output)
        except Exception:
            counters.wasted_tokens += len(output.token_ids)
            raise
        self._cached_tokens = output.num_cached_tokens
        self._started_at = output.started_at
        num_kept = len(delta.token_ids)
        counters.wasted_tokens += len(output.token_ids) - num_kept
        counters.generation_tokens += num_kept
        self._time(track, num_kept)
        self._give(track, delta)
        if delta.finish_reason is not None:
            self._engine._choices_ended(1)
            if output.finish_reason is None:
                self._engine._post(Finish(self.core_id, output.index))
            if all(choice.finish_reason is not None for choice in self.choices):
                self._end(delta.finish_reason)

    def _give(self, track: Track, delta: Delta) -> None:
        assert self._send is not None
        track.choice.extend(delta)
        track.num_ahead += len(delta.token_ids)
        if track.num_ahead >= self._engine.settings.credit_window and self._full_since is None:
            self._full_since = trio.current_time()
        self._put(delta)
        if self.on_arrival is not None:
            self.on_arrival()

    def _put(self, delta: Delta) -> None:
        assert self._send is not None
        self._send.send_nowait(delta)
        self._num_waiting += 1

    def _time(self, track: Track, num_tokens: int) -> None:
        now = self._last_token_at = self._engine._worker.clock()
        counters = self._engine._counters
        if not self._has_token:
            self._has_token = True
            self._first_token_at = now
            self._engine._left_queue(len(self.prompt_token_ids))
            counters.first_token(now - self._admitted_at, len(self.prompt_token_ids))
        elif track.last_output is not None and num_tokens:
            counters.inter_token((now - track.last_output) / num_tokens, num_tokens)
        track.last_output = now

    def _take(self, delta: Delta) -> None:
        """The reader has the delta: give credit for it."""
        self._num_waiting -= 1
        if not delta.token_ids:
            return
        track = self._tracks[delta.index]
        window = self._engine.settings.credit_window
        track.num_taken += len(delta.token_ids)
        # in halves of a window: a reader who took all that there is leaves less than half of it
        # unacknowledged, so the core is never paused for good, and posts are few
        if track.num_taken >= max(1, window // 2) and track.choice.finish_reason is None:
            self._engine._post(Acknowledge(self.core_id, delta.index, track.num_taken))
            track.num_ahead -= track.num_taken
            track.num_taken = 0
        if self._full_since is not None:
            is_full = any(other.num_ahead >= window and not other.choice.finish_reason for other in self._tracks)
            self._full_since = trio.current_time() if is_full else None

    def _check_stall(self, now: float) -> bool:
        """Whether the reader has left a window full for too long."""
        limit = self._engine.settings.stall_timeout
        if self._ended or self._full_since is None or now - self._full_since < limit:
            return False
        window = self._engine.settings.credit_window
        return any(track.num_ahead >= window and not track.choice.finish_reason for track in self._tracks)

    def _fail(self, failure: TrioLLMError, reason: FinishReason = FinishReason.ERROR) -> None:
        """End the request with an error that its reader will see."""
        self._end(reason, failure)

    def _end(self, reason: FinishReason, failure: TrioLLMError | None = None) -> None:
        """The one exit; idempotent.  `reason` is for the choices that have not ended."""
        if self._ended:
            return
        self._ended = True
        self._failure = failure
        assert self._send is not None
        unfinished = [choice for choice in self.choices if choice.finish_reason is None]
        self._engine._choices_ended(len(unfinished))
        if unfinished and self.core_id:
            self._engine._post(Finish(self.core_id))
        for choice in unfinished:
            delta = Delta(choice.index, self._last_words(choice), (), reason)
            choice.extend(delta)
            if failure is None:
                self._put(delta)
        self._send.close()
        if self.on_arrival is not None:
            self.on_arrival()
        self._engine._release(self)
        if self.core_id:
            if not self._has_token:
                self._engine._left_queue(len(self.prompt_token_ids))
            self._engine._counters.request_finished(
                self._overall_reason(), len(self.prompt_token_ids), self.usage.completion_tokens
            )

    def _last_words(self, choice: Choice) -> str:
        if not self._tracks:
            return ""
        try:
            return self._tracks[choice.index].flush()[0]
        except Exception:
            return ""  # a broken tokenizer has had its say already

    def _overall_reason(self) -> FinishReason:
        """One reason for the request: the least regular of its choices'."""
        reasons = {choice.finish_reason for choice in self.choices}
        for reason in (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH):
            if reason in reasons:
                return reason
        return FinishReason.STOP
