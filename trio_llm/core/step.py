"""What travels between scheduler, executor and engine in one step: plain data, made once and never changed.

Of `Row` and `SequenceOutput` each sequence needs one in each step.  They are not frozen, since making a frozen
instance takes twice as long, but nobody writes to them either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from trio_llm.core.request import FinishReason
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.errors import TrioLLMError

if TYPE_CHECKING:
    from trio_llm.core.grammar import Grammar


@attrs.frozen
class SamplingTask:
    """What an executor is told of a sequence once, before its first row."""

    params: SamplingParams
    """Resolved."""
    choice: int = 0
    """Index of the sequence among its request's choices."""
    prompt_token_ids: tuple[int, ...] = ()
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end it."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The params' bad words as tokens."""
    grammar: Grammar | None = None
    """The params' structured output, compiled."""


@attrs.frozen
class TokenLogprobs:
    """A token's log-probability and those of the likeliest tokens at its place.

    They are the model's own: no temperature, penalty or bias is in them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), the likeliest first; as many as were asked for."""


@attrs.define
class Row:
    """One sequence's part of a step.

    The executor keeps each sequence's block table; a row carries only the change:
    keep the first `num_prior_blocks` entries, then append `new_blocks`.  That makes a
    retry of a failed step, and a recomputation after preemption, the same message.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    """Tokens to compute, the drafts last."""
    start: int
    """Position of the first of them, equal to the tokens computed before."""
    num_prior_blocks: int
    new_blocks: tuple[int, ...]
    num_drafts: int
    """How many of token_ids are drafts, to be verified."""
    sample: bool
    """Whether the row reaches the end of the sequence, so that tokens are wanted."""
    output_index: int
    """Index, among the sequence's outputs, of the first token it samples: with seed
    and choice it keys the noise."""
    score: bool = False
    """Whether the log-probabilities of the prompt's tokens are wanted: of those that
    come right after a token of this row."""
    block_copies: tuple[tuple[int, int], ...] = ()
    """Blocks to copy (source, destination) before anything is written."""
    unseen_outputs: tuple[int, ...] = ()
    """The outputs right before `output_index` that the executor neither sampled nor was told of: where
    it made guesses for another model, and that one had its own idea."""


@attrs.frozen
class StepPlan:
    """The work of one step; plain ints, so that it can be sent to other ranks as it is."""

    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@attrs.frozen
class StepResult:
    """What an executor gives back: for each row of the plan, in its order, the tokens
    sampled (none where the row wanted none; one more than the accepted drafts where it did)."""

    token_ids: tuple[tuple[int, ...], ...]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = attrs.field(factory=dict)
    """By sequence id, where the sequence asks for them: one for each token sampled."""
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = attrs.field(factory=dict)
    """By sequence id, where the row asks for them."""
    failures: Mapping[int, Exception] = attrs.field(factory=dict, kw_only=True)
    """Rows, by their place in the plan, that failed by themselves while the others went well:
    logits that are not finite, say.  Such a row has no tokens."""


@attrs.define
class SequenceOutput:
    """What a step, or a failure, means for one sequence."""

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    """Set once, on the sequence's last output."""
    error: TrioLLMError | None = None
    num_cached_tokens: int = 0
    """Prompt tokens of the request that were not computed but found."""
    started_at: float = 0.0
    """When the request was first taken into a step, by the clock of who steps the engine."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of token_ids, where the request asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token of the prompt after the first, on the first output of a request that asks for them."""
    is_first: bool = False
    """Whether the sequence had none before."""


@attrs.frozen
class CoreStatistics:
    """A snapshot of the core, in sequences and blocks; counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    num_cache_queries: int = 0
    """Tokens that were looked for in the prefix cache."""
    num_cache_hits: int = 0
    """Of these, tokens found."""
    num_steps: int = 0
    num_computed_tokens: int = 0
    """Tokens that went through the model."""
    num_drafts: int = 0
    """Times that a sequence had tokens drafted, to be verified in one step."""
    num_draft_tokens: int = 0
    """Tokens drafted."""
    num_accepted_tokens: int = 0
    """Of these, tokens that were right."""
    num_failed_steps: int = 0
    """Steps that raised and were run again in parts."""
    num_out_of_memory: int = 0
    """Of these, steps in which memory ran out."""

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of the KV blocks in use, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
