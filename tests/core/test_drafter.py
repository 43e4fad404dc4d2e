"""NgramDrafter: the longest thing said before, at a constant cost a token, for as long as the sequence lives."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest

from trio_llm.core.drafter import NgramDrafter
from trio_llm.core.request import Request, Sequence

from .helpers import make_request


def sequences_of(prompt: Seq[int], n: int = 1) -> list[Sequence]:
    request: Request = make_request("r", prompt, n=n)
    request.sequences += [Sequence(index, request, index, list(prompt)) for index in range(n)]
    return request.sequences


def compute(drafter: NgramDrafter, sequence: Sequence, *tokens: int) -> None:
    """As after a step that computed all that was left and sampled `tokens`."""
    sequence.num_computed_tokens = sequence.num_tokens + len(tokens) - 1
    sequence.token_ids += tokens
    drafter.observe(sequence)


def propose(drafter: NgramDrafter, sequence: Sequence, count: int) -> list[int]:
    (guess,) = drafter.propose([(sequence, count)])
    assert (drafter.backlog(sequence) is None) == (not guess)
    return list(guess)


def naive_source(tokens: Seq[int], max_n: int, min_n: int) -> int | None:
    """Where the latest earlier occurrence of the longest suffix goes on, by looking everywhere."""
    for n in range(max_n, min_n - 1, -1):
        suffix = list(tokens[-n:])
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == suffix:
                return end
    return None


@pytest.mark.parametrize(("max_n", "min_n"), [(4, 2), (3, 3), (1, 1), (5, 1)])
@pytest.mark.parametrize("vocab", [2, 5, 30])
def test_proposes_what_followed_the_longest_suffix(vocab: int, max_n: int, min_n: int) -> None:
    drafter = NgramDrafter(max_n=max_n, min_n=min_n)
    numbers = random.Random(vocab * 100 + max_n)
    (sequence,) = sequences_of([numbers.randrange(vocab) for _ in range(12)])
    for _ in range(300):
        compute(drafter, sequence, *(numbers.randrange(vocab) for _ in range(numbers.randrange(1, 4))))
        source = naive_source(sequence.token_ids, max_n, min_n)
        proposed = propose(drafter, sequence, 6)
        if source is None:
            assert not proposed
            continue
        # while a copy is right it is not looked up anew: then it agrees with more than max_n tokens
        held = drafter._histories[sequence.id].source
        assert held is not None
        agrees = next((k for k in range(held) if sequence.token_ids[held - 1 - k] != sequence.token_ids[-1 - k]), held)
        best = next(
            (k for k in range(source) if sequence.token_ids[source - 1 - k] != sequence.token_ids[-1 - k]), source
        )
        assert agrees >= min(best, max_n)
        assert proposed[0] == sequence.token_ids[held]


def test_a_period_goes_on_beyond_what_was_said() -> None:
    drafter = NgramDrafter()
    (sequence,) = sequences_of([1, 2, 3, 1, 2])
    compute(drafter, sequence, 3)
    assert propose(drafter, sequence, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert propose(drafter, sequence, 1) == [1]


def test_nothing_to_propose() -> None:
    drafter = NgramDrafter()
    (sequence,) = sequences_of([1])
    assert not propose(drafter, sequence, 4)
    compute(drafter, sequence, 2)
    assert not propose(drafter, sequence, 4)
    compute(drafter, sequence, 3)
    assert not propose(drafter, sequence, 4)


class CountingDict(dict[int, int]):
    """Counts its operations."""

    count = 0

    def get(self, *args):
        CountingDict.count += 1
        return super().get(*args)

    def __setitem__(self, key, value):
        CountingDict.count += 1
        super().__setitem__(key, value)


@pytest.mark.parametrize("length", [10, 1000, 20_000])
def test_a_token_costs_the_same_in_any_context(length: int) -> None:
    drafter = NgramDrafter(max_n=4, min_n=2)
    numbers = random.Random(length)
    (sequence,) = sequences_of([numbers.randrange(50) for _ in range(length)])
    compute(drafter, sequence, 1)
    history = drafter._histories[sequence.id]
    history.prompt.entries = CountingDict(history.prompt.entries)
    history.output.entries = CountingDict(history.output.entries)
    CountingDict.count = 0
    for _ in range(100):
        compute(drafter, sequence, numbers.randrange(50))
        propose(drafter, sequence, 8)
    assert CountingDict.count <= 100 * 3 * 3  # for each n a look in both indices, and an entry
    assert len(history.prompt.entries) + len(history.output.entries) <= 3 * sequence.num_tokens


def test_a_long_prompt_is_indexed_as_it_is_computed() -> None:
    drafter = NgramDrafter(max_n=3, min_n=3)
    (sequence,) = sequences_of(list(range(100)))
    sizes = []
    for computed in (40, 80):
        sequence.num_computed_tokens = computed
        drafter.observe(sequence)
        sizes.append(len(drafter._histories[sequence.id].prompt.entries))
    assert sizes == [38, 78]


def test_preemption_keeps_what_is_known() -> None:
    drafter = NgramDrafter()
    (sequence,) = sequences_of([1, 2, 3, 4])
    compute(drafter, sequence, 1, 2)
    before = propose(drafter, sequence, 4)
    history = drafter._histories[sequence.id]
    sizes = len(history.prompt.entries), len(history.output.entries)
    for computed in (0, 2, 5):  # computed anew, in chunks
        sequence.num_computed_tokens = computed
        drafter.observe(sequence)
    assert propose(drafter, sequence, 4) == before == [3, 4, 1, 2]
    assert (len(history.prompt.entries), len(history.output.entries)) == sizes
    compute(drafter, sequence, 3)
    assert propose(drafter, sequence, 2) == [4, 1]


def test_choices_share_the_index_of_their_prompt_and_nothing_else() -> None:
    drafter = NgramDrafter()
    first, second, third = sequences_of([1, 2, 3, 1, 2], n=3)
    compute(drafter, first, 7, 1, 2)
    compute(drafter, second, 3)
    assert drafter._histories[first.id].prompt is drafter._histories[second.id].prompt
    assert propose(drafter, first, 2) == [7, 1]
    assert propose(drafter, second, 2) == [1, 2]
    drafter.release(first.id)
    drafter.release(first.id)
    compute(drafter, third, 3)
    assert propose(drafter, third, 2) == [1, 2]
    assert not propose(drafter, first, 2)
    for sequence in (second, third):
        drafter.release(sequence.id)
    assert not drafter._histories
