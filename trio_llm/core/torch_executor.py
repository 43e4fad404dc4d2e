"""TorchExecutor: runs StepPlans with a PagedModel."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import attrs
import torch

from trio_llm.core.attention import SequenceSpan
from trio_llm.core.executor import ExecutorInfo
from trio_llm.core.model import PagedModel, SpanInput
from trio_llm.core.sampler import Draw, sample
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import Row, StepPlan, StepResult

_cpu_lock = threading.Lock()
"""CPU engines of one process take turns: two steps at once would fight for the same cores."""


@attrs.define(eq=False)
class _SequenceState:
    params: SamplingParams
    choice: int
    block_table: list[int] = attrs.field(factory=list)


class TorchExecutor:
    """An Executor on torch, on one device.

    Args:
        model: with its pages allocated.
        num_blocks: how many.
        max_model_len: the model's own limit, in tokens.
    """

    def __init__(self, model: PagedModel, *, num_blocks: int, max_model_len: int) -> None:
        self._model = model
        self._sequences: dict[int, _SequenceState] = {}
        self._info = ExecutorInfo(
            num_blocks=num_blocks,
            block_size=model.backend.block_size,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def admit(self, sequence_id: int, params: SamplingParams, index: int) -> None:
        self._sequences[sequence_id] = _SequenceState(params, index)

    def release(self, sequence_id: int) -> None:
        self._sequences.pop(sequence_id, None)

    def launch(self, plan: StepPlan) -> tuple[StepPlan, torch.Tensor]:
        inputs: list[SpanInput] = []
        wanted: list[int] = []
        offset = 0
        for row in plan.rows:
            table = self._sequences[row.sequence_id].block_table
            table[row.num_prior_blocks :] = row.new_blocks
            inputs.append(SpanInput(row.token_ids, SequenceSpan(row.start, len(row.token_ids), table)))
            offset += len(row.token_ids)
            if row.sample:
                wanted += range(offset - 1 - row.num_drafts, offset)
        with self._turn():
            self._model.backend.copy_blocks([pair for row in plan.rows for pair in row.block_copies])
            # where no logits are wanted, one row of them is still made: the model knows no none
            return plan, self._model.forward(inputs, wanted or [offset - 1])

    def collect(self, handle: tuple[StepPlan, torch.Tensor]) -> StepResult:
        plan, logits = handle
        draws = [draw for row in plan.rows for draw in self._draws(row)]
        with self._turn():
            tokens = sample(logits, draws) if draws else []
        results: list[tuple[int, ...]] = []
        offset = 0
        for row in plan.rows:
            count = row.num_drafts + 1 if row.sample else 0
            results.append(agreed(tokens[offset : offset + count], row))
            offset += count
        return StepResult(tuple(results))

    def _draws(self, row: Row) -> Iterator[Draw]:
        state = self._sequences[row.sequence_id]
        if row.sample:
            for draft in range(row.num_drafts + 1):
                yield Draw(state.params, state.choice, row.output_index + draft)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        guard = _cpu_lock if self._model.device.type == "cpu" else contextlib.nullcontext()
        with guard, torch.inference_mode():
            yield

    def check(self) -> None:
        # after a fault in a kernel every call to a CUDA device fails
        torch.ones(1, dtype=torch.float32, device=self._model.device).sum().item()

    def close(self) -> None:
        self._sequences.clear()


def agreed(sampled: list[int], row: Row) -> tuple[int, ...]:
    """The sampled tokens up to and including the first that differs from its draft."""
    drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
    for position, draft in enumerate(drafts):
        if sampled[position] != draft:
            return tuple(sampled[: position + 1])
    return tuple(sampled)
