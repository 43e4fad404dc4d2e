"""Stop strings across token borders: found as in the whole text, held back no longer than needed."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trio_llm.engine.detokenizer import StopMatcher

stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the match that is complete first, by looking at every prefix."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


@given(tokens=st.lists(st.text("abc", max_size=4), max_size=20), stops=stops)
@example(tokens=["aab", "aaab"], stops=["aaab"])
@example(tokens=["abab", "abc"], stops=["ababc"[:5].replace("c", "a")])
def test_against_the_whole_text(tokens: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_ = ""
    seen = ""
    for token in tokens:
        seen += token
        piece, stopped = matcher.push(token)
        given_ += piece
        match = first_match(seen, stops)
        assert stopped == (match is not None)
        if match is not None:
            start, end = match
            assert given_ == seen[:start]
            assert matcher.match == seen[start:end]
            return
        assert matcher.match is None
        held = max(k for k in range(6) if k == 0 or any(len(s) > k and seen.endswith(s[:k]) for s in stops))
        assert given_ == seen[: len(seen) - held]
    assert given_ + matcher.flush() == seen


@pytest.mark.parametrize(
    ("tokens", "stops", "text"),
    [
        (["ABC", "DEF", "GHI", "J"], ["DEFGHIJ"], "ABC"),
        (["1, 2", ", 7", ", 8"], ["7"], "1, 2, "),
        (["a stop"], ["stop", "a stop"], ""),
        (["abcde"], ["abcde", "bc"], "a"),
        (["ab", "cd", "e"], ["abcde", "bc"], "a"),
    ],
)
def test_cases(tokens: list[str], stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    given_ = ""
    for token in tokens:
        piece, stopped = matcher.push(token)
        given_ += piece
        if stopped:
            break
    assert stopped
    assert given_ == text


def test_a_prefix_that_never_completes_is_given_back() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("x <en") == ("x ", False)
    assert matcher.push("d") == ("", False)
    assert matcher.push("less") == ("<endless", False)
    assert matcher.flush() == ""


def test_a_stop_string_of_any_length_costs_the_same() -> None:
    """Half a million characters of stop string: constant work for a character of text."""
    matcher = StopMatcher(["ab" * 250_000])
    for _ in range(1000):
        assert matcher.push("abx") == ("abx", False)
