"""The engine as an embedding application sees it."""

from __future__ import annotations

import itertools
import os
import random
import uuid
from typing import TYPE_CHECKING, Any, Literal

import attrs
import structlog
import trio

from trio_llm.config import EngineSettings
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.request import FinishReason, Request
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import CoreStatistics
from trio_llm.engine.admission import Prompt, check_prompt, check_token_ids, longest_token
from trio_llm.engine.decoders import Decoders
from trio_llm.engine.generation import Generation
from trio_llm.engine.loading import Load
from trio_llm.engine.statistics import Counters, Observer, Statistics
from trio_llm.engine.worker import Add, Command, Drive, Report, Settle, Stop, Worker
from trio_llm.errors import EngineDead, InvalidRequest, QueueFull, ReaderStalled, RequestFailed, ShuttingDown
from trio_llm.prompt.truncation import Room, Truncation, room_for

if TYPE_CHECKING:
    from trio_llm.core.grammar import Grammar, GrammarCompiler

TOKENIZER_THREADS = 2
"""Prompts that are tokenised at once; long ones take seconds, and memory."""

COMPILER_THREADS = 2
"""Structured outputs that are compiled at once."""

logger = structlog.get_logger(__name__)

State = Literal["ready", "draining", "stuck", "dead"]


class Engine:
    """Makes Generations.  Made by `open_engine`; everything here belongs to the Trio thread."""

    task = "generate"
    name: str
    tokenizer: Any
    defaults: SamplingParams
    """The model's own sampling."""
    eos_token_ids: frozenset[int]
    max_model_len: int
    """Tokens, prompt and output together, that a request may have."""
    vocab_size: int
    batch_exact: bool
    """Whether a token's logits are known to be the same to the last bit whoever else is in the step."""
    load_seconds: float
    """Of the model, without the imports."""
    import_seconds: float
    """Of the libraries that loading needs, if they were not there already."""
    _decoders: Decoders
    _compiler: GrammarCompiler

    def __init__(self, load: Load, settings: EngineSettings, name: str | None, **worker_options: Any) -> None:
        self.settings = settings
        self._load = load
        self._name = name
        self._worker = Worker(self._load_core, interval=settings.stream_interval, **worker_options)
        self._counters = Counters()
        self._core_statistics = CoreStatistics()
        self._generations: dict[str, Generation] = {}
        """In flight, by request id."""
        self._by_core_id: dict[str, Generation] = {}
        self._serials = itertools.count()
        self._num_choices = 0
        """In flight, those included whose prompt is being tokenised."""
        self.tokenizing = trio.CapacityLimiter(TOKENIZER_THREADS)
        self._compiling = trio.CapacityLimiter(COMPILER_THREADS)
        self._num_queued_tokens = 0
        """Prompt tokens of those that wait for their first token."""
        self._settling: set[trio.Event] = set()
        self._loaded = trio.Event()
        self._load_error: BaseException | None = None
        self._over = trio.Event()
        """The worker has ended, or was given up."""
        self._closed_at: float | None = None
        self._draining = False
        self._stuck = False
        self._death: EngineDead | None = None
        self._body_scope = trio.CancelScope()
        self._work_scope = trio.CancelScope(shield=True)

    # --- public ---

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        truncation: Truncation | None = None,
        **fields: Any,
    ) -> Generation:
        """A request, which starts when the Generation is entered with `async with`.

        Args:
            prompt: a text to continue, token ids, chat messages, or a Conversation: messages with
                tools and other wishes for the chat template.
            params: how to sample and when to end; `fields` replace single fields of it.
            request_id: unique among those in flight; by default a random one.
            priority: lower runs first.
            cache_salt: only requests with the same salt share KV blocks; without sharing
                nobody can tell from the time to a first token what another has asked.
            truncation: how to cut a prompt that is too long; by default it is refused.

        Raises:
            InvalidRequest: a parameter is out of its range.
        """
        params = params or SamplingParams()
        if fields:
            params = attrs.evolve(params, **fields)
        request_id = f"req-{uuid.uuid4().hex}" if request_id is None else request_id
        return Generation(
            self,
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            truncation=truncation,
        )

    def abort(self, request_id: str) -> bool:
        """End a request as `Generation.abort` does; False if none of that id is in flight."""
        generation = self._generations.get(request_id)
        if generation is None:
            return False
        generation.abort()
        return True

    def statistics(self) -> Statistics:
        """A snapshot of all counters."""
        return self._counters.snapshot(self._core_statistics, len(self._generations), self._num_choices)

    async def settled(self) -> CoreStatistics:
        """Wait until the core has applied all that was asked of it so far; gives its statistics then.

        Raises:
            EngineDead: the engine died.
        """
        await trio.lowlevel.checkpoint()
        if not self._over.is_set():
            event = trio.Event()
            self._settling.add(event)
            self._post(Settle(event))
            try:
                await event.wait()
            finally:
                self._settling.discard(event)
        self._raise_if_dead()
        return self._core_statistics

    def drain(self) -> None:
        """Take no new request from now on (ShuttingDown); those in flight go on."""
        self._draining = True

    @property
    def observers(self) -> list[Observer]:
        """Who hears of tokens and ends; append to it."""
        return self._counters.observers

    @property
    def state(self) -> State:
        """How the engine is; new requests are welcome when it is "ready"."""
        if self._death is not None:
            return "dead"
        if self._stuck:
            return "stuck"
        return "draining" if self._draining else "ready"

    @property
    def heartbeat_age(self) -> float:
        """Seconds that the running step has taken so far; 0 between steps."""
        began = self._worker.turn_began
        return 0.0 if began is None else self._worker.clock() - began

    # --- for generations ---

    def _reserve(self, generation: Generation) -> None:
        """Enter a request under its id, and count its choices, or raise."""
        self._raise_if_dead()
        if self._draining:
            raise ShuttingDown(f"the engine {self.name} takes no new request")
        if generation.request_id in self._generations:
            raise InvalidRequest(f"the request id {generation.request_id!r} is in use", field="request_id")
        count = generation.params.n
        limit = self.settings.max_num_seqs + self.settings.max_num_queued_reqs
        limits = "max_num_seqs and max_num_queued_reqs"
        if count > limit:
            raise InvalidRequest(f"n is {count}, but {limits} let in {limit} choices in all", field="n", limit=limit)
        if self._num_choices + count > limit:
            message = f"the engine holds {self._num_choices} choices, and {limits} let in {limit}"
            raise QueueFull(message, limit=limit)
        self._num_choices += count
        self._generations[generation.request_id] = generation

    def _release(self, generation: Generation) -> None:
        # the id may have a new bearer already
        if self._generations.get(generation.request_id) is generation:
            del self._generations[generation.request_id]
        self._by_core_id.pop(generation.core_id, None)

    def _admit(
        self,
        generation: Generation,
        prompt_token_ids: list[int],
        bad_words: tuple[tuple[int, ...], ...],
        grammar: Grammar | None,
    ) -> None:
        """Pass a request whose tokens are known on to the core, or raise."""
        self._raise_if_dead()
        params = generation.params
        check_prompt(prompt_token_ids, params.max_tokens, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        check_token_ids(params, self.vocab_size)
        queued, limit = self._num_queued_tokens, self.settings.max_num_queued_tokens
        # an empty queue takes any prompt, or one above the limit could never be served
        if queued and queued + len(prompt_token_ids) > limit:
            raise QueueFull(f"{queued} prompt tokens are queued, of at most {limit}", limit=limit)
        room = self.max_model_len - len(prompt_token_ids)
        params = params.resolved(self.defaults, max_tokens=room, seed=draw_seed())
        # an id may be used again at once, while outputs of its first bearer are on their way
        core_id = f"{generation.request_id}/{next(self._serials)}"
        generation._begin(core_id, prompt_token_ids, params)
        self._by_core_id[core_id] = generation
        self._num_queued_tokens += len(prompt_token_ids)
        self._counters.admitted += 1
        # a text that is complete ends, also for those who ignore end tokens
        eos_token_ids = frozenset() if params.ignore_eos and grammar is None else self.eos_token_ids
        priority, salt = generation.priority, generation.cache_salt
        request = Request(core_id, prompt_token_ids, params, eos_token_ids, priority, salt, bad_words, grammar)
        self._post(Add(request))

    def _room_for(self, truncation: Truncation, max_tokens: int | None) -> Room:
        return room_for(
            truncation,
            max_model_len=self.max_model_len,
            max_tokens=max_tokens,
            max_characters=self._max_characters,
        )

    def _post(self, command: Command) -> None:
        self._worker.post(command)

    def _choices_ended(self, count: int) -> None:
        self._num_choices -= count

    def _left_queue(self, prompt_tokens: int) -> None:
        self._num_queued_tokens -= prompt_tokens

    # --- the worker's end of it ---

    def _load_core(self) -> EngineCore:
        """In the worker's thread, before anybody else sees the engine."""
        from trio_llm.core.grammar import GrammarCompiler  # imports numpy

        model, core = self._load()
        limits = [model.max_model_len, core.max_total_tokens]
        self.name = self._name or model.name
        self.tokenizer = model.tokenizer
        self.defaults = model.defaults
        self.load_seconds = getattr(model, "load_seconds", 0.0)
        self.import_seconds = getattr(model, "import_seconds", 0.0)
        self.eos_token_ids = frozenset(model.eos_token_ids)
        self.max_model_len = min(limits + ([self.settings.max_model_len] if self.settings.max_model_len else []))
        self.vocab_size = core.executor.info.vocab_size
        self.batch_exact = core.executor.info.batch_exact
        self._decoders = Decoders(model.tokenizer)
        self._max_characters = self.max_model_len * longest_token(model.tokenizer)
        self._compiler = GrammarCompiler(model.tokenizer, vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids)
        return core

    def _deliver(self, report: Report) -> None:
        """Hand a turn's outputs out.  Must not raise: in a callback that would end the Trio run."""
        if self._death is not None:
            return  # a thread that was given up has come back
        self._core_statistics = report.statistics
        self._loaded.set()
        for output in report.outputs:
            generation = self._by_core_id.get(output.request_id)
            if generation is None:
                self._counters.wasted_tokens += len(output.token_ids)
                continue
            try:
                generation._accept(output)
            except Exception as error:
                # no traceback: it could show the text; the reader gets it as the cause
                logger.error("delivery failed", request_id=generation.request_id, error=type(error).__name__)
                failure = RequestFailed(f"the request failed in decoding its text: {type(error).__name__}")
                failure.__cause__ = error
                generation._fail(failure)
        for event in report.settled:
            assert isinstance(event, trio.Event)
            event.set()

    # --- life and death ---

    async def _work(self, drive: Drive) -> None:
        """Run the worker; the scope is the watchdog's to cancel."""
        try:
            with self._work_scope:
                await drive(self._worker, self._deliver)
        except trio.Cancelled:
            raise
        except BaseException as error:
            if self._loaded.is_set():
                self._die(f"the engine {self.name} broke: {type(error).__name__}: {error}", error)
            else:
                self._load_error = error
        finally:
            self._over.set()
            self._loaded.set()
            for event in self._settling:
                event.set()

    async def _wait_until_loaded(self) -> None:
        await self._loaded.wait()
        if self._load_error is not None:
            raise self._load_error

    async def _watch(self) -> None:
        """The watchdog: until the worker has ended, look after stuck steps and stalled readers."""
        settings = self.settings
        period = max(0.01, min(1.0, settings.step_timeout / 4, settings.step_grace / 4, settings.stall_timeout / 4))
        with trio.CancelScope(shield=True):
            while not self._over.is_set():
                with trio.move_on_after(period):
                    await self._over.wait()
                self._check_step()
                self._check_readers()

    def _check_step(self) -> None:
        age = self.heartbeat_age
        if self._closed_at is not None and not self._worker.is_loaded:
            # loading takes as long as it takes, unless nobody wants the model any more
            age = trio.current_time() - self._closed_at
        was_stuck, self._stuck = self._stuck, age > self.settings.step_timeout
        if self._stuck and not was_stuck:
            logger.error("engine stuck", step_seconds=round(age, 3))
        if age > self.settings.step_timeout + self.settings.step_grace and not self._over.is_set():
            self._die(f"a step of the engine has hung for {age:.0f} seconds", None)
            self._work_scope.cancel()

    def _check_readers(self) -> None:
        now = trio.current_time()
        for generation in list(self._generations.values()):
            if generation._check_stall(now):
                logger.warning("reader stalled", request_id=generation.request_id)
                limit = self.settings.stall_timeout
                message = f"the reader took nothing for {limit:g} seconds"
                generation._fail(ReaderStalled(message, limit=limit), FinishReason.ABORT)

    def _close(self) -> None:
        """The block is over: end what still runs and let the worker go."""
        self._closed_at = trio.current_time()
        self._draining = True
        for generation in list(self._generations.values()):
            generation._fail(ShuttingDown("the engine was closed"), FinishReason.ABORT)
        self._post(Stop())

    def _die(self, message: str, cause: BaseException | None) -> None:
        """End everything with EngineDead, and the block with it."""
        if self._death is not None:
            return
        logger.critical("engine dead", reason=message)
        self._death = _dead(message, cause)
        for generation in list(self._generations.values()):
            generation._fail(_dead(message, cause))
        self._body_scope.cancel(reason="the engine died")

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise _dead(self._death.message, self._death.__cause__)


_seeds = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_seeds.seed)


def draw_seed() -> int:
    """The seed of a request that names none.  Nobody has to be unable to guess it, and the system takes long over a number."""
    return _seeds.getrandbits(64)


def _dead(message: str, cause: BaseException | None) -> EngineDead:
    """An EngineDead of one's own: tracebacks are not shared between tasks."""
    error = EngineDead(message)
    error.__cause__ = cause
    return error
