"""One seed: the whole engine under random traffic and faults, on a clock and a schedule that the seed decides.

Everything is the product's own but the executor and the driver: the worker's `pump` runs in
a task, turns and deliveries come late at random, and the invariants are asserted after every step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from random import Random
from unittest import mock

import attrs
import trio
from trio.testing import MockClock

from trio_llm.core.draft_model import DraftModel
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.request import Request, Sequence, Status
from trio_llm.core.sampling_params import StructuredOutput
from trio_llm.core.speculation import speculation_for
from trio_llm.core.step import SequenceOutput
from trio_llm.core.step_costs import StepCosts
from trio_llm.engine import generation as generation_module
from trio_llm.engine import outbox as outbox_module
from trio_llm.engine.engine import Engine
from trio_llm.engine.generation import Generation
from trio_llm.engine.nursery import run_engine
from trio_llm.engine.simulation import FakeModel
from trio_llm.engine.worker import Report, Worker
from trio_llm.errors import EngineDead, InvalidRequest, TrioLLMError

from .model import END, BrokenTokenizer, Crash, Form, SimulatedExecutor
from .reader import Reading, WalkedOutError
from .replay import replayable
from .stays import Stay, check_waits
from .traffic import Prompt, Script, make_traffic

DRAFT_FAULT_RATE = 0.15
"""Of the draft model's steps: it has far fewer than the engine."""


@attrs.define
class Totals:
    """What happened, over one seed or many."""

    doors: Counter[str] = attrs.field(factory=Counter)
    """How requests were left."""
    faults: Counter[str] = attrs.field(factory=Counter)
    events: Counter[str] = attrs.field(factory=Counter)
    """What else there was: steps, preemptions, ..."""

    def add(self, other: Totals) -> None:
        self.doors += other.doors
        self.faults += other.faults
        self.events += other.events


def simulate(seed: int, log: list[object] | None = None) -> Totals:
    """Play a seed; an AssertionError, or any other exception, is a defect.

    Args:
        seed: decides everything.
        log: takes all that happens, in order.
    """
    simulation = Simulation(seed, log)
    with (
        replayable(simulation.random),
        mock.patch.object(generation_module, "tokenize", slow_tokenize),
        mock.patch.object(generation_module, "compile_grammar", simulation.slow_compile),
        mock.patch.object(
            outbox_module, "SECONDS_PER_SEQUENCE", 1.0
        ),  # the simulated engine takes that long for a step
    ):
        trio.run(simulation.run, clock=MockClock(autojump_threshold=0))
    return simulation.totals


async def slow_tokenize(tokenizer: object, prompt: Prompt, limiter: trio.CapacityLimiter) -> list[int]:
    """In place of the thread: a wait on the simulated clock."""
    if prompt.delay:
        await trio.sleep(prompt.delay)
    return list(prompt)


class Simulation:
    """The world of one seed."""

    engine: Engine | None = None
    core: EngineCore

    def __init__(self, seed: int, log: list[object] | None = None) -> None:
        self.random = Random(seed)
        self.log = log
        self.totals = Totals()
        self.traffic = make_traffic(self.random)
        poisons = {script.params.seed: script.poison for script in self.traffic.scripts if script.poison is not None}
        self.forms = {script.params.structured_output: script.form for script in self.traffic.scripts if script.form}
        self.executor = SimulatedExecutor(self.traffic.info, self.random, self.traffic.fault_rate, poisons)
        # a draft model that mostly agrees: nothing is wrong with any request there, but its steps fail too
        self.draft_executor = SimulatedExecutor(self.traffic.info, Random(seed), DRAFT_FAULT_RATE, {})
        self.model = FakeModel(tokenizer=BrokenTokenizer(), eos_token_ids={END})
        self.generations: list[Generation] = []
        self.ends: Counter[tuple[str, int, int]] = Counter()
        """Reason, prompt tokens and completion tokens of each request that ended, as observers hear it."""
        self.stays: dict[str, Stay] = {}
        """By the core's id of a request."""
        self.num_steps = 0

    async def slow_compile(self, compiler: object, structure: StructuredOutput | None, limiter: object) -> Form | None:
        """In place of the compiler and its thread."""
        if structure is None:
            return None
        form = self.forms[structure]
        if form.length % 2:
            await trio.sleep(form.length % 4)
        if form.refused:
            raise InvalidRequest("the form is none", field="structured_output")
        return form

    def note(self, *event: object) -> None:
        if self.log is not None:
            self.log.append((trio.current_time(), *event))

    async def run(self) -> None:
        """The whole of it, which would take for ever only if somebody waits for ever."""
        traffic = self.traffic
        with trio.fail_after(traffic.drain_at + 2000):
            await self.open()
        self.check_end()

    async def open(self) -> None:
        traffic = self.traffic
        async with trio.open_nursery() as self.nursery:
            opened = run_engine(self.load, traffic.settings, drive=self.drive, clock=trio.current_time)
            try:
                async with opened as self.engine:
                    self.engine.observers.append(self)
                    for script in traffic.scripts:
                        self.nursery.start_soon(self.client, script)
                    await trio.sleep(traffic.drain_at)
                    await self.end()
            except EngineDead as error:
                if traffic.end != "die" or not isinstance(error.__cause__, Crash):
                    raise
            else:
                assert traffic.end != "die", "the engine lives without an executor"
            self.note("closed")

    async def end(self) -> None:
        if self.traffic.end == "die":
            self.executor.is_dead = True
            await trio.sleep_forever()
        self.note("drain")
        self.engine.drain()
        while self.engine.statistics().num_requests and self.traffic.end == "finish":  # noqa: ASYNC110
            await trio.sleep(5)

    # --- the worker, which is slow at times ---

    def load(self) -> tuple[FakeModel, EngineCore]:
        settings, info = self.traffic.settings, self.traffic.info
        drafter = DraftModel(
            self.draft_executor, vocab_size=info.vocab_size, max_tokens=settings.max_num_batched_tokens,
            costs=StepCosts(((1, 0.05), (1001, 1.05))),
        )  # fmt: skip
        drafter.prior = (0.9,)
        self.core = EngineCore(self.executor, settings, speculation_for(settings, info.vocab_size, None, drafter))
        core, queues = self.core, self.core.queues
        self.step, core.step = core.step, self.checked_step  # type: ignore[method-assign]
        self.add, core.add = core.add, self.noted_add  # type: ignore[method-assign]
        self.finish, core.finish = core.finish, self.noted_finish  # type: ignore[method-assign]
        self.preempt, queues.preempt = queues.preempt, self.noted_preempt  # type: ignore[method-assign]
        scheduler = core.scheduler
        self.distrust, scheduler.distrust = scheduler.distrust, self.noted_distrust  # type: ignore[method-assign]
        return self.model, core

    def noted_add(self, request: Request) -> None:
        running = {sequence.request.id for sequence in self.core.queues.running}
        self.add(request)
        self.stays[request.id] = Stay(request, self.num_steps, running)

    def noted_finish(self, request_id: str, index: int | None = None) -> None:
        self.finish(request_id, index)
        self.note_end(request_id)

    def note_end(self, request_id: str) -> None:
        if request_id in self.stays and request_id not in self.core._requests:
            self.stays[request_id].ended = min(self.stays[request_id].ended, self.num_steps)

    def noted_preempt(self, sequence: Sequence) -> None:
        self.stays[sequence.request.id].num_preemptions += 1
        self.preempt(sequence)

    def noted_distrust(self, sequence: Sequence) -> bool:
        waits = self.distrust(sequence)
        if waits:
            running = {other.request.id for other in self.core.queues.running}
            self.stays[sequence.request.id].running |= running
        return waits

    async def drive(self, worker: Worker, deliver: Callable[[Report], None]) -> None:
        """Turns of the worker, and behind them, in order but late, the deliveries."""
        posted, reported = trio.Event(), trio.Event()
        reports: deque[Report] = deque()
        error: Exception | None = None

        def wake() -> None:
            posted.set()

        def report(report: Report) -> None:
            reports.append(report)
            reported.set()

        async def hand_over() -> None:
            nonlocal reported
            while not worker.stopped and error is None:
                await reported.wait()
                reported = trio.Event()
                while reports:
                    if ticks := self.random.choice(self.traffic.delivery_ticks):
                        await trio.sleep(ticks)
                    deliver(reports.popleft())
                    self.check_counters()

        worker.deliver, worker.on_post = report, wake
        worker.load()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hand_over)
            while not worker.stopped and error is None:
                self.executor.begin_turn()
                self.draft_executor.begin_turn()
                try:
                    is_busy = worker.pump()
                except Exception as crash:
                    error = crash
                    break
                if not is_busy:
                    await posted.wait()
                    posted = trio.Event()
                await trio.sleep(self.random.choice(self.traffic.turn_ticks))
            reported.set()
        for last in reports:
            deliver(last)
        worker.close()
        if error is not None:
            raise error

    def checked_step(self, now: float) -> list[SequenceOutput]:
        """A step with the invariants asserted: those of the core, and that nobody is passed over."""
        core, queues = self.core, self.core.queues
        self.num_steps += 1
        running = {sequence.id for sequence in queues.running}
        waiting = {entry[-1].id for entry in queues._waiting}
        paused = [sequence for sequence in queues._sequences.values() if queues.is_paused(sequence)]
        for sequence in paused:
            self.stays[sequence.request.id].was_paused = True
        following = [s.request.id for s in queues._sequences.values() if s.status is Status.FOLLOWING]
        ready = [sequence for sequence in queues.running if not queues.is_paused(sequence)]
        before = [(sequence.num_tokens, sequence.num_computed_tokens) for sequence in ready[:1]]
        num_failed_steps, num_faults = core.statistics().num_failed_steps, sum(self.executor.counts.values())
        num_failed_rows = self.num_failed_rows()
        outputs = self.step(now)
        core.check()
        for request_id in following:
            self.stays[request_id].running |= {sequence.request.id for sequence in queues.running}
        for output in outputs:
            self.note_end(output.request_id)
        if core.statistics().num_failed_steps > num_failed_steps:
            assert sum(self.executor.counts.values()) > num_faults, "a step failed of itself"
        for sequence, (num_tokens, num_computed_tokens) in zip(ready[:1], before, strict=True):
            has_moved = sequence.num_tokens > num_tokens or sequence.num_computed_tokens > num_computed_tokens
            # one whose row failed is tried once more without drafts, and once without blocks of others
            is_retried = self.num_failed_rows() > num_failed_rows
            assert has_moved or sequence.is_finished or is_retried, "the first of all was passed over"
        # those whose prompt another choice has just computed, who was preempted, and who failed on others' blocks,
        # join the queue after admission
        passed_over = [
            entry[0]
            for entry in queues._waiting
            if entry[-1].id in waiting and not entry[-1].is_finished and entry[-1].shares
        ]
        admitted = [sequence.order for sequence in queues.running if sequence.id not in running]
        assert max(admitted, default=(-9,)) < min(passed_over, default=(9,)), "somebody was let in before who was first"
        self.totals.events["steps beside a paused sequence"] += bool(paused)
        self.note("step", [(output.request_id, output.index, output.token_ids) for output in outputs])
        return outputs

    def num_failed_rows(self) -> int:
        return sum(self.executor.counts.get(kind, 0) for kind in ("row is not finite", "processor raises"))

    def check_counters(self) -> None:
        if self.engine is not None:
            statistics = self.engine.statistics()
            assert statistics.admitted == sum(statistics.finished.values()) + len(self.engine._by_core_id)

    # --- readers ---

    async def client(self, script: Script) -> None:
        await trio.sleep(script.arrival)
        generation = self.engine.generate(
            script.prompt,
            script.params,
            request_id=script.request_id,
            priority=script.priority,
            cache_salt=script.cache_salt,
        )
        self.generations.append(generation)
        reading = Reading(script, generation)
        if script.door == "deadline":
            reading.scope.deadline = trio.current_time() + script.delay + 0.5
        elif script.door.startswith(("cancelled", "abort")):
            self.nursery.start_soon(self.disturb, reading)
        with reading.scope:
            try:
                await reading.read()
            except (TrioLLMError, WalkedOutError) as error:
                reading.error = error
        door = reading.judge()
        self.totals.doors[door] += 1
        self.note(script.number, door, [choice.token_ids for choice in generation.choices])

    async def disturb(self, reading: Reading) -> None:
        """Somebody else ends the request."""
        script, generation = reading.script, reading.generation
        match script.door:
            case "abort when just let in":
                return  # the reader does that itself
            case "abort before it is let in" | "cancelled before it is let in":
                await trio.sleep(min(script.delay, script.prompt.delay - 1))
            case _:
                await trio.sleep(script.delay)
        if script.door.startswith("cancelled"):
            reading.scope.cancel()
        elif script.door == "abort by id":
            if self.engine._generations.get(script.request_id) is generation:
                assert self.engine.abort(script.request_id)
        else:
            generation.abort()
            if script.door == "abort twice":
                await trio.sleep(script.delay % 3)
                generation.abort()

    # --- an Observer ---

    def first_token(self, seconds: float) -> None:
        pass

    def inter_token(self, seconds: float, count: int) -> None:
        pass

    def finished(self, reason: str, prompt_tokens: int, completion_tokens: int) -> None:
        self.ends[reason, prompt_tokens, completion_tokens] += 1

    # --- the end ---

    def check_end(self) -> None:
        """Each request ended once, all counters add up, and all that was taken is given back."""
        engine, statistics = self.engine, self.engine.statistics()
        admitted = [generation for generation in self.generations if generation.core_id]
        ends = Counter(
            (generation._overall_reason().value, len(generation.prompt_token_ids), generation.usage.completion_tokens)
            for generation in admitted
        )
        assert self.ends == ends, "a request ended twice, or never, or otherwise than its reader saw"
        assert statistics.admitted == len(admitted) == sum(statistics.finished.values())
        assert statistics.generation_tokens == sum(generation.usage.completion_tokens for generation in admitted)
        assert (statistics.num_requests, engine._num_choices, engine._num_queued_tokens) == (0, 0, 0)
        assert not engine._generations and not engine._by_core_id
        core = self.core.statistics()
        if self.traffic.end != "die":
            self.core.check()
            assert (core.num_running, core.num_waiting, core.num_free_blocks) == (0, 0, core.num_blocks)
            check_waits(self.stays)
            assert not self.executor.sequences and not self.draft_executor.sequences and not self.core._requests
            assert self.core.speculation is None or not self.core.speculation._records
        self.totals.faults.update(self.executor.counts)
        self.totals.faults["a step of the draft model raises"] += sum(self.draft_executor.counts.values())
        self.totals.events.update(
            requests=len(self.generations),
            admitted=len(admitted),
            steps=core.num_steps + core.num_failed_steps,
            preemptions=core.num_preemptions,
            cache_hits=core.num_cache_hits,
            accepted_drafts=core.num_accepted_tokens,
            draft_model_forwards=self.draft_executor.num_collected,
            wasted_tokens=statistics.wasted_tokens,
        )
        self.totals.events[f"engine: {self.traffic.end}"] += 1
