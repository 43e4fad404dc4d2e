"""Drafters: who guesses the tokens that come next, so that one step can verify several.

A drafter need not be right, nor safe: whatever it proposes, the tokens that a request gets are
the same (see `sampler`).  Whether and how far it is believed is `speculation`'s to decide.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import attrs

from trio_llm.core.request import Sequence
from trio_llm.core.step import SamplingTask
from trio_llm.core.step_costs import StepCosts


class Drafter(Protocol):
    """Proposes tokens.  Synchronous; all calls come from the core's thread, between steps.

    An exception from `observe`, or from a `propose` for one sequence alone, ends the drafting for
    that sequence, and nothing else.
    """

    @property
    def prior(self) -> Seq[float]:
        """How likely a guess is right after 0, 1, 2-3, 4-7, ... right ones in a row (the last entry
        for all that are more), until it is known better."""

    @property
    def costs(self) -> StepCosts | None:
        """Time of one of the drafter's forwards by the tokens in it, in the unit of a step's; None where
        guesses cost nothing.  A forward makes one guess for each of any number of sequences."""

    def admit(self, sequence_id: int, task: SamplingTask) -> None:
        """Prepare for a new sequence; `task` says how its tokens are chosen."""

    def observe(self, sequence: Sequence, block_copies: Seq[tuple[int, int]] = ()) -> None:
        """A step took the sequence further, after it copied blocks (source, destination) for it: its tokens
        up to `num_computed_tokens` are in the cache, and whatever was accepted stands in `token_ids`.
        After a preemption the computed tokens grow once more from the start; the tokens are the same."""

    def backlog(self, sequence: Sequence) -> int | None:
        """Tokens that the drafter has to compute before its first guess for a sequence that has one
        token left to compute; None where it can make no guess."""

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> Seq[Seq[int]]:
        """For each of these sequences up to so many tokens that may follow its own; none for no idea.
        Each has one token left to compute, and blocks for all that may follow."""

    def release(self, sequence_id: int) -> None:
        """Forget a sequence; idempotent."""

    def close(self) -> None:
        """Give back memory; idempotent."""


@attrs.define(eq=False)
class _Index:
    """Where each n-gram of a stretch of tokens occurred last."""

    end: int = 0
    """Position after the stretch."""
    entries: dict[int, int] = attrs.field(factory=dict)
    """n-gram (its hash) -> the position after it."""


@attrs.define(eq=False)
class _History:
    """What a sequence has said, and where it seems to say it again."""

    prompt: _Index
    """Of the prompt but its last token, shared by all choices of a request."""
    output: _Index
    """Of what follows."""
    source: int | None = None
    """Position whose token is expected next."""


class NgramDrafter:
    """Prompt lookup: what followed the last time these few tokens were said.

    Found by the longest suffix of `max_n` to `min_n` tokens that occurs earlier; from there on
    the drafter copies for as long as the copy is right.  A token costs a look and an entry for each n,
    however long the context, and entries are kept for as long as the sequence lives: some
    350 bytes a token with three values of n, a hundredth of the keys and values of a small model.

    Args:
        max_n: length of the longest suffix that is looked for.
        min_n: length of the shortest.
    """

    prior = (0.05, 0.4, 0.6, 0.8, 0.9)
    costs = None

    def __init__(self, *, max_n: int = 4, min_n: int = 2) -> None:
        assert 1 <= min_n <= max_n
        self._lengths = range(max_n, min_n - 1, -1)
        self._histories: dict[int, _History] = {}

    def admit(self, sequence_id: int, task: SamplingTask) -> None:
        pass  # a history begins with what the first step computed

    def observe(self, sequence: Sequence, block_copies: Seq[tuple[int, int]] = ()) -> None:
        tokens, prompt_end = sequence.token_ids, len(sequence.request.prompt_token_ids) - 1
        history = self._histories.get(sequence.id)
        if history is None:
            history = _History(self._prompt_index(sequence), _Index(prompt_end))
            self._histories[sequence.id] = history
        # the prompt goes in as it is computed, so that no single step pays for all of a long one
        is_prompt_done = sequence.num_output_tokens > 0
        for position in range(history.prompt.end, prompt_end if is_prompt_done else sequence.num_computed_tokens):
            self._enter(history.prompt, tokens, position)
        if is_prompt_done:
            for position in range(history.output.end, len(tokens)):
                source = history.source
                if source is not None and tokens[source] == tokens[position]:
                    history.source = source + 1
                else:
                    history.source = self._find(history, tokens, position)
                self._enter(history.output, tokens, position)

    def backlog(self, sequence: Sequence) -> int | None:
        history = self._histories.get(sequence.id)
        return None if history is None or history.source is None else 0

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> Seq[Seq[int]]:
        return [self._copy(sequence, count) for sequence, count in wanted]

    def release(self, sequence_id: int) -> None:
        self._histories.pop(sequence_id, None)

    def close(self) -> None:
        self._histories.clear()

    def _copy(self, sequence: Sequence, count: int) -> Seq[int]:
        history = self._histories.get(sequence.id)
        if history is None or history.source is None:
            return ()
        known = sequence.token_ids[history.source : history.source + count]
        # a copy that reaches its own beginning goes on with itself: a period is repeated
        return [known[position % len(known)] for position in range(count)]

    def _prompt_index(self, sequence: Sequence) -> _Index:
        for sibling in sequence.request.sequences:
            if sibling.id in self._histories:
                return self._histories[sibling.id].prompt
        return _Index()

    def _enter(self, index: _Index, tokens: Seq[int], position: int) -> None:
        """Note every n-gram that ends at the position."""
        for n in self._lengths:
            if n <= position + 1:
                index.entries[_hash(tokens, position, n)] = position + 1
        index.end = position + 1

    def _find(self, history: _History, tokens: Seq[int], position: int) -> int | None:
        """Where the longest n-gram that ends at the position, itself not yet entered, went on before."""
        for n in self._lengths:
            if n <= position + 1:
                gram = _hash(tokens, position, n)
                found = history.output.entries.get(gram, history.prompt.entries.get(gram))
                if found is not None:
                    return found
        return None


def _hash(tokens: Seq[int], position: int, n: int) -> int:
    # a collision costs a wrong guess, so the n-gram itself need not be kept
    return hash(tuple(tokens[position + 1 - n : position + 1]))
