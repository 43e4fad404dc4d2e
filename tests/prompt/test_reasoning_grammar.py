"""Structured output behind reasoning: what the grammar lets through, and what the parser makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llguidance
import pytest
from llguidance.hf import from_tokenizer

from tests.prompt.whole import read_whole
from trio_llm.core.sampling_params import StructuredOutput
from trio_llm.prompt.chat_template import Conversation
from trio_llm.prompt.events import Message
from trio_llm.prompt.output_parser import OutputParser
from trio_llm.prompt.reasoning import ReasoningFormat, reasoning_format
from trio_llm.prompt.reasoning_grammar import after_reasoning
from trio_llm.prompt.tool_choice import read_tool_choice, tool_grammar
from trio_llm.prompt.tool_formats import tool_format

ByteTokenizer = Callable[..., Any]

VOCABULARIES = {
    "text": ("think", [], []),
    "tokens": ("think", [], ["<think>", "</think>"]),
    "special tokens": ("mistral", ["[THINK]", "[/THINK]"], []),
}


@pytest.fixture(params=VOCABULARIES)
def tokenizer(request: pytest.FixtureRequest, byte_tokenizer: ByteTokenizer) -> Any:
    _, special, added = VOCABULARIES[request.param]
    made = byte_tokenizer(special=special, added=added)
    made.reasoning = reasoning_format(made, VOCABULARIES[request.param][0])
    return made


def accepts(tokenizer: Any, structure: StructuredOutput, text: str) -> bool:
    """Whether a text is complete in a grammar."""
    assert structure.kind == "lark"
    matcher = llguidance.LLMatcher(from_tokenizer(tokenizer), structure.value)
    assert not matcher.get_error()
    token_ids = tokenizer.encode(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


STRUCTURES = [
    (StructuredOutput("json_object"), '{"a": 1}', "[1]"),
    (StructuredOutput("json_schema", '{"type": "array", "items": {"enum": ["start"]}}'), '["start"]', '["x"]'),
    (StructuredOutput("regex", "a/b\\/[c/]+\n"), "a/b/c/c\n", "a/b/"),
    (StructuredOutput("choice", '["yes", "no/\\"\\n"]'), 'no/"\n', "maybe"),
    (
        StructuredOutput(
            "lark",
            '// the start\nstart: "start" restart /start\\// restart_\nrestart: "a"\nrestart_: start_of\nstart_of: "b"\n',
        ),
        "startastart/b",
        "starta",
    ),
]


@pytest.mark.parametrize(("structure", "good", "bad"), STRUCTURES, ids=[each[0].kind for each in STRUCTURES])
def test_any_structure_after_reasoning(tokenizer: Any, structure: StructuredOutput, good: str, bad: str) -> None:
    reasoning: ReasoningFormat = tokenizer.reasoning
    begin, end = reasoning.markers
    thoughts = "well\n<b> </thin\n"
    outside, inside = after_reasoning(structure, reasoning), after_reasoning(structure, reasoning, inside=True)
    for answer, is_good in ((good, True), (bad, False)):
        assert accepts(tokenizer, outside, answer) is is_good
        assert accepts(tokenizer, outside, f"{begin}{thoughts}{end}\n\n{answer}") is is_good
        assert accepts(tokenizer, inside, f"{thoughts}{end}\n\n{answer}") is is_good
        assert accepts(tokenizer, inside, f"{end}{answer}") is is_good
    assert not accepts(tokenizer, inside, good)
    assert not accepts(tokenizer, inside, thoughts)
    assert not accepts(tokenizer, outside, f"{thoughts}{end}{good}")
    text = f"{begin}{thoughts}{end}\n\n{good}"
    assert read_whole(OutputParser(reasoning.parser()), text) == Message(good, thoughts.rstrip("\n"))


def test_a_forced_call_after_reasoning(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    found = tool_format(tokenizer, "hermes")
    assert found is not None
    forced = tool_grammar(found, tools, read_tool_choice("required", tools))
    assert forced is not None
    text = f'hm{tokenizer.reasoning.markers[1]}\n\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
    assert accepts(tokenizer, after_reasoning(forced, tokenizer.reasoning, inside=True), text)
    message = read_whole(OutputParser(tokenizer.reasoning.parser(inside=True), found.parser(["now"])), text)
    assert (message.content, message.reasoning, len(message.tool_calls)) == ("", "hm", 1)


@pytest.mark.parametrize(
    ("header", "opened"),
    [
        ("<A><think>\n", True),
        ("<A>", False),
        ("<A><think>\n\n</think>\n\n", False),
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_whether_the_template_opens_the_reasoning(byte_tokenizer: ByteTokenizer, header: str, opened: bool) -> None:
    template = f"{{{{ messages[0].content }}}}{{% if add_generation_prompt %}}{header}{{% endif %}}"
    made = byte_tokenizer(template=template + "{# </think> #}")
    found = reasoning_format(made)
    assert found is not None
    messages = [{"role": "user", "content": "hi"}]
    assert found.is_opened_by_template(made, Conversation(messages)) is opened
    assert not found.is_opened_by_template(made, Conversation(messages, add_generation_prompt=False))
