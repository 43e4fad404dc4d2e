"""Any traffic whatever: adds, steps, reads, ends and drafts at random, the tokens checked against no engine at all."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import attrs
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trio_llm.core.request import FinishReason, Request, Sequence, Status
from trio_llm.core.step import StepPlan
from trio_llm.errors import ContextLengthExceeded

from .helpers import VOCAB_SIZE, FaultyExecutor, expected_tokens, is_idle, make_core, make_request, random_clock

EOS = 7


@attrs.define
class Reader:
    """One choice as its reader sees it."""

    sequence: Sequence
    expected: list[int]
    tokens: list[int] = attrs.field(factory=list)
    num_read: int = 0
    ended: bool = False


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 3, 4]),
        num_blocks=st.integers(4, 16),
        max_num_seqs=st.integers(1, 4),
        slack=st.sampled_from([1, 2, 5, 60]),
        credit_window=st.sampled_from([1, 2, 3, 1000, 1000]),
        max_model_len=st.sampled_from([12, 20, 100]),
        clock=st.sampled_from([None, random_clock(0)]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        slack: int,
        credit_window: int,
        max_model_len: int,
        clock: Callable[[], float] | None,
    ) -> None:
        self.executor = FaultyExecutor(num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)
        self.budget = max_num_seqs + slack
        self.max_num_seqs = max_num_seqs
        self.window = credit_window
        self.core = make_core(
            self.executor,
            clock,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.budget,
            credit_window=credit_window,
        )
        assert self.core.max_total_tokens == min(max_model_len, num_blocks * block_size)
        self.readers: dict[tuple[str, int], Reader] = {}
        self.requests: dict[str, Request] = {}

    def live(self) -> list[Reader]:
        return [reader for reader in self.readers.values() if not reader.ended]

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=14),
        max_tokens=st.integers(1, 14),
        n=st.integers(1, 4),
        priority=st.integers(-1, 1),
        ends=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, n: int, priority: int, ends: bool) -> None:
        request = make_request(
            f"r{len(self.requests)}", prompt, max_tokens=max_tokens, n=n, priority=priority, eos=[EOS] if ends else []
        )
        self.requests[request.id] = request
        if len(prompt) + max_tokens > self.core.max_total_tokens:
            try:
                self.core.add(request)
            except ContextLengthExceeded:
                return
            raise AssertionError("a request that can never fit was taken")
        self.core.add(request)
        for index, sequence in enumerate(request.sequences):
            self.readers[request.id, index] = Reader(sequence, expected_tokens(request))

    @rule(data=st.data(), everything=st.booleans())
    @precondition(lambda self: self.readers)
    def acknowledge(self, data: st.DataObject, everything: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.readers)))
        reader = self.readers[key]
        behind = len(reader.tokens) - reader.num_read
        count = behind if everything else data.draw(st.integers(0, behind))
        reader.num_read += count
        self.core.acknowledge(*key, count)

    @rule(data=st.data(), whole=st.booleans())
    @precondition(lambda self: self.readers)
    def finish(self, data: st.DataObject, whole: bool) -> None:
        request_id, index = data.draw(st.sampled_from(sorted(self.readers)))
        self.core.finish(request_id, None if whole else index)
        for key, reader in self.readers.items():
            if key == (request_id, index) or (whole and key[0] == request_id):
                reader.ended = True
        self.core.finish(request_id, None if whole else index)

    @rule()
    def finish_what_is_unknown(self) -> None:
        self.core.finish("never heard of it")
        self.core.acknowledge("never heard of it", 3, 5)

    @rule(random=st.randoms(use_true_random=False))
    def draft(self, random: Random) -> None:
        self.give_drafts(random)

    def give_drafts(self, random: Random) -> None:
        """Give running sequences guesses: right ones, wrong ones, or right and then wrong."""
        for reader in self.live():
            if reader.sequence.status is Status.RUNNING:
                right = reader.expected[len(reader.tokens) :]
                wrong = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(5))]
                reader.sequence.draft_token_ids = right[: random.randrange(7)] + wrong

    @rule(fault=st.sampled_from(["none", "none", "none", "launch", "collect"]), reads=st.booleans())
    def step(self, fault: str, reads: bool) -> None:
        if fault != "none":
            failures = iter([True])

            def fail_once(plan: StepPlan) -> None:
                if next(failures, False):
                    raise RuntimeError("injected")

            if fault == "launch":
                self.executor.on_launch = fail_once
            else:
                self.executor.fail_collect = fail_once
        self.one_step()
        self.executor.on_launch, self.executor.fail_collect = None, lambda plan: None
        if reads:
            self.read_all()

    @rule(count=st.integers(2, 12), drafts=st.booleans(), random=st.randoms(use_true_random=False))
    def several_steps(self, count: int, drafts: bool, random: Random) -> None:
        for _ in range(count):
            if drafts:
                self.give_drafts(random)
            self.one_step()
            self.core.check()
            self.read_all()

    def read_all(self) -> None:
        for key, reader in self.readers.items():
            self.core.acknowledge(*key, len(reader.tokens) - reader.num_read)
            reader.num_read = len(reader.tokens)

    def one_step(self) -> None:
        had_work = self.core.has_work()
        before = {reader.sequence.id: reader.sequence for reader in self.live()}
        ready = {
            sequence_id
            for sequence_id, sequence in before.items()
            if sequence.status is Status.RUNNING
            and sequence.num_output_tokens - sequence.num_acknowledged < self.window
        }
        running = {i for i, sequence in before.items() if sequence.status is Status.RUNNING}
        no_drafts = not any(sequence.draft_token_ids for sequence in before.values())
        decoding = {i for i in ready if before[i].num_tokens - before[i].num_computed_tokens == 1}
        num_plans = len(self.executor.plans)
        outputs = self.core.step()
        plans = self.executor.plans[num_plans:]
        assert bool(plans) == had_work
        if not had_work:
            assert outputs == []
        rows = [row for plan in plans for row in plan.rows]
        for plan in plans:
            assert 0 < plan.num_tokens <= self.budget and 0 < len(plan.rows) <= self.max_num_seqs
            assert len({row.sequence_id for row in plan.rows}) == len(plan.rows)
            assert all(row.token_ids for row in plan.rows)
            assert all(row.start + len(row.token_ids) <= self.core.max_model_len for row in plan.rows)
        planned = {row.sequence_id for row in rows}
        preempted = {i for i in ready if before[i].status is Status.WAITING}
        if preempted:
            assert planned <= running, "somebody was admitted in a step that preempted"
        if len(ready) <= self.max_num_seqs and no_drafts:
            assert decoding <= planned | preempted, "a decoding sequence was passed over"
        for output in outputs:
            reader = self.readers[output.request_id, output.index]
            assert not reader.ended, "output after the end"
            assert output.error is None
            reader.tokens += output.token_ids
            assert reader.tokens == reader.expected[: len(reader.tokens)]
            assert len(reader.tokens) - reader.num_read <= self.window, "ran ahead of its credit"
            if output.finish_reason is not None:
                reader.ended = True
                assert reader.tokens == reader.expected, "ended early"
                stopped = reader.tokens[-1] in reader.sequence.request.eos_token_ids
                assert output.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        live = self.live()
        assert set(self.executor.sequences) == {reader.sequence.id for reader in live}
        if not self.core.has_work():
            assert all(len(reader.tokens) - reader.num_read >= self.window for reader in live), "work is left undone"
        if not live:
            assert is_idle(self.core)

    def teardown(self) -> None:
        """Let every reader read: all must end, within a bounded number of steps."""
        if not hasattr(self, "core"):
            return
        tokens_left = sum(len(reader.sequence.token_ids) + len(reader.expected) for reader in self.live())
        for _ in range(20 + 20 * tokens_left):
            self.read_all()
            if not self.core.has_work():
                break
            self.one_step()
            self.core.check()
        assert not self.live(), "some never end"
        assert is_idle(self.core)


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
