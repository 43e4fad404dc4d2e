"""The Executor protocol: what runs a step.  And one that needs no model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import attrs

from trio_llm.core.step import Row, SamplingTask, StepPlan, StepResult, TokenLogprobs


@attrs.frozen(kw_only=True)
class ExecutorInfo:
    """What the scheduler must know of an executor."""

    num_blocks: int
    block_size: int
    """Tokens in a block."""
    vocab_size: int
    max_model_len: int
    batch_exact: bool = False
    """Whether a token's logits are known to be the same to the last bit whoever else is in the step."""


@runtime_checkable
class Executor(Protocol):
    """Runs StepPlans.  All calls come from one thread, never two at a time.

    `launch` may return before the work is done, `collect` waits for it.  An exception
    from either means that the step did not happen: the same rows may come again, in other
    steps, and where memory ran out in smaller ones (see `faults`).
    """

    @property
    def info(self) -> ExecutorInfo: ...

    def admit(self, sequence_id: int, task: SamplingTask) -> None:
        """Prepare the sampling state of a new sequence."""

    def release(self, sequence_id: int) -> None:
        """Forget a sequence; idempotent."""

    def launch(self, plan: StepPlan) -> Any:
        """Start a step; returns a handle for collect."""

    def collect(self, handle: Any) -> StepResult:
        """Wait for a step and give its tokens."""

    def check(self) -> None:
        """Raise if nothing at all can be computed any more; called after a step in which every row failed."""

    def close(self) -> None:
        """Give back memory and ranks; idempotent."""


@attrs.define
class FakeExecutor:
    """A model-free Executor: each next token is a hash of the tokens before it.

    It keeps a cache of real token ids in real blocks and reads the context back through
    the block table, so a scheduler that shares, loses or reorders blocks gets other
    tokens.  Of the sampling parameters it heeds those that ask for log-probabilities.  For tests, simulations and measuring everything but the model.

    Args:
        info: sizes to pretend.
        next_token: (context, output_index) -> token, in place of the hash.
        on_launch: called with each plan first; may raise to inject a fault.
    """

    info: ExecutorInfo = ExecutorInfo(num_blocks=64, block_size=4, vocab_size=128, max_model_len=128)
    next_token: Callable[[list[int], int], int] | None = None
    on_launch: Callable[[StepPlan], None] | None = None
    broken: Exception | None = None
    """What check() raises."""
    plans: list[StepPlan] = attrs.field(factory=list, init=False)
    sequences: dict[int, SamplingTask] = attrs.field(factory=dict, init=False)
    _tables: dict[int, list[int]] = attrs.field(factory=dict, init=False)
    _slots: dict[int, int] = attrs.field(factory=dict, init=False)

    def admit(self, sequence_id: int, task: SamplingTask) -> None:
        self.sequences[sequence_id] = task
        self._tables[sequence_id] = []

    def release(self, sequence_id: int) -> None:
        self.sequences.pop(sequence_id, None)
        self._tables.pop(sequence_id, None)

    def launch(self, plan: StepPlan) -> StepPlan:
        if self.on_launch is not None:
            self.on_launch(plan)
        self.plans.append(plan)
        return plan

    def collect(self, handle: StepPlan) -> StepResult:
        for source, destination in (pair for row in handle.rows for pair in row.block_copies):
            for offset in range(self.info.block_size):
                held = self._slots.get(source * self.info.block_size + offset)
                if held is not None:
                    self._slots[destination * self.info.block_size + offset] = held
        for row in handle.rows:
            table = self._tables[row.sequence_id]
            assert row.num_prior_blocks <= len(table), "the executor never confirmed these blocks"
            table[row.num_prior_blocks :] = row.new_blocks
            for offset, token in enumerate(row.token_ids):
                self._slots[self._slot(table, row.start + offset)] = token
        sampled = tuple(self._sample(row) if row.sample else () for row in handle.rows)
        logprobs, prompt_logprobs = {}, {}
        for row, tokens in zip(handle.rows, sampled, strict=True):
            task = self.sequences[row.sequence_id]
            if tokens and task.params.logprobs is not None:
                logprobs[row.sequence_id] = self._logprobs(tokens, task.params.logprobs)
            if row.score:
                following = task.prompt_token_ids[row.start + 1 : row.start + 1 + len(row.token_ids)]
                prompt_logprobs[row.sequence_id] = self._logprobs(following, task.params.prompt_logprobs or 0)
        return StepResult(sampled, logprobs, prompt_logprobs)

    def _logprobs(self, tokens: Iterable[int], num_top: int) -> tuple[TokenLogprobs, ...]:
        """As if each token had a half, the next in the vocabulary a quarter, and so on."""
        size = self.info.vocab_size
        return tuple(
            TokenLogprobs(
                token,
                math.log(0.5),
                tuple(((token + k) % size, math.log(0.5) * (k + 1)) for k in range(min(num_top, size))),
            )
            for token in tokens
        )

    def _sample(self, row: Row) -> tuple[int, ...]:
        table = self._tables[row.sequence_id]
        end = row.start + len(row.token_ids)
        context = [self._slots[self._slot(table, position)] for position in range(end)]
        sampled: list[int] = []
        for draft in range(row.num_drafts + 1):
            known = end - row.num_drafts + draft
            token = self._choose(context[:known], row.output_index + draft)
            sampled.append(token)
            if draft < row.num_drafts and context[known] != token:
                break
        return tuple(sampled)

    def _choose(self, context: list[int], output_index: int) -> int:
        if self.next_token is not None:
            return self.next_token(context, output_index)
        digest = hashlib.blake2b(repr(context).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.info.vocab_size

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.info.block_size] * self.info.block_size + position % self.info.block_size

    def check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def close(self) -> None:
        self._tables.clear()
