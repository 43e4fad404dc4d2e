"""A Request and the Sequences it owns."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import attrs

from trio_llm.core.block_pool import BlockHash
from trio_llm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trio_llm.core.grammar import Grammar
    from trio_llm.core.step import TokenLogprobs


class FinishReason(enum.StrEnum):
    """How a sequence ended, as a client and the metrics see it."""

    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens or the context is used up."""
    ABORT = "abort"
    """Somebody asked for the end: the client left, an explicit abort, a deadline."""
    ERROR = "error"
    """The request failed, or the engine did."""


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FOLLOWING = "following"
    """Waits until the first choice of its request has computed the prompt for all."""
    PARKED = "parked"
    """Preempted while its reader lags; waits for the reader before it may wait for blocks."""
    FINISHED = "finished"


@attrs.define(eq=False)
class Sequence:
    """One choice of a request: its tokens, its counters, its blocks.

    There are no phases.  `num_computed_tokens` (tokens whose keys and values are in the
    cache) chases `num_tokens`; chunked prefill, preemption and drafts are values of
    these counters.
    """

    id: int
    request: Request
    index: int
    token_ids: list[int]
    """Prompt and output."""
    num_computed_tokens: int = 0
    block_table: list[int] = attrs.field(factory=list)
    block_hashes: list[BlockHash] = attrs.field(factory=list)
    """Of its leading full blocks, as far as anyone has asked."""
    num_hashed_blocks: int = 0
    """Leading entries of the block table that can be found by content, or need not be."""
    num_blocks_sent: int = 0
    """Leading entries of the block table that the executor has confirmed."""
    fork_of: Sequence | None = None
    """The choice that computed the prompt, if it may be forked from."""
    shares: bool = True
    """Whether it takes blocks that others computed."""
    has_shared: bool = False
    """Whether some of its blocks are such."""
    draft_token_ids: list[int] = attrs.field(factory=list)
    num_acknowledged: int = 0
    """Output tokens that the reader has taken."""
    status: Status = Status.WAITING

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first: by priority (low first), then arrival, then choice."""
        return (self.request.priority, self.request.arrival, self.index)


@attrs.define(eq=False)
class Request:
    """A prompt and what to make of it.  Tokens in, tokens out: no text here.

    Args:
        id: unique in the engine.
        prompt_token_ids: at least one.
        params: resolved (no None left).
        eos_token_ids: tokens that end a choice, already empty under `ignore_eos` unless a grammar ends it.
        priority: lower runs first.
    """

    id: str
    prompt_token_ids: Seq[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""
    """Only requests with the same salt share blocks."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The params' bad words as tokens."""
    grammar: Grammar | None = None
    """The params' structured output, compiled."""
    max_num_tokens: int = 0
    """Tokens of a choice, prompt and output, at which it ends.  This and what follows is the core's."""
    arrival: int = 0
    sequences: list[Sequence] = attrs.field(factory=list)
    leader: Sequence | None = None
    """Computes the prompt for all choices; None once that is done."""
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the cache when the request was first admitted."""
    started_at: float | None = None
    """When its first sequence was first taken into a step."""
    prompt_logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    """Of the prompt's tokens after the first, as far as they are computed."""
