"""The worker: takes the commands, steps the core, hands the outputs over.

The core belongs to one thread.  Trio posts commands to the worker's inbox; every turn the
worker applies all that came and runs one step.  What is to be handed over then, by the Outbox's
judgement, goes in one call, however many requests there are.  A turn is `pump()`.  A thread runs it in production, a Trio task
in simulations.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Awaitable, Callable, Hashable

import attrs
import structlog
import trio

from trio_llm.core.engine_core import EngineCore
from trio_llm.core.request import FinishReason, Request
from trio_llm.core.step import CoreStatistics, SequenceOutput
from trio_llm.engine.outbox import Outbox
from trio_llm.errors import RequestFailed, TrioLLMError

logger = structlog.get_logger(__name__)


@attrs.frozen
class Add:
    """Queue a request."""

    request: Request


@attrs.frozen
class Finish:
    """End one choice of a request, or all of them (None)."""

    request_id: str
    index: int | None = None


@attrs.frozen
class Acknowledge:
    """The reader of a choice took tokens: credit to go on."""

    request_id: str
    index: int
    num_tokens: int


@attrs.frozen
class Settle:
    """Send `token` back when every command posted before it was applied."""

    token: Hashable


@attrs.frozen
class Stop:
    """Apply what came before and end; the rest of the inbox is never read."""


Command = Add | Finish | Acknowledge | Settle | Stop


@attrs.frozen
class Report:
    """All that there is to say since the last one."""

    outputs: tuple[SequenceOutput, ...]
    statistics: CoreStatistics
    settled: tuple[Hashable, ...] = ()


class Worker:
    """Owns the core.  `post` may be called from any thread, the rest from one.

    Args:
        load: makes the core; called in the worker's thread, since that thread alone
            touches the model.
        clock: seconds; the watchdog reads `turn_began` with the same clock.
        interval: seconds that outputs may be held back to be handed over together, while many are served.
    """

    def __init__(
        self, load: Callable[[], EngineCore], clock: Callable[[], float] = time.monotonic, *, interval: float = 0.0
    ) -> None:
        self.clock = clock
        self._outbox = Outbox(interval)
        self.deliver: Callable[[Report], object] = lambda report: None
        """Takes the reports; may raise trio.RunFinishedError when nobody is left to take it."""
        self.on_post: Callable[[], object] = lambda: None
        """Called after each post: wakes a driver that does not block on the inbox."""
        self.turn_began: float | None = None
        """When the running turn began; None between turns.  Read by the watchdog."""
        self.stopped = False
        self._load = load
        self._core: EngineCore | None = None
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._taken: list[Command] = []

    @property
    def core(self) -> EngineCore:
        """The core; only after load()."""
        assert self._core is not None, "the worker has not loaded its core"
        return self._core

    @property
    def is_loaded(self) -> bool:
        return self._core is not None

    def post(self, command: Command) -> None:
        """Leave a command for the next turn."""
        self._inbox.put(command)
        self.on_post()

    def run(self) -> None:
        """The thread: load, then turn after turn until Stop.

        Raises:
            Exception: what loading raised, or what broke the core.
        """
        self.load()
        try:
            while not self.stopped:
                if not self.pump():
                    self._wait()
        finally:
            self.close()

    def load(self) -> None:
        """Make the core; the first report says that it is there."""
        self._core = self._load()
        self._hand_over(Report((), self._core.statistics()))

    def close(self) -> None:
        """Close the core; idempotent."""
        if self._core is not None:
            self._core.close()

    def pump(self) -> bool:
        """One turn, without waiting for anything but the step itself.

        Returns:
            False when only a command can bring more to do, so that the next turn may wait for one.

        Raises:
            Exception: the core is broken.
        """
        core = self.core
        commands = self._take()
        if not commands and not core.has_work():
            return False
        self.turn_began = self.clock()
        try:
            report = self._turn(core, commands)
        except Exception:
            # what was made before is still its readers'
            self._hand_over(Report(tuple(self._outbox.take(everything=True)), core.statistics()))
            raise
        finally:
            # before the report goes out: who has it may look at the clock
            self.turn_began = None
        if report is not None:
            self._hand_over(report)
        return self.stopped or core.has_work()

    def _turn(self, core: EngineCore, commands: list[Command]) -> Report | None:
        outputs: list[SequenceOutput] = []
        settled: list[Hashable] = []
        for command in commands:
            self._apply(command, outputs, settled)
            if self.stopped:
                break
        if not self.stopped and core.has_work():
            outputs += core.step(self.clock())
        self._outbox.put(outputs, self.clock())
        nothing_follows = self.stopped or bool(settled) or not core.has_work()
        is_due = nothing_follows or self._outbox.is_due(core.queues.num_running)
        ready = self._outbox.take(everything=is_due)
        return Report(tuple(ready), core.statistics(), tuple(settled)) if ready or is_due else None

    def _apply(self, command: Command, outputs: list[SequenceOutput], settled: list[Hashable]) -> None:
        match command:
            case Add(request):
                error = self._add(request)
                if error is not None:
                    outputs.append(SequenceOutput(request.id, 0, (), FinishReason.ERROR, error))
            case Finish(request_id, index):
                self.core.finish(request_id, index)
            case Acknowledge(request_id, index, num_tokens):
                self.core.acknowledge(request_id, index, num_tokens)
            case Settle(token):
                settled.append(token)
            case Stop():
                self.stopped = True

    def _add(self, request: Request) -> TrioLLMError | None:
        try:
            self.core.add(request)
        except TrioLLMError as error:
            self.core.finish(request.id)
            return error
        except Exception as error:
            # the executor could not prepare this request's sampling; the others go on
            logger.error("request not taken", request_id=request.id, error=type(error).__name__)
            self.core.finish(request.id)
            failure = RequestFailed(f"the engine could not take the request: {type(error).__name__}")
            failure.__cause__ = error
            return failure
        return None

    def _hand_over(self, report: Report) -> None:
        try:
            self.deliver(report)
        except trio.RunFinishedError:
            # the Trio run ended without us; there is nobody to work for
            self.stopped = True

    def _take(self) -> list[Command]:
        commands, self._taken = self._taken, []
        while True:
            try:
                commands.append(self._inbox.get_nowait())
            except queue.Empty:
                return commands

    def _wait(self) -> None:
        """Block until a command comes; it is applied by the next turn."""
        self._taken.append(self._inbox.get())


Drive = Callable[[Worker, Callable[[Report], None]], Awaitable[None]]
"""Runs a worker, which delivers its reports to the callable on the Trio thread, until it stops."""


async def drive_in_thread(worker: Worker, deliver: Callable[[Report], None]) -> None:
    """Run a worker in a thread of its own."""
    token = trio.lowlevel.current_trio_token()
    worker.deliver = lambda report: token.run_sync_soon(deliver, report)
    await trio.to_thread.run_sync(
        worker.run, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1), thread_name="trio_llm engine"
    )
