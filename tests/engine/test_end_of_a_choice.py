"""The first end in token order wins, however the core cuts its outputs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trio_llm.core.request import FinishReason
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import SequenceOutput
from trio_llm.engine.choice import Choice, Delta, Track
from trio_llm.engine.detokenizer import TokenDecoder
from trio_llm.engine.simulation import ByteTokenizer

TOKENS = list(b"ab\xc3\xa4")


@given(
    outputs=st.lists(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4), min_size=1, max_size=8),
    stops=st.lists(st.text("abä", min_size=1, max_size=3), max_size=3),
    end=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_against_the_whole_output(outputs: list[list[int]], stops: list[str], end: FinishReason) -> None:
    tokens = [token for output in outputs for token in output]
    choice = Choice(0)
    track = Track(choice, TokenDecoder(ByteTokenizer()), [], SamplingParams(stop=tuple(stops)))
    deltas: list[Delta] = []
    for number, output in enumerate(outputs, 1):
        delta = track.absorb(SequenceOutput("id", 0, tuple(output), end if number == len(outputs) else None))
        deltas.append(delta)
        choice.extend(delta)
        if delta.finish_reason is not None:
            break

    # what a reader of the whole would say
    text_tokens = tokens[:-1] if end is FinishReason.STOP else tokens
    for length in range(1, len(text_tokens) + 1):
        text = bytes(text_tokens[:length]).decode(errors="replace")
        matches = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        if matches:
            stop_end, stop_length = min(matches)
            expected = text[: stop_end + stop_length], length, FinishReason.STOP
            break
    else:
        expected = bytes(text_tokens).decode(errors="replace"), len(tokens), end
    assert (choice.text, len(choice.token_ids), choice.finish_reason) == expected
    assert choice.token_ids == tokens[: expected[1]]
    assert "".join(delta.text for delta in deltas) == choice.text


@given(
    outputs=st.lists(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4), min_size=1, max_size=8),
    stops=st.lists(st.text("abä", min_size=1, max_size=3), max_size=3),
    end=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_each_token_has_its_own_text_however_many_come_together(
    outputs: list[list[int]], stops: list[str], end: FinishReason
) -> None:
    def parts(outputs: list[list[int]]) -> list[tuple[str, tuple[int, ...]]]:
        choice = Choice(0)
        track = Track(choice, TokenDecoder(ByteTokenizer()), [], SamplingParams(stop=tuple(stops)))
        found: list[tuple[str, tuple[int, ...]]] = []
        for number, output in enumerate(outputs, 1):
            delta = track.absorb(SequenceOutput("id", 0, tuple(output), end if number == len(outputs) else None))
            choice.extend(delta)
            for text, token_ids in delta.by_token():
                assert len(token_ids) <= 1
                if token_ids or not found:
                    found.append((text, token_ids))
                else:  # the token that showed the stop string is no part of the output
                    found[-1] = found[-1][0] + text, found[-1][1]
            if delta.finish_reason is not None:
                break
        return found

    assert parts(outputs) == parts([[token] for output in outputs for token in output])
