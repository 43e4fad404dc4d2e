"""What sampling parameters mean on the Trio side: when text may stop, what of it is shown, and logprobs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm import SamplingParams
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.request import FinishReason
from trio_llm.core.step import SamplingTask, SequenceOutput, TokenLogprobs
from trio_llm.engine.admission import _encode_words
from trio_llm.engine.choice import Choice, Delta, Track
from trio_llm.engine.detokenizer import StopMatcher, TokenDecoder
from trio_llm.engine.generation import Generation
from trio_llm.engine.simulation import ByteTokenizer, FakeModel, open_simulation
from trio_llm.errors import InvalidRequest

END = 0


def says(text: str) -> FakeExecutor:
    """An executor that says a text and then END."""
    data = [*text.encode(), END]
    return FakeExecutor(
        info=ExecutorInfo(num_blocks=64, block_size=4, vocab_size=256, max_model_len=200),
        next_token=lambda context, index: data[min(index, len(data) - 1)],
    )


def model(**fields: Any) -> FakeModel:
    return FakeModel(eos_token_ids=[END], tokenizer=ByteTokenizer(all_special_ids=(END,)), **fields)


async def generate(text: str, **fields: Any) -> tuple[Generation, list[Delta]]:
    async with open_simulation(model(), executor=says(text)) as engine:
        async with engine.generate("hi", **fields) as generation:
            deltas = [delta async for delta in generation]
        core = await engine.settled()
        assert core.num_free_blocks == core.num_blocks
    return generation, deltas


# -- logprobs


@pytest.mark.parametrize("num_top", [0, 1, 20])
async def test_every_token_has_its_logprob_up_to_the_stop(num_top: int) -> None:
    generation, deltas = await generate("one two three", logprobs=num_top, stop=["two"])
    (choice,) = generation.choices
    assert bytes(choice.token_ids) == b"one two"
    assert choice.text == "one "
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
    assert generation.usage.completion_tokens == len(choice.logprobs)
    assert {len(entry.top) for entry in choice.logprobs} == {num_top}
    for delta in deltas:
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)


async def test_the_end_token_has_its_logprob_too() -> None:
    generation, _ = await generate("ab", logprobs=0)
    assert [entry.token_id for entry in generation.choices[0].logprobs] == [*b"ab", END]
    assert generation.text == "ab"


async def test_who_asks_for_none_gets_none() -> None:
    generation, deltas = await generate("abc")
    assert generation.choices[0].logprobs == []
    assert generation.prompt_logprobs is None
    assert not any(delta.logprobs for delta in deltas)


async def test_prompt_logprobs_are_there_with_the_first_delta() -> None:
    async with open_simulation(model(), executor=says("abc")) as engine:
        async with engine.generate([7, 8, 9], prompt_logprobs=2, n=2) as generation:
            await anext(generation)
            assert generation.prompt_logprobs is not None
            assert [entry.token_id for entry in generation.prompt_logprobs] == [8, 9]
            assert [len(entry.top) for entry in generation.prompt_logprobs] == [2, 2]


@given(
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=9),
    stops=st.lists(st.text("abä", min_size=1, max_size=3), max_size=2),
    text=st.text("abä", max_size=12),
    min_tokens=st.integers(0, 10),
    include=st.booleans(),
    end=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_stops_and_logprobs_however_the_core_cuts_its_outputs(
    cuts: list[int], stops: list[str], text: str, min_tokens: int, include: bool, end: FinishReason
) -> None:
    """Against looking at the whole text: the first stop that is complete with token min_tokens + 1 or later."""
    data = [*text.encode(), *([END] if end is FinishReason.STOP else [])] or [97]
    tokens = list(data)
    decoder = TokenDecoder(ByteTokenizer(all_special_ids=(END,)))
    params = SamplingParams(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include, logprobs=0)
    choice = Choice(0)
    track = Track(choice, decoder, [], params)
    while data and choice.finish_reason is None:
        size = cuts.pop() if len(cuts) > 1 else cuts[0]
        part, data = tuple(data[:size]), data[size:]
        logprobs = tuple(TokenLogprobs(token, -1.0) for token in part)
        choice.extend(track.absorb(SequenceOutput("x", 0, part, None if data else end, logprobs=logprobs)))

    num_text = len(tokens) - (end is FinishReason.STOP)
    for length in range(1, num_text + 1):
        whole = bytes(tokens[:length]).decode(errors="ignore")
        before = len(bytes(tokens[: length - 1]).decode(errors="ignore"))
        if length <= min_tokens:
            continue
        ends = [
            (stop_end, -len(stop))
            for stop in stops
            for stop_end in range(before + 1, len(whole) + 1)
            if whole[:stop_end].endswith(stop)
        ]
        if ends:
            stop_end, size = min(ends)
            expected = whole[: stop_end if include else stop_end + size], length, FinishReason.STOP
            break
    else:
        expected = bytes(tokens[:num_text]).decode(errors="replace"), len(tokens), end
    assert (choice.text, len(choice.token_ids), choice.finish_reason) == expected
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids == tokens[: expected[1]]


# -- the end


async def test_stop_strings_wait_for_min_tokens() -> None:
    for min_tokens, text in {0: "a", 1: "a", 2: "aXa", 4: "aXaXa", 5: "aXaXa", 6: "aXaXaXa"}.items():
        generation, _ = await generate("aXaXaXaXa", stop=["X"], min_tokens=min_tokens, max_tokens=9)
        assert generation.text == text, min_tokens
        assert generation.finish_reason is FinishReason.STOP


async def test_end_tokens_wait_for_min_tokens() -> None:
    generation, _ = await generate("ab", min_tokens=5, max_tokens=9)
    assert len(generation.choices[0].token_ids) == 6


@pytest.mark.parametrize("include", [False, True])
async def test_the_stop_is_part_of_the_text_if_so_asked(include: bool) -> None:
    generation, deltas = await generate("one two", stop=["two", "e t"], include_stop_str_in_output=include)
    assert generation.text == "".join(delta.text for delta in deltas) == ("one t" if include else "on")


async def test_the_text_of_a_stop_token_is_shown_if_so_asked() -> None:
    for include, text in ((False, "ab"), (True, "abc")):
        generation, _ = await generate("abcd", stop_token_ids=[ord("c")], include_stop_str_in_output=include)
        assert generation.text == text


async def test_special_tokens_are_text_if_so_asked() -> None:
    tokenizer = ByteTokenizer(all_special_ids=(END, ord("<")))
    for skip, text in ((True, "ab>c"), (False, "ab<>c")):
        async with open_simulation(
            FakeModel(tokenizer=tokenizer, eos_token_ids=[END]), executor=says("ab<>c")
        ) as engine:
            async with engine.generate("x", skip_special_tokens=skip) as generation:
                deltas = [delta async for delta in generation]
        assert generation.text == "".join(delta.text for delta in deltas) == text


def test_what_includes_its_match_holds_nothing_back() -> None:
    matcher = StopMatcher(["abc"], include_match=True)
    assert matcher.push("xab") == ("xab", False)
    assert matcher.push("cd") == ("c", True)


def test_a_match_that_may_not_stop_can_be_the_beginning_of_one_that_may() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.push("aa", may_stop=False) == ("a", False)
    assert matcher.push("a") == ("", True)


# -- admission


@pytest.mark.parametrize(
    ("field", "value"), [("logit_bias", {256: 1}), ("allowed_token_ids", [1, 300]), ("stop_token_ids", [256])]
)
async def test_tokens_that_the_model_does_not_have_are_refused(field: str, value: object) -> None:
    async with open_simulation(model(), executor=says("a")) as engine:
        with pytest.raises(InvalidRequest, match="the vocabulary has 256") as caught:
            async with engine.generate("x", **{field: value}):
                pytest.fail("admitted")
        assert caught.value.field == field
        assert engine.statistics().num_requests == 0


@attrs.define
class WordTokenizer:
    """Knows some words with the space before them."""

    words: Sequence[str]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        if text in self.words:
            return [1000 + self.words.index(text)]
        return list(text.encode())


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["no"], [(1000,), (1001,)]),
        ([" no"], [(1000,), (1001,)]),
        (["ab"], [(97, 98), (32, 97, 98)]),
        (["no", "no"], [(1000,), (1001,)]),
        ([" "], [(32,)]),
    ],
)
def test_bad_words_are_forbidden_with_a_space_before_them_and_without(words: list[str], wanted: Any) -> None:
    assert _encode_words(WordTokenizer(["no", " no"]), words) == wanted


async def test_the_core_is_told_what_was_asked() -> None:
    seen: list[SamplingTask] = []

    class Watching(FakeExecutor):
        def admit(self, sequence_id: int, task: SamplingTask) -> None:
            seen.append(task)
            super().admit(sequence_id, task)

    watching = Watching(next_token=lambda context, index: END)
    async with open_simulation(model(defaults=SamplingParams(repetition_penalty=1.1)), executor=watching) as engine:
        async with engine.generate("hi", bad_words=["x"], n=2, logit_bias={3: 2}) as generation:
            _ = [delta async for delta in generation]
    assert [task.choice for task in seen] == [0, 1]
    for task in seen:
        assert task.prompt_token_ids == tuple(b"hi")
        assert task.eos_token_ids == {END}
        assert task.bad_words == ((120,), (32, 120))
        assert (task.params.logit_bias, task.params.repetition_penalty) == (((3, 2),), 1.1)
