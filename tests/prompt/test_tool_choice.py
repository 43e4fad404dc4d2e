"""tool_choice as a grammar: what it lets through is read back as calls whose arguments fit their schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import llguidance
import numpy as np
import pytest
from llguidance.hf import from_tokenizer

from tests.prompt.whole import read_whole
from trio_llm.errors import InvalidRequest
from trio_llm.prompt.events import Message
from trio_llm.prompt.output_parser import OutputParser
from trio_llm.prompt.tool_choice import ToolChoice, read_tool_choice, tool_grammar
from trio_llm.prompt.tool_formats import ToolFormat, tool_format

ByteTokenizer = Callable[..., Any]

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
SCHEMAS: dict[str, Any] = {
    "now": None,
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "exact": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "say": {
        "properties": {"text": {"type": "string", "maxLength": 8}, "to": {"enum": ["all", "x\"'\\\n", None]}},
        "required": ["text", "to"],
        "additionalProperties": False,
    },
    "walk": {
        "type": "object",
        "properties": {
            "start": {"$ref": "#/$defs/node"},
            "tags": {"type": "array", "items": {"type": "null"}, "maxItems": 2},
        },
        "additionalProperties": False,
        "$defs": {"node": NODE},
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, **({} if schema is None else {"parameters": schema})}}
    for name, schema in SCHEMAS.items()
]
VOCABULARIES: dict[str, tuple[str, list[str], list[str]]] = {
    "hermes": ("hermes", [], []),
    "hermes with tokens": ("hermes", [], ["<tool_call>", "</tool_call>"]),
    "hermes with special tokens": ("hermes", ["<tool_call>", "</tool_call>"], []),
    "qwen3_coder": ("qwen3_coder", [], []),
    "qwen3_coder with tokens": ("qwen3_coder", [], ["<tool_call>", "</tool_call>"]),
    "llama3": ("llama3", ["<|python_tag|>"], []),
    "mistral": ("mistral", ["[TOOL_CALLS]"], []),
    "mistral with arguments": ("mistral", ["[TOOL_CALLS]", "[ARGS]"], []),
    "pythonic": ("pythonic", [], []),
}


class Model:
    """A tokenizer, its format, and random walks through grammars."""

    def __init__(self, byte_tokenizer: ByteTokenizer, vocabulary: str) -> None:
        name, special, added = VOCABULARIES[vocabulary]
        self.tokenizer = byte_tokenizer(special=special, added=added)
        found = tool_format(self.tokenizer, name)
        assert found is not None
        self.format: ToolFormat = found
        self._vocabulary = from_tokenizer(self.tokenizer)

    def grammar(self, tool_choice: Any, *, tools: Sequence[Mapping[str, Any]] = TOOLS, parallel: bool = True) -> str:
        choice = read_tool_choice(tool_choice, tools)
        grammar = tool_grammar(self.format, tools, choice, parallel=parallel)
        assert grammar is not None
        assert grammar.kind == "lark"
        return grammar.value

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._vocabulary, grammar)
        assert not matcher.get_error()
        return matcher

    def walk(self, grammar: str, seed: int) -> str | None:
        """A text of the grammar; None if chance does not come to an end."""
        random, matcher, token_ids = Random(seed), self.matcher(grammar), []
        end = self.tokenizer.eos_token_id
        for _ in range(600):
            words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
            # what ends something comes often, or strings would never end
            heavy = [token for token in allowed if self.tokenizer.decode([token]) in ('"', "}", "]", ")", ",", "1")]
            token = random.choice(heavy if heavy and random.random() < 0.5 else allowed)
            if token == end:
                return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
            token_ids.append(token)
            assert matcher.consume_token(token)
        return None

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether a text, special tokens and all, is one of the grammar's."""
        matcher = self.matcher(grammar)
        token_ids = self.tokenizer.encode(text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def read(self, text: str, *, stream: bool = False) -> Message:
        parser = self.format.parser(SCHEMAS, stream_arguments=stream, schemas=SCHEMAS)
        return read_whole(OutputParser(tools=parser), text)


@pytest.fixture(params=VOCABULARIES)
def model(request: pytest.FixtureRequest, byte_tokenizer: ByteTokenizer) -> Model:
    return Model(byte_tokenizer, request.param)


def fits(name: str, arguments: dict[str, Any]) -> bool:
    """Whether arguments satisfy the schema of a tool; by hand, so that no compiler vouches for itself."""
    if name == "now":
        return arguments == {}
    if name == "add":
        kinds: dict[str, Any] = {"a": int, "b": int | float, "exact": bool}
        known = all(key in kinds and isinstance(value, kinds[key]) for key, value in arguments.items())
        return known and "b" in arguments and not isinstance(arguments.get("a"), bool)
    if name == "say":
        text, to = arguments["text"], arguments["to"]
        return len(arguments) == 2 and isinstance(text, str) and len(text) <= 8 and to in ("all", "x\"'\\\n", None)
    node = arguments.get("start", {})
    while node:
        assert node.keys() == {"next"}
        node = node["next"]
    return arguments.keys() <= {"start", "tags"} and arguments.get("tags", []) in ([], [None], [None, None])


def check(message: Message, names: Sequence[str]) -> None:
    assert message.content == ""
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.name in names
        assert fits(call.name, json.loads(call.arguments)), call


@pytest.mark.parametrize("parallel", [True, False])
def test_whatever_the_grammar_lets_through_is_read_back(model: Model, parallel: bool) -> None:
    grammar = model.grammar("required", parallel=parallel)
    seen: set[str] = set()
    counts: set[int] = set()
    for seed in range(30):
        text = model.walk(grammar, seed)
        if text is None:
            continue
        message = model.read(text)
        check(message, list(SCHEMAS))
        assert model.read(text, stream=True) == message
        seen |= {call.name for call in message.tool_calls}
        counts.add(len(message.tool_calls))
    assert seen == set(SCHEMAS)
    assert (max(counts) > 1) is parallel


@pytest.mark.parametrize(
    ("tool_choice", "names"),
    [
        ({"type": "function", "function": {"name": "add"}}, ["add"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": name}} for name in ("say", "now")],
                },
            },
            ["now", "say"],
        ),
    ],
)
def test_a_choice_among_the_tools(model: Model, tool_choice: Any, names: list[str]) -> None:
    grammar = model.grammar(tool_choice)
    seen = set()
    for seed in range(12):
        text = model.walk(grammar, seed)
        if text is not None:
            message = model.read(text)
            check(message, names)
            seen |= {call.name for call in message.tool_calls}
            if len(names) == 1:
                assert len(message.tool_calls) == 1
    assert seen == set(names)


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2.5\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": 2.5}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2.5}}]',
    "mistral with arguments": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2.5}',
    "pythonic": "[add(a=1, b=2.5)]",
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_calls_as_models_write_them_are_let_through(byte_tokenizer: ByteTokenizer, vocabulary: str) -> None:
    model = Model(byte_tokenizer, vocabulary)
    text = WRITTEN.get(vocabulary) or WRITTEN[model.format.name]
    grammar = model.grammar({"type": "function", "function": {"name": "add"}})
    assert model.accepts(grammar, text)
    assert not model.accepts(grammar, "Yes")
    assert not model.accepts(grammar, text.replace("2.5", '"x"'))
    assert not model.accepts(grammar, text.replace("add", "now"))
    assert not model.accepts(grammar, text + text)
    twice = {"hermes": "\n", "qwen3_coder": "\n", "llama3": "; "}.get(model.format.name)
    if twice is not None:
        assert model.accepts(model.grammar("required"), text + twice + text)
        assert not model.accepts(model.grammar("required", parallel=False), text + twice + text)


def test_keyword_arguments_may_be_left_out_where_they_are_not_required(byte_tokenizer: ByteTokenizer) -> None:
    model = Model(byte_tokenizer, "pythonic")
    grammar = model.grammar("required")
    for arguments in ("b=1", "a=1, b=1", "b=1, exact=true", "a=1, b=1, exact=false"):
        assert model.accepts(grammar, f"[add({arguments})]")
    for arguments in ("", "a=1", "b=1, a=1", "b=1,", ", b=1", "b=1, c=1", "a=1, exact=true"):
        assert not model.accepts(grammar, f"[add({arguments})]")
    assert model.accepts(grammar, "[now(), now()]")


STRICT = [{**tool, "function": {**tool["function"], "strict": tool["function"]["name"] == "add"}} for tool in TOOLS]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_strict_functions_are_held_to_their_schemas_in_any_text(byte_tokenizer: ByteTokenizer, vocabulary: str) -> None:
    model = Model(byte_tokenizer, vocabulary)
    choice = read_tool_choice("auto", STRICT)
    assert tool_grammar(model.format, TOOLS, choice) is None
    if model.format.name in ("llama3", "pythonic"):
        assert tool_grammar(model.format, STRICT, choice) is None
        return
    many, one = model.grammar("auto", tools=STRICT), model.grammar("auto", tools=STRICT, parallel=False)
    call = WRITTEN.get(vocabulary) or WRITTEN[model.format.name]
    lenient = call.replace('"add"', '"say"').replace("]add[", "]say[").replace("=add>", "=say>")
    for text in ("", "Yes <b> [TOOL\n", call, f"So: {call}", f"So: {call} then", lenient):
        assert model.accepts(many, text), text
        assert model.accepts(one, text), text
    assert model.accepts(many, f"a{call}b\n{call}\n{lenient}")
    for text in (
        call[:-1],
        call.replace("2.5", '"x"'),
        f"So: {call.replace('2.5', '[]')}",
        call.replace("add", "other"),
    ):
        assert not model.accepts(many, text), text
        assert not model.accepts(one, text), text
    assert model.read(f"So: {call} then").content == "So:  then"


def function(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "add", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("parameters", "arguments", "is_let_through"),
    [
        ({}, "{}", True),
        ({}, '{"a": 1}', False),
        ({"type": "object", "properties": {}}, '{"a": 1}', False),
        ({"type": "object", "additionalProperties": True}, '{"a": 1}', True),
        ({"type": "object", "properties": {"a": {}}}, '{"a": [1]}', True),
        ({"properties": {"a": {"type": "integer"}}}, "3", False),
    ],
)
def test_parameters_are_of_an_object(
    byte_tokenizer: ByteTokenizer, parameters: Any, arguments: str, is_let_through: bool
) -> None:
    model = Model(byte_tokenizer, "llama3")
    grammar = model.grammar("required", tools=function(parameters))
    assert model.accepts(grammar, f'{{"name": "add", "parameters": {arguments}}}') is is_let_through


@pytest.mark.parametrize("parameters", ["x", [], {"type": "array"}, {"type": ["object", "null"]}])
def test_parameters_that_are_of_none(byte_tokenizer: ByteTokenizer, parameters: Any) -> None:
    with pytest.raises(InvalidRequest, match="parameters of 'add' must be a JSON schema") as caught:
        Model(byte_tokenizer, "hermes").grammar("required", tools=function(parameters))
    assert caught.value.field == "tools"


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {}}, "oneOf": []},
        {"properties": {"a b": {}}},
        {"properties": {}, "required": ["a"]},
        {"properties": ["a"], "required": ["a"]},
        {"properties": {"a": {}}, "required": "a"},
        {"properties": {"a": {}}, "required": [["a"]]},
    ],
)
def test_what_keyword_arguments_cannot_be_held_to(byte_tokenizer: ByteTokenizer, parameters: Any) -> None:
    with pytest.raises(InvalidRequest, match="cannot be held to") as caught:
        Model(byte_tokenizer, "pythonic").grammar("required", tools=function(parameters))
    assert caught.value.field == "tools"


def test_what_a_choice_says() -> None:
    every = tuple(SCHEMAS)
    listed = [{"type": "function", "function": {"name": name}} for name in ("say", "now")]
    assert read_tool_choice(None, []) == read_tool_choice("none", []) == read_tool_choice("none", TOOLS) == ToolChoice()
    assert read_tool_choice(None, TOOLS) == read_tool_choice("auto", TOOLS) == ToolChoice(every)
    assert read_tool_choice("required", TOOLS) == ToolChoice(every, is_required=True)
    assert read_tool_choice(listed[0], TOOLS) == ToolChoice(("say",), is_required=True, is_named=True)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": listed}}
    assert read_tool_choice(allowed, TOOLS) == ToolChoice(("now", "say"))
    assert tool_grammar(ToolFormat("hermes"), TOOLS, ToolChoice(every)) is None


@pytest.mark.parametrize(
    ("tool_choice", "words"),
    [
        ("any", 'is "none", "auto"'),
        (3, 'is "none", "auto"'),
        ({}, 'is "none", "auto"'),
        ({"type": "custom"}, 'is "none", "auto"'),
        ({"type": "function"}, "have a function"),
        ({"type": "function", "function": {"name": "other"}}, "names 'other'"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "no", "tools": TOOLS}}, 'is "none", "auto"'),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "at least one"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["now"]}}, "have a function"),
    ],
)
def test_choices_that_are_none(tool_choice: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        read_tool_choice(tool_choice, TOOLS)
    assert caught.value.field == "tool_choice"


def test_a_choice_needs_tools() -> None:
    for tool_choice in ("auto", "required"):
        with pytest.raises(InvalidRequest, match="needs tools"):
            read_tool_choice(tool_choice, [])


@pytest.mark.parametrize(
    "tool",
    [
        {},
        "now",
        {"type": "custom", "function": {"name": "a"}},
        {"function": {"name": ""}},
        {"function": {"name": "a b"}},
    ],
)
def test_tools_that_are_none(tool: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[4\]") as caught:
        read_tool_choice(None, [*TOOLS, tool])
    assert caught.value.field in ("tools", "tools[4].function.name")


def test_a_name_is_given_once() -> None:
    with pytest.raises(InvalidRequest, match="two tools are called 'now'"):
        read_tool_choice("none", [*TOOLS, TOOLS[0]])


ELEMENT = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "1", "two\nlines\n", "a</parameter>", "<b>"], []),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "\n\n\n"], ["a", "abcd"]),
        ({"type": "integer"}, ["1", "-5"], ["1.5", "x", ""]),
        ({"enum": ["a", 'b"\n', 3, None]}, ["a", 'b"\n', "3", "null"], ["b", "4", '"a"']),
        ({"const": "a"}, ["a"], ["b"]),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, ["ab", ""], ["null", "abc"]),
        ({"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]}, ["red", "null"], ["blue", "nul"]),
        ({"$ref": "#/$defs/colour"}, ["red"], ["blue", "null"]),
        ({"type": "array", "items": {"$ref": "#/$defs/colour"}}, ["[]", '["red"]'], ["[1]", "red"]),
        ({}, ["x", "[1]"], []),
        (True, ["x", "[1]"], []),
    ],
)
def test_values_without_quotes(byte_tokenizer: ByteTokenizer, schema: Any, good: list[str], bad: list[str]) -> None:
    model = Model(byte_tokenizer, "qwen3_coder")
    defs = {"colour": {"enum": ["red", "green"], "type": "string"}}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": defs}
    grammar = model.grammar("required", tools=function(parameters))
    for text in good:
        assert model.accepts(grammar, ELEMENT.format(text)), text
    for text in bad:
        assert not model.accepts(grammar, ELEMENT.format(text)), text
    assert not model.accepts(grammar, "<tool_call>\n<function=add>\n</function>\n</tool_call>")


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "pattern": "^a"}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]}}},
        {"properties": {"a": {"not": {}}}},
        {"properties": {"a": {"minLength": "0}"}}},
        {"properties": {"a": {"type": "string", "maxLength": [1]}}},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a<": {}}},
        {"properties": {"a": {}}, "oneOf": []},
    ],
)
def test_what_values_without_quotes_cannot_be_held_to(byte_tokenizer: ByteTokenizer, parameters: Any) -> None:
    with pytest.raises(InvalidRequest, match="cannot be held to") as caught:
        Model(byte_tokenizer, "qwen3_coder").grammar("required", tools=function(parameters))
    assert caught.value.field == "tools"
