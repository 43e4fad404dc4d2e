"""The engine of an embedding model: texts in, vectors out, many requests in one step.

It is smaller than the engine that generates, because a text is done in the one step that
computes it: no cache, no blocks, nothing that outlives a step.  One task makes the steps, each
in a thread; a request is a place in its queue, and who is cancelled takes it out again.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import attrs
import structlog
import trio

from trio_llm.config import EngineSettings
from trio_llm.core.request import FinishReason
from trio_llm.core.step import CoreStatistics
from trio_llm.engine.embedding_queue import EmbeddingQueue, Job
from trio_llm.engine.engine import TOKENIZER_THREADS, State
from trio_llm.engine.nursery import is_echo
from trio_llm.engine.statistics import Counters, Observer, Statistics
from trio_llm.engine.texts import Text, TextReader
from trio_llm.errors import (
    EngineDead,
    InvalidRequest,
    QueueFull,
    RequestFailed,
    ShuttingDown,
    TrioLLMError,
    UnsupportedParameter,
)

logger = structlog.get_logger(__name__)


class Encoder(Protocol):
    """What makes the vectors; called in one thread at a time.  An EncoderModel is one."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def embed(self, texts: Sequence[Sequence[int]], dimensions: Sequence[int | None] | None = None) -> Sequence[Any]:
        """A vector for each text: something with `tolist()`."""


@attrs.frozen
class Embeddings:
    """What a request is answered with."""

    vectors: list[array[float]]
    """One for each text, of 32-bit floats."""
    prompt_tokens: int
    """Of all texts together, special tokens included."""


class EmbeddingModel(Protocol):
    """What an embedder must know of a model beside its encoder; a LoadedEncoder is one."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def dimensions(self) -> Collection[int] | None: ...
    @property
    def load_seconds(self) -> float: ...
    @property
    def import_seconds(self) -> float: ...


@asynccontextmanager
async def open_embedder(
    model: str | EmbeddingModel,
    *,
    encoder: Encoder | None = None,
    settings: EngineSettings | None = None,
    name: str | None = None,
    **overrides: Any,
) -> AsyncIterator[Embedder]:
    """Load an embedding model and run an engine for it as long as the block runs.

    Args:
        model: a catalogue name, a Hugging Face directory or name, or a model that is loaded already.
        encoder: makes the vectors in place of the model.
        settings: limits; `overrides` replace single fields of it.
        name: what the engine is called; by default the model's name.

    Yields:
        The engine, ready.  At the end of the block every request that still waits ends.

    Raises:
        ModelLoadError: the model could not be found or loaded, or is not supported.
        ConfigurationError: a setting is wrong.
        EngineDead: a step hung; the block was cancelled.
    """
    settings = attrs.evolve(settings or EngineSettings(), **overrides)
    # of its own, so that no step waits for other threads of the program
    thread = trio.CapacityLimiter(1)
    load = partial(_load, model, encoder, settings)
    loaded, ready = await trio.to_thread.run_sync(load, abandon_on_cancel=True, limiter=thread)
    embedder = Embedder(loaded, ready, settings, name or loaded.name, thread)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(embedder._run)
        try:
            with embedder._body_scope:
                yield embedder
        except BaseException as error:
            failure = error
        finally:
            embedder._close()
            nursery.cancel_scope.cancel(reason="the embedder is closed")
    try:
        if embedder._death is not None and (failure is None or is_echo(failure)):
            raise EngineDead(embedder._death)
        if failure is not None:
            raise failure
    finally:
        del failure  # it would be in its own traceback


def _load(
    model: str | EmbeddingModel, encoder: Encoder | None, settings: EngineSettings
) -> tuple[EmbeddingModel, Encoder]:
    if isinstance(model, str):
        from trio_llm.models.encoders import load_encoder

        model = load_encoder(model, settings=settings)
    if encoder is None:
        from trio_llm.core.encoder import build_encoder
        from trio_llm.models.encoders import LoadedEncoder

        assert isinstance(model, LoadedEncoder), "a model that is not a LoadedEncoder comes with its own encoder"
        encoder = build_encoder(model)
    return model, encoder


class Embedder:
    """Makes embeddings.  Made by `open_embedder`; everything here belongs to the Trio thread."""

    task = "embed"
    name: str
    max_model_len: int
    """Tokens that a text may have."""

    def __init__(
        self, model: EmbeddingModel, encoder: Encoder, settings: EngineSettings, name: str, thread: trio.CapacityLimiter
    ) -> None:
        self.settings = settings
        self.name = name
        self.tokenizer = model.tokenizer
        self.max_model_len = model.max_model_len
        self.vocab_size = encoder.vocab_size
        self.load_seconds = model.load_seconds
        self.import_seconds = model.import_seconds
        self._dimensions = model.dimensions
        self._encoder = encoder
        self._thread = thread
        self.tokenizing = trio.CapacityLimiter(TOKENIZER_THREADS)
        self._reader = TextReader(model.tokenizer, self.max_model_len, self.vocab_size)
        self._queue = EmbeddingQueue(settings.max_num_seqs, settings.max_num_batched_tokens)
        self._entered: set[Job] = set()
        self._num_entering = 0
        """Requests whose texts are being tokenised."""
        self._num_running = 0
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._counters = Counters()
        self._arrival = trio.lowlevel.ParkingLot()
        self._step_began: float | None = None
        self._draining = False
        self._death: str | None = None
        self._body_scope = trio.CancelScope()

    @property
    def hidden_size(self) -> int:
        """Numbers in a vector."""
        return self._encoder.hidden_size

    async def embed(self, texts: Sequence[Text], *, dimensions: int | None = None) -> Embeddings:
        """The vectors of some texts.

        Args:
            texts: texts, or their token ids as they are, with whatever special tokens they have.
            dimensions: numbers in each vector, if it is to be shorter than it is.

        Raises:
            InvalidRequest: a text is empty or has tokens that the model does not know; `field` is "input".
            ContextLengthExceeded: a text is longer than the model takes.
            UnsupportedParameter: the model's vectors cannot be cut to so many dimensions.
            QueueFull, ShuttingDown, EngineDead: no request is taken now.
            RequestFailed: its texts could not be computed.
        """
        self._check_dimensions(dimensions)
        self._check_open()
        limit = self.settings.max_num_seqs + self.settings.max_num_queued_reqs
        if self._num_requests >= limit:
            limits = "max_num_seqs and max_num_queued_reqs"
            raise QueueFull(f"the engine holds {self._num_requests} requests, and {limits} let in {limit}", limit=limit)
        self._num_entering += 1
        try:
            token_ids = await trio.to_thread.run_sync(
                self._reader.token_ids, texts, abandon_on_cancel=True, limiter=self.tokenizing
            )
        finally:
            self._num_entering -= 1
        self._check_open()
        prompt_tokens = sum(map(len, token_ids))
        queued, limit = self._queue.num_tokens, self.settings.max_num_queued_tokens
        if queued and queued + prompt_tokens > limit:
            raise QueueFull(f"{queued} tokens are queued, of at most {limit}", limit=limit)
        job = Job(token_ids, dimensions)
        return await self._wait_for(job, prompt_tokens)

    async def _wait_for(self, job: Job, prompt_tokens: int) -> Embeddings:
        self._queue.add(job)
        self._entered.add(job)
        self._counters.admitted += 1
        self._arrival.unpark()
        reason = FinishReason.ABORT
        try:
            await job.over.wait()
            if job.error is not None:
                if isinstance(job.error, RequestFailed | EngineDead):
                    reason = FinishReason.ERROR
                raise job.error
            reason = FinishReason.STOP
            self._counters.prompt_tokens += prompt_tokens
            return Embeddings([vector for vector in job.vectors if vector is not None], prompt_tokens)
        finally:
            self._entered.discard(job)
            self._queue.remove(job)
            self._counters.request_finished(reason, prompt_tokens, 0)

    def drain(self) -> None:
        """Take no new request from now on (ShuttingDown); those that wait go on."""
        self._draining = True

    def abort(self, request_id: str) -> bool:
        """Embeddings are ended by cancelling who waits for them; no id of theirs is known."""
        return False

    def statistics(self) -> Statistics:
        """A snapshot of all counters; what is counted in sequences counts texts."""
        core = CoreStatistics(
            num_running=self._num_running,
            num_waiting=self._queue.num_texts,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
        )
        return self._counters.snapshot(core, self._num_requests, core.num_running + core.num_waiting)

    @property
    def observers(self) -> list[Observer]:
        """Who hears of ends; append to it."""
        return self._counters.observers

    @property
    def state(self) -> State:
        """How the engine is; new requests are welcome when it is "ready"."""
        if self._death is not None:
            return "dead"
        if self.heartbeat_age > self.settings.step_timeout:
            return "stuck"
        return "draining" if self._draining else "ready"

    @property
    def heartbeat_age(self) -> float:
        """Seconds that the running step has taken so far; 0 between steps."""
        return 0.0 if self._step_began is None else trio.current_time() - self._step_began

    @property
    def _num_requests(self) -> int:
        return len(self._entered) + self._num_entering

    def _check_open(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death)
        if self._draining:
            raise ShuttingDown(f"the engine {self.name} takes no new request")

    def _check_dimensions(self, wanted: int | None) -> None:
        size, possible = self.hidden_size, self._dimensions
        if wanted is None or wanted == size:
            return
        if wanted < 1 or possible is None:
            if not 1 <= wanted < size:
                raise InvalidRequest(
                    f"dimensions must be from 1 to {size}, got {wanted}", field="dimensions", limit=size
                )
        elif wanted not in possible:
            sizes = ", ".join(map(str, sorted(possible)))
            others = f"can only be cut to {sizes}" if sizes else "were not trained to be cut"
            message = f"dimensions is {wanted}, but this model's vectors have {size} and {others}"
            raise UnsupportedParameter(message, field="dimensions")

    # --- steps ---

    async def _run(self) -> None:
        """Step after step, until cancelled or dead; a step that runs is waited for."""
        while self._death is None:
            if not self._queue.num_texts:
                await self._arrival.park()
            elif not await self._step(self._queue.next_batch()):
                self._die()

    async def _step(self, batch: list[tuple[Job, int]]) -> bool:
        """Compute some texts; those that fail, each alone again.  False if it hangs."""
        batch = [(job, place) for job, place in batch if not job.over.is_set()]
        if not batch:
            return True
        texts = [job.texts[place] for job, place in batch]
        limit = self.settings.step_timeout + self.settings.step_grace
        failure: Exception | None = None
        vectors: list[array[float]] = []
        self._num_running, self._step_began = len(batch), trio.current_time()
        try:
            with trio.move_on_after(limit, shield=True) as deadline:
                vectors = await trio.to_thread.run_sync(
                    partial(_compute, self._encoder, texts, [job.dimensions for job, _ in batch]),
                    abandon_on_cancel=True,
                    limiter=self._thread,
                )
        except Exception as error:
            failure = error
        finally:
            self._num_running, self._step_began = 0, None
        if deadline.cancelled_caught:
            return False
        self._num_steps += 1
        if failure is None:
            self._num_computed_tokens += sum(map(len, texts))
            for (job, place), vector in zip(batch, vectors, strict=True):
                job.take(place, vector)
            return True
        if len(batch) == 1:
            logger.error("a text failed", error=type(failure).__name__)
            failed = RequestFailed(f"the request failed in the engine: {type(failure).__name__}")
            failed.__cause__ = failure
            batch[0][0].fail(failed)
            return True
        logger.warning("a step failed and is run again in parts", error=type(failure).__name__)
        for one in batch:
            if not await self._step([one]):
                return False
        return True

    def _close(self) -> None:
        self._draining = True
        self._end_all(ShuttingDown, "the engine was closed")

    def _die(self) -> None:
        self._death = f"a step of the engine {self.name} has hung"
        logger.critical("engine dead", reason=self._death)
        self._end_all(EngineDead, self._death)
        self._body_scope.cancel(reason="the engine died")

    def _end_all(self, kind: Callable[[str], TrioLLMError], message: str) -> None:
        for job in list(self._entered):
            job.fail(kind(message))  # an error of its own: tracebacks are not shared between tasks
            self._queue.remove(job)


def _compute(encoder: Encoder, texts: list[list[int]], dimensions: list[int | None]) -> list[array[float]]:
    """In the thread: the vectors as plain floats."""
    return [array("f", vector.tolist()) for vector in encoder.embed(texts, dimensions)]
