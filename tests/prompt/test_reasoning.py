"""Reasoning is told from the answer, wherever the text is cut; and all parsers together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.prompt.whole import read_whole
from trio_llm.errors import ConfigurationError
from trio_llm.prompt.events import Event, Message, ReasoningPiece, TextPiece, ToolCall, collect
from trio_llm.prompt.output_parser import OutputParser
from trio_llm.prompt.reasoning import ReasoningFormat, reasoning_format
from trio_llm.prompt.tool_parsers import HermesParser

CheckEveryCut = Callable[[Callable[[], Any], str], list[Event]]
THINK = ReasoningFormat("think")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nwell\n\nso\n</think>\n\nYes\n", "well\n\nso", "Yes\n"),
        ("\n <think>well</think>Yes", "well", "Yes"),
        ("<think>\n\n</think>\n\nYes", "", "Yes"),
        ("<think></think>", "", ""),
        ("<think>\nwell </think> Yes <think>no</think>", "well ", " Yes <think>no</think>"),
        ("<think>a</thin</think>b", "a</thin", "b"),
        ("<think>\nnever ends\n", "never ends", ""),
        ("<think>cut off</thi", "cut off</thi", ""),
        ("Yes <think>no</think>", "", "Yes <think>no</think>"),
        (" \n Yes", "", " \n Yes"),
        ("<thin", "", "<thin"),
        ("<thinking>", "", "<thinking>"),
        ("no</think>", "", "no</think>"),
        ("\n", "", "\n"),
        ("", "", ""),
    ],
)
def test_an_answer_that_begins_outside(check_every_cut: CheckEveryCut, text: str, reasoning: str, content: str) -> None:
    assert collect(check_every_cut(THINK.parser, text)) == Message(content, reasoning)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("well\n</think>\n\nYes", "well", "Yes"),
        ("\nwell\n</think>Yes", "well", "Yes"),
        ("<think>\nwell\n</think>Yes", "well", "Yes"),
        ("</think>Yes", "", "Yes"),
        ("well\n", "well", ""),
        ("", "", ""),
    ],
)
def test_an_answer_that_begins_inside(check_every_cut: CheckEveryCut, text: str, reasoning: str, content: str) -> None:
    assert collect(check_every_cut(lambda: THINK.parser(inside=True), text)) == Message(content, reasoning)


def test_nothing_is_held_back_for_longer_than_it_may_be_a_marker() -> None:
    parser = THINK.parser()
    assert parser.push("<think") == []
    assert parser.push(">\n") == []
    assert parser.push("a\n") == [ReasoningPiece("a")]
    assert parser.push("b</") == [ReasoningPiece("\nb")]
    assert parser.push("think>\n") == []
    assert parser.push("\nc\n") == [TextPiece("c\n")]
    assert parser.push("<think>") == [TextPiece("<think>")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("template", "name", "special"),
    [
        ("<think>..</think>", "think", ()),
        ("[THINK]..[/THINK]", "mistral", ("[/THINK]", "[THINK]")),
        ("plain", None, ()),
    ],
)
def test_the_format_shows_in_the_template(
    byte_tokenizer: Callable[..., Any], template: str, name: str | None, special: tuple[str, ...]
) -> None:
    tokenizer = byte_tokenizer(special=["[THINK]", "[/THINK]"], added=["<think>", "</think>"], template=template)
    found = reasoning_format(tokenizer)
    assert (found.name if found else None) == name
    if found:
        assert sorted(tokenizer.convert_ids_to_tokens(list(found.special_token_ids))) == list(special)
        assert tokenizer.convert_ids_to_tokens([found.end_token_id]) == ["[/THINK]" if special else "</think>"]
    assert reasoning_format(tokenizer, "none") is None
    with pytest.raises(ConfigurationError, match="there are auto, none, think, mistral"):
        reasoning_format(tokenizer, "other")


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [("x<think>", True), ("x<think>\n", True), ("<think>\n\n</think>\n\n", False), ("think>", False), ("", False)],
)
def test_whether_it_begins_inside_shows_in_the_prompt(
    byte_tokenizer: Callable[..., Any], prompt: str, inside: bool
) -> None:
    for added in ([], ["<think>", "</think>"]):
        tokenizer = byte_tokenizer(added=added, template="</think>")
        found = reasoning_format(tokenizer)
        assert found is not None
        assert found.begins_inside(tokenizer, tokenizer.encode("a" * 50 + prompt)) is inside


# --- all together ---

TEXT = '<think>\n<tool_call>{"name": "now"}</tool_call>\n</think>\n\nSo: <tool_call>{"name": "now"}</tool_call>'
EXPECTED = Message("So: ", '<tool_call>{"name": "now"}</tool_call>', (ToolCall("now", "{}"),))


def output_parser() -> OutputParser:
    return OutputParser(THINK.parser(), HermesParser(["now"]))


def test_calls_are_looked_for_after_the_reasoning(check_every_cut: CheckEveryCut) -> None:
    assert collect(check_every_cut(output_parser, TEXT)) == EXPECTED
    assert read_whole(output_parser(), TEXT) == EXPECTED


def test_an_output_parser_may_have_either_part_or_none(check_every_cut: CheckEveryCut) -> None:
    assert read_whole(OutputParser(), TEXT) == Message(TEXT)
    only_tools = collect(check_every_cut(lambda: OutputParser(None, HermesParser(["now"])), TEXT))
    assert only_tools.tool_calls == (ToolCall("now", "{}"),) * 2
    only_reasoning = collect(check_every_cut(lambda: OutputParser(THINK.parser()), TEXT))
    assert only_reasoning == Message('So: <tool_call>{"name": "now"}</tool_call>', EXPECTED.reasoning)
    assert OutputParser().push("") == []


@given(text=st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "<", "think>"]), max_size=8).map("".join))
def test_no_answer_loses_more_than_markers_and_line_ends(text: str) -> None:
    for inside in (False, True):
        parser = OutputParser(THINK.parser(inside=inside))
        message = collect([*(event for character in text for event in parser.push(character)), *parser.finish()])
        assert message == read_whole(OutputParser(THINK.parser(inside=inside)), text)
        kept = [character for character in message.reasoning + message.content if character != "\n"]
        dropped = len(text.replace("\n", "")) - len(kept)
        # at most one of each marker, and blanks before the first
        assert 0 <= dropped <= len("<think></think>") + text.count(" ")
        if not inside and not text.lstrip().startswith("<think>"):
            assert message == Message(text)


# --- tokens of the reasoning ---


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["<think>", "a", "b", "</think>", "c", "d"], 4),
        (["<think>", "a", "b"], 3),
        (["a", "</think>", "b"], 0),
        (["\n", "a"], 0),
        ([], 0),
    ],
)
def test_tokens_of_the_reasoning_are_counted(tokens: list[str], expected: int) -> None:
    ids = {token: index for index, token in enumerate(["<think>", "</think>", "a", "b", "c", "d", "\n"])}
    for size in (1, 2, 6):
        for end in (ids["</think>"], None):
            parser = OutputParser(THINK.parser(), reasoning_end_token_id=end)
            for at in range(0, len(tokens), size):
                piece = tokens[at : at + size]
                parser.push("".join(piece), [ids[token] for token in piece])
            parser.finish()
            if end is not None or size == 1:
                assert parser.reasoning_tokens == expected


def test_tokens_count_without_text() -> None:
    parser = OutputParser(THINK.parser(inside=True), reasoning_end_token_id=9)
    parser.push("", [1])
    parser.push("a", [2, 3])
    assert parser.reasoning_tokens == 3
    parser.push("", [9, 4])
    parser.push("</think>b", [5])
    assert parser.reasoning_tokens == 4
