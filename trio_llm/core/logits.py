"""What changes logits before they are sampled: biases, penalties, and tokens that may not come now.

Each sequence that asks for any of it has a `Rewriter`, which follows its tokens and says
what is to be done to a row of its logits.  The `Edits` of all rows of a step are applied
together, in a number of operations that depends neither on the rows nor on the vocabulary:
only the logits of tokens that are named, or that occurred, are touched.

The order is that of transformers' generate: logit_bias, repetition penalty (then the two
that transformers does not have), bad words, min_tokens, allowed tokens.  A grammar comes
last, and takes the three before it into its mask: so it is known at once when together
they leave no token, or none but the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trio_llm.core.grammar import GrammarState, Words, without, words_of
from trio_llm.core.step import SamplingTask
from trio_llm.errors import FormFailed

Ids = npt.NDArray[np.int64]


class TokenCounts:
    """How often each token occurred; its size is that of the text, not of the vocabulary.

    Args:
        prompt_token_ids: they count as seen, but not as output.
    """

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt_token_ids))}
        self._num_prompt = len(self._places)
        """The prompt's tokens stand in front."""
        self._ids: Ids = np.zeros(self._num_prompt + 64, dtype=np.int64)
        self._ids[: self._num_prompt] = list(self._places)
        self._counts: Ids = np.zeros_like(self._ids)

    def push(self, token: int) -> None:
        """The output has one more."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += 1

    def pop(self, token: int) -> None:
        """The output has one less after all."""
        self._counts[self._places[token]] -= 1

    def snapshot(self) -> tuple[Ids, Ids]:
        """Of each token that prompt or output has: its id, and how often the output has it."""
        size = len(self._places)
        there = self._counts[:size] > 0
        there[: self._num_prompt] = True
        return self._ids[:size][there], self._counts[:size][there]


class BadWords:
    """Token sequences that may not be completed."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._last: dict[int, dict[tuple[int, ...], list[int]]] = {}
        """By the number of tokens before the last, by these tokens: the last ones."""
        for word in words:
            *before, last = word
            self._last.setdefault(len(before), {}).setdefault(tuple(before), []).append(last)

    def completed_after(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that would complete a word after these."""
        found: list[int] = []
        for length, endings in self._last.items():
            if length <= len(tokens):
                found += endings.get(tuple(tokens[len(tokens) - length :]), ())
        return found


@attrs.define
class _Cells:
    """Single logits of many rows, and a number for each of them."""

    rows: list[int] = attrs.field(factory=list)
    ids: list[Ids] = attrs.field(factory=list)
    values: list[npt.NDArray[np.generic]] = attrs.field(factory=list)

    def add(self, row: int, ids: Ids, values: npt.NDArray[np.generic] | None = None) -> None:
        if len(ids):
            self.rows.append(row)
            self.ids.append(ids)
            if values is not None:
                self.values.append(values)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(row, id) of each cell."""
        rows = np.repeat(self.rows, [len(ids) for ids in self.ids])
        return torch.from_numpy(rows).to(device), torch.from_numpy(np.concatenate(self.ids)).to(device)

    def value(self, device: torch.device) -> Tensor:
        return torch.from_numpy(np.concatenate(self.values).astype(np.float32)).to(device)


@attrs.define
class Edits:
    """What is to be done to the logits of one step."""

    biased: _Cells = attrs.field(factory=_Cells)
    counted: _Cells = attrs.field(factory=_Cells)
    factors: dict[int, tuple[float, float, float]] = attrs.field(factory=dict)
    """Of each row of `counted`: repetition, presence and frequency penalty."""
    banned: _Cells = attrs.field(factory=_Cells)
    allowed: _Cells = attrs.field(factory=_Cells)
    masks: dict[int, Words] = attrs.field(factory=dict)
    """By row: the only tokens that stay, as bits."""

    def apply(self, logits: Tensor) -> None:
        """Change `logits` (rows, vocab) in place."""
        device = logits.device
        if self.biased.rows:
            logits.index_put_(self.biased.index(device), self.biased.value(device), accumulate=True)
        if self.counted.rows:
            index = self.counted.index(device)
            logits[index] = self._penalised(logits[index], index[0])
        if self.banned.rows:
            logits[self.banned.index(device)] = -torch.inf
        if self.allowed.rows:
            index = self.allowed.index(device)
            kept = logits[index]
            logits[torch.tensor(self.allowed.rows, dtype=torch.int64, device=device)] = -torch.inf
            logits[index] = kept
        if self.masks:
            rows = torch.tensor(list(self.masks), dtype=torch.int64, device=device)
            logits[rows] = logits[rows].masked_fill_(self._masked(logits.shape[-1], device), -torch.inf)

    def _masked(self, vocab_size: int, device: torch.device) -> Tensor:
        """The tokens that do not stay, (masks, vocab)."""
        words = torch.from_numpy(np.stack(list(self.masks.values())).view(np.int32)).to(device)
        bits = torch.ones(32, dtype=torch.int32, device=device) << torch.arange(32, dtype=torch.int32, device=device)
        return (words[:, :, None] & bits).eq(0).flatten(1)[:, :vocab_size]

    def _penalised(self, values: Tensor, rows: Tensor) -> Tensor:
        device = values.device
        lengths = torch.tensor([len(ids) for ids in self.counted.ids], dtype=torch.int64, device=device)
        factors = torch.tensor([self.factors[row] for row in self.counted.rows], dtype=torch.float32, device=device)
        repetition, presence, frequency = factors.repeat_interleave(lengths, dim=0).unbind(-1)
        counts = self.counted.value(device)
        # a factor near 0 must not make an infinity of a logit that was none
        repetition = repetition.clamp(min=1e-30)
        highest = torch.where(values.isfinite(), torch.finfo(torch.float32).max, values)
        values = torch.where(values < 0, values * repetition, values / repetition).minimum(highest)
        return values - frequency * counts - presence * (counts > 0)


class Rewriter:
    """Follows the tokens of one sequence and says how its logits are to be changed.

    Args:
        task: what was asked.
    """

    def __init__(self, task: SamplingTask) -> None:
        params = task.params
        self._num_prompt = len(task.prompt_token_ids)
        self._tokens = list(task.prompt_token_ids)
        """Prompt and output."""
        self._min_tokens = params.min_tokens
        self._end_ids = _array(task.eos_token_ids | set(params.stop_token_ids))
        self._bias_ids = _array(token for token, _ in params.logit_bias)
        self._biases = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self._allowed_ids = _array(params.allowed_token_ids or ())
        self._bad_words = BadWords(task.bad_words) if task.bad_words else None
        self._factors = (params.repetition_penalty or 1.0, params.presence_penalty, params.frequency_penalty)
        self._counts = TokenCounts(task.prompt_token_ids) if self._factors != (1.0, 0.0, 0.0) else None
        self._grammar = None if task.grammar is None else task.grammar.start()
        self._ignores_eos = params.ignore_eos
        self._allowed_words: Words | None = None
        if task.grammar is not None and params.allowed_token_ids is not None:
            self._allowed_words = words_of(params.allowed_token_ids, len(task.grammar.vocabulary) * 32)

    @staticmethod
    def needed(task: SamplingTask) -> bool:
        """Whether anything was asked that changes logits."""
        params = task.params
        return bool(
            params.logit_bias
            or params.allowed_token_ids
            or params.min_tokens
            or params.presence_penalty
            or params.frequency_penalty
            or (params.repetition_penalty or 1.0) != 1.0
            or task.bad_words
            or task.grammar
        )

    def push(self, token: int) -> None:
        """The output goes on with a token."""
        self._tokens.append(token)
        if self._counts is not None:
            self._counts.push(token)
        if self._grammar is not None:
            self._grammar.push(token)

    def rewind(self, num_outputs: int) -> None:
        """Forget all after the first `num_outputs` tokens of the output: they were drafts, or a step that failed.

        Raises:
            FormFailed: the grammar broke, or the output is not the grammar's.
        """
        num_wrong = len(self._tokens) - self._num_prompt - num_outputs
        assert num_wrong >= 0, "a token of the output was not seen"
        for _ in range(num_wrong):
            token = self._tokens.pop()
            if self._counts is not None:
                self._counts.pop(token)
        if self._grammar is not None:
            self._grammar.pop(num_wrong)
            if self._grammar.is_outside:
                raise self._grammar.failure()

    def edit(self, row: int, edits: Edits) -> None:
        """Say what is to be done to a row of logits that comes after the tokens so far.

        Raises:
            FormFailed: the grammar broke, or leaves no token together with what else is asked.
        """
        edits.biased.add(row, self._bias_ids, self._biases)
        if self._counts is not None:
            edits.counted.add(row, *self._counts.snapshot())
            edits.factors[row] = self._factors
        banned = _array(() if self._bad_words is None else self._bad_words.completed_after(self._tokens))
        is_early = len(self._tokens) - self._num_prompt < self._min_tokens
        if self._grammar is not None:
            if (
                not self._grammar.is_outside
            ):  # else a draft before it is not the grammar's: what comes here is not taken
                edits.masks[row] = self._mask(self._grammar, banned, may_end=not is_early and not self._ignores_eos)
            return
        edits.banned.add(row, banned)
        if is_early:
            edits.banned.add(row, self._end_ids)
        edits.allowed.add(row, self._allowed_ids)

    def _mask(self, state: GrammarState, banned: Ids, *, may_end: bool) -> Words:
        """The tokens that the grammar allows and nothing else forbids.

        Where no other is left, the end tokens may come: the grammar knows best when its text is complete.
        """
        allowed = state.allowed()
        left = allowed if self._allowed_words is None else allowed & self._allowed_words
        left = without(left, banned)
        if not may_end and (later := without(left, self._end_ids)).any():
            return later
        if not left.any():
            left = allowed & state.grammar.ends
        if not left.any():
            message = "structured_output and what else is asked (allowed_token_ids, bad_words) leave no token to choose"
            raise FormFailed(message, field="structured_output")
        return left


def _array(ids: Iterable[int]) -> Ids:
    return np.fromiter(ids, dtype=np.int64)
