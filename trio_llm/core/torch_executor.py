"""TorchExecutor: runs StepPlans with a PagedModel."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import attrs
import torch
from torch.nn import functional

from trio_llm.core.attention import SequenceSpan
from trio_llm.core.executor import ExecutorInfo
from trio_llm.core.faults import without_frames
from trio_llm.core.logits import Edits, Rewriter
from trio_llm.core.logprobs import token_logprobs
from trio_llm.core.model import PagedModel, SpanInput
from trio_llm.core.page_attention import PageBackend
from trio_llm.core.sampler import Draw, sample
from trio_llm.core.step import Row, SamplingTask, StepPlan, StepResult, TokenLogprobs

_cpu_lock = threading.Lock()
"""CPU engines of one process take turns: two steps at once would fight for the same cores."""


MAX_SCORED_TOKENS = 64
"""Prompt tokens whose logits are made at a time: they are large, and a prompt has many."""


@attrs.define(eq=False)
class _SequenceState:
    task: SamplingTask
    rewriter: Rewriter | None
    block_table: list[int] = attrs.field(factory=list)


@attrs.frozen
class _Handle:
    """A step that was launched."""

    plan: StepPlan
    logits: torch.Tensor
    """Of the rows that sample, one for each draft and one more, in the plan's order."""
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]


class TorchExecutor:
    """An Executor on torch, on one device.

    Args:
        model: with its pages allocated.
        num_blocks: how many.
        max_model_len: the model's own limit, in tokens.
        batch_exact: see `ExecutorInfo`.
        vocab_size: what the model's vocabulary is cut or filled up to, with tokens that never come; None leaves it.
    """

    def __init__(
        self,
        model: PagedModel,
        *,
        num_blocks: int,
        max_model_len: int,
        batch_exact: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self._model = model
        self._kernels = model.backend.kernels if isinstance(model.backend, PageBackend) else None
        self._sequences: dict[int, _SequenceState] = {}
        self._info = ExecutorInfo(
            num_blocks=num_blocks,
            block_size=model.backend.block_size,
            vocab_size=vocab_size or model.vocab_size,
            max_model_len=max_model_len,
            batch_exact=batch_exact,
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def admit(self, sequence_id: int, task: SamplingTask) -> None:
        rewriter = Rewriter(task) if Rewriter.needed(task) else None
        self._sequences[sequence_id] = _SequenceState(task, rewriter)

    def release(self, sequence_id: int) -> None:
        self._sequences.pop(sequence_id, None)

    def launch(self, plan: StepPlan) -> _Handle:
        for row in plan.rows:
            self._sequences[row.sequence_id].block_table[row.num_prior_blocks :] = row.new_blocks
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        logits: dict[int, torch.Tensor] = {}
        with self._turn():
            self._model.backend.copy_blocks([pair for row in plan.rows for pair in row.block_copies])
            scored = [row for row in plan.rows if row.score]
            for row in scored:
                prompt_logprobs[row.sequence_id], logits[row.sequence_id] = self._score(row)
            others = [row for row in plan.rows if not row.score]
            made = self._forward(others) if others else torch.empty(0)
            if scored:
                made = self._in_order(plan, made, logits)
            return _Handle(plan, made, prompt_logprobs)

    def _forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute rows together; the logits of those that sample."""
        inputs: list[SpanInput] = []
        wanted: list[int] = []
        offset = 0
        for row in rows:
            inputs.append(self._input(row, 0, len(row.token_ids)))
            offset += len(row.token_ids)
            if row.sample:
                wanted += range(offset - 1 - row.num_drafts, offset)
        # where no logits are wanted, one row of them is still made: the model knows no none
        logits = self._model.forward(inputs, wanted or [offset - 1])[: len(wanted)]
        missing = self._info.vocab_size - logits.shape[-1]
        return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _score(self, row: Row) -> tuple[tuple[TokenLogprobs, ...], torch.Tensor]:
        """Compute a row of a prompt in pieces, with the logits of each of its tokens.

        Returns:
            The log-probabilities of the prompt's tokens that follow, and the logits that are sampled.
        """
        task = self._sequences[row.sequence_id].task
        scores: list[TokenLogprobs] = []
        sampled: list[torch.Tensor] = []
        for begin in range(0, len(row.token_ids), MAX_SCORED_TOKENS):
            end = min(begin + MAX_SCORED_TOKENS, len(row.token_ids))
            logits = self._model.forward([self._input(row, begin, end)], range(end - begin))
            following = task.prompt_token_ids[row.start + begin + 1 : row.start + end + 1]
            num_top = [task.params.prompt_logprobs or 0] * len(following)
            scores += token_logprobs(logits[: len(following)], following, num_top)
            if row.sample:
                first = max(len(row.token_ids) - 1 - row.num_drafts - begin, 0)
                sampled.append(logits[first:].clone())
        return tuple(scores), torch.cat(sampled) if sampled else torch.empty(0)

    def _in_order(self, plan: StepPlan, together: torch.Tensor, alone: dict[int, torch.Tensor]) -> torch.Tensor:
        """Logits that were made together and alone, in the order of the plan's rows."""
        parts: list[torch.Tensor] = []
        offset = 0
        for row in plan.rows:
            if row.sample and row.score:
                parts.append(alone[row.sequence_id])
            elif row.sample:
                parts.append(together[offset : offset + row.num_drafts + 1])
                offset += row.num_drafts + 1
        return torch.cat(parts) if parts else torch.empty(0)

    def _input(self, row: Row, begin: int, end: int) -> SpanInput:
        table = self._sequences[row.sequence_id].block_table
        return SpanInput(row.token_ids[begin:end], SequenceSpan(row.start + begin, end - begin, table))

    def collect(self, handle: _Handle) -> StepResult:
        plan, logits = handle.plan, handle.logits
        rows = [row for row in plan.rows if row.sample]
        draws = [draw for row in rows for draw in self._draws(row)]
        failures: dict[int, Exception] = {}
        """By sequence id, as are the others below."""
        if not draws:
            return StepResult(((),) * len(plan.rows), prompt_logprobs=handle.prompt_logprobs)
        with self._turn():
            # reported log-probabilities are those before anything below
            reported = [number for number, draw in enumerate(draws) if draw.params.logprobs is not None]
            own = logits[reported] if reported else None
            self._edits(rows, failures).apply(logits)
            tokens = sample(logits, draws, self._kernels)
            by_number: dict[int, TokenLogprobs] = {}
            if own is not None:
                chosen = [tokens[number] or 0 for number in reported]
                wanted = [draws[number].params.logprobs or 0 for number in reported]
                by_number = dict(zip(reported, token_logprobs(own, chosen, wanted), strict=True))
        sampled: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        offset = 0
        for row in rows:
            run = agreed(tokens[offset : offset + row.num_drafts + 1], row)
            try:
                self._follow(row, run, logits, offset)
            except Exception as error:
                failures.setdefault(row.sequence_id, without_frames(error))
            if row.sequence_id not in failures:
                sampled[row.sequence_id] = run
                if offset in by_number:
                    logprobs[row.sequence_id] = tuple(by_number[offset + position] for position in range(len(run)))
            offset += row.num_drafts + 1
        results = tuple(sampled.get(row.sequence_id, ()) for row in plan.rows)
        failed = {
            place: failures[row.sequence_id] for place, row in enumerate(plan.rows) if row.sequence_id in failures
        }
        return StepResult(results, logprobs, handle.prompt_logprobs, failures=failed)

    def _follow(self, row: Row, run: Sequence[int], logits: torch.Tensor, number: int) -> None:
        """The row's sequence goes on with `run`, the first of which was chosen by the `number`-th of the logits.

        Raises:
            FloatingPointError: there is none, since the model computes no numbers.
            ValueError: there is none, since none is allowed.
        """
        if not run:
            if bool(logits[number].isneginf().all()):
                raise ValueError("no token is left to choose")
            raise FloatingPointError("the logits are not finite")
        rewriter = self._sequences[row.sequence_id].rewriter
        if rewriter is not None:
            for token in run:
                rewriter.push(token)

    def _draws(self, row: Row) -> Iterator[Draw]:
        task = self._sequences[row.sequence_id].task
        for draft in range(row.num_drafts + 1):
            yield Draw(task.params, task.choice, row.output_index + draft)

    def _edits(self, rows: Sequence[Row], failures: dict[int, Exception]) -> Edits:
        """What is to be done to the logits of the rows that sample; adds to `failures` whose cannot be said."""
        edits = Edits()
        number = 0
        for row in rows:
            rewriter = self._sequences[row.sequence_id].rewriter
            if rewriter is not None:
                try:
                    _edit(row, rewriter, number, edits)
                except Exception as error:
                    failures[row.sequence_id] = without_frames(error)
            number += row.num_drafts + 1
        return edits

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


def _edit(row: Row, rewriter: Rewriter, number: int, edits: Edits) -> None:
    """Say what is to be done to a row's logits, `number` being the first of them.

    At a drafted position the drafts before it count as output.
    """
    # a step that failed may have gone further
    rewriter.rewind(row.output_index - len(row.unseen_outputs))
    for token in row.unseen_outputs:
        rewriter.push(token)
    rewriter.edit(number, edits)
    for position in range(row.num_drafts):
        rewriter.push(row.token_ids[len(row.token_ids) - row.num_drafts + position])
        rewriter.edit(number + position + 1, edits)
    rewriter.rewind(row.output_index)


def agreed(sampled: Sequence[int | None], row: Row) -> tuple[int, ...]:
    """The sampled tokens up to and including the first that differs from its draft, or before the first
    that could not be sampled: a step that begins there shows whether a wrong draft was at fault."""
    drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
    run: list[int] = []
    for token, draft in zip(sampled, (*drafts, None), strict=True):
        if token is None:
            break
        run.append(token)
        if token != draft:
            break
    return tuple(run)
