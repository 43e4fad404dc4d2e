"""Processed logits against transformers' processors, one by one, together, and in a batch of unlike rows."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from trio_llm.core.logits import BadWords, Edits, Rewriter, TokenCounts
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import SamplingTask

VOCAB_SIZE = 50
EOS = frozenset({2, 7})
PROMPT = [3, 4, 4, 9, 11, 3]
OUTPUT = [5, 4, 5, 9, 20, 5]

CASES: dict[str, dict[str, object]] = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition that rewards": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 0.6},
    "frequency": {"frequency_penalty": -0.4},
    "bias": {"logit_bias": {3: 5.0, 9: -100.0, 49: 2.5}},
    "bad words": {"bad_words": ((5,), (9, 20, 5, 30), (20, 5, 31), (1, 5, 32), (40, 41), (9, 33))},
    "min tokens": {"min_tokens": 7, "stop_token_ids": (8,)},
    "min tokens reached": {"min_tokens": 6},
    "allowed": {"allowed_token_ids": (5, 2, 40, 41, 3)},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {5: 30.0, 10: 4.0, 2: 60.0},
        "bad_words": ((20, 5, 10),),
        "min_tokens": 9,
        "allowed_token_ids": tuple(range(30)),
    },
    "nothing": {},
}


def task(prompt: Sequence[int] = PROMPT, **fields) -> SamplingTask:
    bad_words = fields.pop("bad_words", ())
    params = SamplingParams(**fields).resolved(SamplingParams(), max_tokens=1000, seed=0)
    return SamplingTask(params, 0, tuple(prompt), EOS, bad_words)


def reference(
    logits: Tensor,
    output: Sequence[int],
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    allowed_token_ids: Sequence[int] | None = None,
) -> Tensor:
    """One row as transformers' processors leave it, and by plain formula what transformers has not."""
    ids = torch.tensor([[*PROMPT, *output]])
    scores = logits[None].clone()
    if logit_bias:
        scores = SequenceBiasLogitsProcessor({(token,): bias for token, bias in logit_bias.items()})(ids, scores)
    if repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(repetition_penalty)(ids, scores)
    for token in set(output):
        scores[0, token] -= frequency_penalty * list(output).count(token) + presence_penalty
    if bad_words:
        scores = NoBadWordsLogitsProcessor([list(word) for word in bad_words])(ids, scores)
    ends = [*EOS, *stop_token_ids]
    scores = MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, ends)(ids, scores)
    if allowed_token_ids is not None:
        others = [token for token in range(VOCAB_SIZE) if token not in allowed_token_ids]
        scores[0, others] = float("-inf")
    return scores[0]


def rows(count: int) -> Tensor:
    return torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(count)) * 4


def rewritten(logits: Tensor, rewriters: Sequence[Rewriter | None]) -> Tensor:
    edits = Edits()
    for row, rewriter in enumerate(rewriters):
        if rewriter is not None:
            rewriter.edit(row, edits)
    changed = logits.clone()
    edits.apply(changed)
    return changed


def rewriter_after(output: Sequence[int], **fields) -> Rewriter:
    rewriter = Rewriter(task(**fields))
    for token in output:
        rewriter.push(token)
    return rewriter


@pytest.mark.parametrize("num_outputs", [0, 1, 6])
@pytest.mark.parametrize("name", CASES)
def test_a_row_is_as_transformers_leaves_it(name: str, num_outputs: int) -> None:
    fields, output = CASES[name], OUTPUT[:num_outputs]
    logits = rows(1)
    found = rewritten(logits, [rewriter_after(output, **fields)])
    torch.testing.assert_close(found[0], reference(logits[0], output, **fields))
    unchanged = {"nothing"} | {0: {"presence", "frequency"}, 6: {"min tokens reached"}}.get(num_outputs, set())
    assert torch.equal(found, logits) == (name in unchanged)


def test_rows_of_every_kind_side_by_side() -> None:
    logits = rows(len(CASES))
    rewriters = [rewriter_after(OUTPUT, **fields) if fields else None for fields in CASES.values()]
    found = rewritten(logits, rewriters)
    for row, (fields, rewriter) in enumerate(zip(CASES.values(), rewriters, strict=True)):
        torch.testing.assert_close(found[row], reference(logits[row], OUTPUT, **fields))
        assert torch.equal(found[row], rewritten(logits[row : row + 1], [rewriter])[0])


def test_who_asks_for_nothing_needs_no_rewriter() -> None:
    for name, fields in CASES.items():
        assert Rewriter.needed(task(**fields)) == (name != "nothing")
    assert not Rewriter.needed(task(stop_token_ids=(1,), temperature=0.4, top_p=0.4, logprobs=3, ignore_eos=True))


@pytest.mark.parametrize("name", CASES)
def test_what_was_pushed_and_taken_back_leaves_no_trace(name: str) -> None:
    random = Random(4)
    straight = rewriter_after(OUTPUT, **CASES[name])
    wandering = rewriter_after(OUTPUT[:2], **CASES[name])
    for length in (2, 3, 3, 6):
        for token in OUTPUT[len(wandering._tokens) - len(PROMPT) : length]:
            wandering.push(token)
        for _ in range(random.randrange(1, 9)):
            wandering.push(random.randrange(VOCAB_SIZE))
        wandering.rewind(length)
    logits = rows(2)[:1]
    assert torch.equal(rewritten(logits, [straight]), rewritten(logits, [wandering]))


def test_a_token_that_was_missed_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not seen"):
        rewriter_after([1], presence_penalty=1).rewind(2)


@given(prompt=st.lists(st.integers(0, 300), max_size=200), output=st.lists(st.integers(0, 300), max_size=200))
def test_counts_against_a_plain_count(prompt: list[int], output: list[int]) -> None:
    counts = TokenCounts(prompt)
    for token in output:
        counts.push(token)
    for token in output[len(output) // 2 :]:
        counts.pop(token)
    kept = output[: len(output) // 2]
    ids, found = counts.snapshot()
    assert dict(zip(ids.tolist(), found.tolist(), strict=True)) == {t: kept.count(t) for t in {*prompt, *kept}}
    assert len(ids) == len(set(ids.tolist()))


def test_a_snapshot_does_not_follow() -> None:
    counts = TokenCounts([1])
    before = counts.snapshot()
    counts.push(1)
    assert before[1].tolist() == [0]


@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6),
    tokens=st.lists(st.integers(0, 2), max_size=8),
)
def test_bad_words_against_looking_at_every_continuation(words: list[list[int]], tokens: list[int]) -> None:
    found = set(BadWords(words).completed_after(tokens))
    assert found == {t for t in range(3) if any([*tokens, t][-len(w) :] == w for w in words)}


@pytest.mark.parametrize("penalty", [1e-38, 1e-300, 100.0])
def test_no_penalty_makes_a_logit_infinite_or_revives_one(penalty: float) -> None:
    logits = rows(1) * 1e37
    logits[0, 3], logits[0, 4] = float("-inf"), 0.0
    found = rewritten(logits, [rewriter_after([], repetition_penalty=penalty)])
    assert not found.isnan().any()
    assert not (found == float("inf")).any()
    assert float(found[0, 3]) == float("-inf")
    assert float(found[0, 4]) == 0
