"""Tool calls in text: each format, wherever the text is cut, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_llm.prompt.events import Event, Message, TextPiece, ToolCall, ToolCallArguments, ToolCallStart, collect
from trio_llm.prompt.tool_parsers import HermesParser, Llama3Parser, MistralParser, PythonicParser, ToolParser
from trio_llm.prompt.untyped_values import written
from trio_llm.prompt.xml_calls import Qwen3CoderParser

CheckEveryCut = Callable[[Callable[[], ToolParser], str], list[Event]]
TOOLS = ["add", "add_two", "now", "get-weather"]
FORMATS = [HermesParser, Qwen3CoderParser, Llama3Parser, MistralParser, PythonicParser]

Read = Callable[..., Message]


@pytest.fixture
def read(check_every_cut: CheckEveryCut) -> Read:
    def read(parser: type[ToolParser], text: str, **options: Any) -> Message:
        return collect(check_every_cut(lambda: parser(TOOLS, **options), text))

    return read


def calls(*named: tuple[str, str]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(name, arguments) for name, arguments in named)


@pytest.mark.parametrize(
    ("parser", "text", "content", "expected"),
    [
        (HermesParser, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "", [("add", '{"a": 1}')]),
        (HermesParser, '\n<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>\n', "", [("now", "{}")]),
        (HermesParser, '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        (HermesParser, '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
        (
            HermesParser,
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [("add", '{"a": 1}')],
        ),
        (
            HermesParser,
            (
                'Let me.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\n\nThen: '
                '<tool_call>{"name": "add", "arguments": {"a": [{"b": null}, true, 1.50]}}</tool_call> done'
            ),
            "Let me.\n\n\nThen:  done",
            [("now", "{}"), ("add", '{"a": [{"b": null}, true, 1.50]}')],
        ),
        (
            HermesParser,
            '<tool_call>{"name": "add", "arguments": {"a": "</tool_call> {\\"}<tool_call>"}}</tool_call>',
            "",
            [("add", '{"a": "</tool_call> {\\"}<tool_call>"}')],
        ),
        # no end marker, two in one, and text in its place
        (HermesParser, '<tool_call>{"name": "now", "arguments": {}}', "", [("now", "{}")]),
        (HermesParser, '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call>', "", [("now", "{}"), ("now", "{}")]),
        (HermesParser, '<tool_call>{"name": "now"} so</tool_call>', " so</tool_call>", [("now", "{}")]),
        (
            Qwen3CoderParser,
            "Let me.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n",
            "Let me.\n",
            [("add", '{"a": 1}')],
        ),
        (
            Qwen3CoderParser,
            (
                '<tool_call><function=add><parameter=a>{"x": [1]}</parameter><parameter=b>\n\nso\n</parameter>\n</function>'
                "</tool_call><tool_call>\n<function=now>\n</function>"
            ),
            "",
            [("add", '{"a": {"x": [1]}, "b": "\\nso"}'), ("now", "{}")],
        ),
        # what looks like a marker within a line is the value's
        (
            Qwen3CoderParser,
            (
                "<tool_call>\n<function=add_two>\n<parameter=a>\nif a</parameter>:\n</tool_call>\n</function>\n</parameter>\n"
                "</function> </tool_call> so"
            ),
            " so",
            [("add_two", '{"a": "if a</parameter>:\\n</tool_call>\\n</function>"}')],
        ),
        (Llama3Parser, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        (Llama3Parser, ' {"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
        (
            Llama3Parser,
            '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": "}"}};',
            "",
            [("now", "{}"), ("add", '{"a": "}"}')],
        ),
        (
            Llama3Parser,
            'Sure.<|python_tag|>{"name": "now", "parameters": {}} Done; ok.',
            "Sure. Done; ok.",
            [("now", "{}")],
        ),
        (MistralParser, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "", [("add", '{"a": 1}')]),
        (
            MistralParser,
            (
                'I see.[TOOL_CALLS] [ {"name": "now", "arguments": {}, "id": "abc123456"} , {"name": "add", '
                '"arguments": {"a": "]"}} ] '
            ),
            "I see.",
            [("now", "{}"), ("add", '{"a": "]"}')],
        ),
        (MistralParser, "[TOOL_CALLS]now[ARGS]{}", "", [("now", "{}")]),
        (
            MistralParser,
            '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add_two[CALL_ID]abc123456[ARGS]{"b": 2}!',
            "!",
            [("add", '{"a": 1}'), ("add_two", '{"b": 2}')],
        ),
        (PythonicParser, "[now()]", "", [("now", "{}")]),
        (
            PythonicParser,
            ' [add(a=1, b=-2.5e3,), get-weather(c="x\\ny", d=[True, None, false], e={"k": \'v\'})]',
            "",
            [
                ("add", '{"a": 1, "b": -2500.0}'),
                ("get-weather", '{"c": "x\\ny", "d": [true, null, false], "e": {"k": "v"}}'),
            ],
        ),
        (PythonicParser, '<|python_start|>[add(a=")]\\"")]<|python_end|>', "", [("add", '{"a": ")]\\""}')]),
        (PythonicParser, "Well: <|tool_call_start|>[now()]<|tool_call_end|> so", "Well:  so", [("now", "{}")]),
    ],
)
def test_calls(read: Read, parser: type[ToolParser], text: str, content: str, expected: list[tuple[str, str]]) -> None:
    assert read(parser, text) == Message(content, "", calls(*expected))


NO_CALLS: dict[type[ToolParser], list[str]] = {
    HermesParser: [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {a: 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}',
        '<tool_call>{"name": "add", "arguments": "{"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\n"}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 2000 + "1" + "}" * 2000 + "}</tool_call>",
        '<tool_call>{"arguments": {"name": "add"}}</tool_call>',
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>add(1)</tool_call>",
        "a <tool_cal",
        "  ",
        "",
        "</tool_call><tool_call",
    ],
    Qwen3CoderParser: [
        "<tool_call>\n<function=unknown>\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1</parameter>",
        "<tool_call><function=add><parameter=>1</parameter></function>",
        "<tool_call><function=add><parameter=a\n>1</parameter></function>",
        "<tool_call><function=add><parameter=a",
        "<tool_call><function=add>1</function>",
        "<tool_call><function=add>",
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        "<function=add></function>",
        "<tool_call>",
    ],
    Llama3Parser: [
        '{"city": "Bern"}',
        '{"name": "Bern"}',
        '{"name": "add", "parameters": {"a": ',
        "{",
        'So {"name": "now", "parameters": {}}',
        "<|python_tag|>print(1)",
        '<|python_tag|>{"name": "unknown", "parameters": {}}',
        ' {"name" "add"}',
        "; {}",
    ],
    MistralParser: [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][",
        "[TOOL_CALLS][]",
        '[TOOL_CALLS][{"name": "unknown"}]',
        '[TOOL_CALLS]{"name": "now"}',
        "[TOOL_CALLS]unknown[ARGS]{}",
        "[TOOL_CALLS]add[ARGS]{1}",
        "[TOOL_CALLS]add[ARGS]3",
        "[TOOL_CALLS]add[CALL_ID]abc",
        "[TOOL_CALLS]add[CALL_ID]abc[ARGS]",
        '[TOOL_CALLS]add[ARGS]{"a": "',
        "[TOOL_CALL",
    ],
    PythonicParser: [
        "[1] a source",
        "[link](http://a)",
        "[unknown()]",
        "[now(), unknown()]",
        "[now(), 3]",
        "[now(3)]",
        "[add(a=b)]",
        "[add(a=f())]",
        "[add(a=1, a=2)]",
        "[add(a=1e999)]",
        "[add(a='\\ud83d')]",
        "[add(a='\\U00110000')]",
        "[add(a={1: 2})]",
        "[add(a=" + "[" * 70 + "]" * 70 + ")]",
        "[add(a=1)",
        "[add(a=1]",
        "[add(a='\n')]",
        "[",
        "[]",
        "So [now()]",
        "<|python_start|>",
        "<|python_start|>now()<|python_end|>",
    ],
}


@pytest.mark.parametrize(("parser", "text"), [(parser, text) for parser, texts in NO_CALLS.items() for text in texts])
def test_what_is_no_call_stays_text(parser: type[ToolParser], text: str) -> None:
    for size in (1, 2, 7, max(1, len(text))):
        made = parser(TOOLS)
        events = [event for at in range(0, len(text), size) for event in made.push(text[at : at + size])]
        assert collect([*events, *made.finish()]) == Message(text)
        assert made.num_calls == 0


def test_a_call_after_one_that_is_none(read: Read) -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": 1,}}'
    whole = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read(HermesParser, broken + whole) == Message(broken, "", calls(("now", "{}")))
    assert read(HermesParser, "<tool_call>" + whole) == Message("<tool_call>", "", calls(("now", "{}")))
    assert read(MistralParser, "[TOOL_CALLS]unknown[TOOL_CALLS]now[ARGS]{}") == Message(
        "[TOOL_CALLS]unknown", "", calls(("now", "{}"))
    )


def test_without_tools_all_is_text(read: Read) -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parser = HermesParser([])
    assert collect([*parser.push(text), *parser.finish()]) == Message(text)


@pytest.mark.parametrize(
    ("parser", "text", "held"),
    [
        (HermesParser, "a <", "<"),
        (HermesParser, "a <b", ""),
        (HermesParser, "a <tool_call", "<tool_call"),
        (HermesParser, "a <tool_call>x", ""),
        (HermesParser, 'a <tool_call>{"x', ""),
        (HermesParser, 'a <tool_call>{"name": "z', ""),
        (HermesParser, 'a <tool_call>{"name": "add', '<tool_call>{"name": "add'),
        (Qwen3CoderParser, "a <tool_call>\n<function=ad", "<tool_call>\n<function=ad"),
        (Qwen3CoderParser, "a <tool_call>\n<function=x", ""),
        (Qwen3CoderParser, "a <tool_call>\n<function=add>\nx", ""),
        (Llama3Parser, '{"c', ""),
        (Llama3Parser, '{"name": "B', ""),
        (Llama3Parser, "a {", ""),
        (MistralParser, "a [T", "[T"),
        (MistralParser, "a [1", ""),
        (PythonicParser, "[1", ""),
        (PythonicParser, "[no", "[no"),
        (PythonicParser, "[nob", ""),
        (PythonicParser, "a [now()", ""),
    ],
)
def test_text_is_held_back_only_while_it_may_be_a_call(parser: type[ToolParser], text: str, held: str) -> None:
    made = parser(TOOLS)
    given = collect([event for character in text for event in made.push(character)]).content
    assert given == text[: len(text) - len(held)]


# --- arguments as they come ---


@pytest.mark.parametrize(
    ("parser", "before", "after"),
    [
        (HermesParser, '<tool_call>\n{"name": "add", "arguments": ', "}\n</tool_call>"),
        (Llama3Parser, '{"name": "add", "parameters": ', "}"),
        (MistralParser, '[TOOL_CALLS][{"name": "add", "arguments": ', "}]"),
        (MistralParser, "[TOOL_CALLS]add[ARGS]", ""),
    ],
)
def test_arguments_can_be_streamed(
    check_every_cut: CheckEveryCut, parser: type[ToolParser], before: str, after: str
) -> None:
    arguments = '{"a": "}\\"</tool_call>", "b": [1, {}]}'
    text = before + arguments + after

    def make() -> ToolParser:
        return parser(TOOLS, stream_arguments=True)

    assert collect(check_every_cut(make, text)) == Message("", "", calls(("add", arguments)))
    made = make()
    made.push(before)
    for character in arguments[1:]:
        made.push("{") if made.num_calls == 0 else None
        assert made.push(character) == [ToolCallArguments(0, character)]
    # cut short, what was given stays
    cut = text[: len(before) + 9]
    assert collect(check_every_cut(make, cut)) == Message("", "", calls(("add", arguments[:9])))
    # no grammar would make this
    check_every_cut(make, before + '{"a": "\n' + arguments + after)
    check_every_cut(make, before + '{"a" 1}' + after)


def test_calls_are_reported_when_they_are_whole() -> None:
    parser = HermesParser(TOOLS)
    assert parser.push('<tool_call>{"name": "add", "arguments": {"a": 1}') == []
    assert parser.push("}") == [ToolCallStart(0, "add"), ToolCallArguments(0, '{"a": 1}')]
    assert parser.push("</tool_call>") == []
    assert parser.push("\n") == []
    assert parser.push("ok") == [TextPiece("\nok")]
    assert parser.finish() == []
    assert parser.finish() == []
    with pytest.raises(RuntimeError):
        parser.push("x")


# --- any arguments, any cut ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MARKERS = st.sampled_from(
    ["</tool_call>", '<tool_call>{"name": "now"}', "[TOOL_CALLS]", "]", "})", ";", "\\", "'", '"']
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), JSON | MARKERS, max_size=4)


def as_python(value: Any) -> str:
    """A literal of Python."""
    if isinstance(value, list):
        return "[" + ", ".join(map(as_python, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_python(key)}: {as_python(each)}" for key, each in value.items()) + "}"
    return repr(value)


def in_elements(name: str, arguments: dict[str, Any]) -> str:
    """A call of Qwen 3 Coder's."""
    lines = [f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def typed(made: list[tuple[str, dict[str, Any]]]) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]:
    """The same calls with parameters that are of one type each, as their names say; and the schemas."""
    names: dict[type, str] = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    types = {names.get(type(value), "null") for _, arguments in made for value in arguments.values()}
    keys = {f"{key}-{kind}": {"type": kind} for _, arguments in made for key in arguments for kind in types}
    told = [
        (name, {f"{key}-{names.get(type(value), 'null')}": value for key, value in arguments.items()})
        for name, arguments in made
    ]
    return told, {key: {"type": "object", "properties": keys} for key in TOOLS}


def write(parser: type[ToolParser], made: list[tuple[str, dict[str, Any]]], *, ascii_only: bool) -> str:
    """Calls as a model writes them."""

    def text(name: str, key: str, arguments: dict[str, Any]) -> str:
        return json.dumps({"name": name, key: arguments}, ensure_ascii=ascii_only)

    if parser is HermesParser:
        return "\n".join(f"<tool_call>\n{text(name, 'arguments', each)}\n</tool_call>" for name, each in made)
    if parser is Qwen3CoderParser:
        return "\n".join(in_elements(name, each) for name, each in made)
    if parser is Llama3Parser:
        return "; ".join(text(name, "parameters", each) for name, each in made)
    if parser is MistralParser:
        if ascii_only:
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(each)}" for name, each in made)
        return "[TOOL_CALLS][" + ", ".join(text(name, "arguments", each) for name, each in made) + "]"
    listed = (f"{name}({', '.join(f'{key}={as_python(each[key])}' for key in each)})" for name, each in made)
    return f"[{', '.join(listed)}]"


@pytest.mark.parametrize("parser", FORMATS)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_any_arguments_and_any_cut(parser: type[ToolParser], data: st.DataObject) -> None:
    made = data.draw(st.lists(st.tuples(st.sampled_from(TOOLS), ARGUMENTS), min_size=1, max_size=3))
    schemas = None
    if parser is Qwen3CoderParser:  # of which nothing but the schema shows what is a text
        made, schemas = typed(made)
    text = write(parser, made, ascii_only=data.draw(st.booleans()))
    streamed = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reader = parser(TOOLS, stream_arguments=streamed, schemas=schemas)
    message = collect([*(event for piece in pieces for event in reader.push(piece)), *reader.finish()])
    assert message.content == ""
    assert [call.name for call in message.tool_calls] == [name for name, _ in made]
    assert [json.loads(call.arguments) for call in message.tool_calls] == [each for _, each in made]
    whole = parser(TOOLS, stream_arguments=streamed, schemas=schemas)
    assert collect([*whole.push(text), *whole.finish()]) == message


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_start|>"),
        *('{"name": "add", "arguments": ', '{"name": "now"}', '{"a": 1}', "now", "add(a=1)", "add(", ")", "[", "]"),
        *("<function=add>", "<function=now>", "<parameter=a>", "</parameter>", "\n</parameter>", "</function>"),
        *("{", "}", '"', "'", "\\", ",", ";", ":", " ", "\n", "text", "<", '"name"'),
    ]
)


@pytest.mark.parametrize("parser", FORMATS)
@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_any_text_and_any_cut(parser: type[ToolParser], data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(FRAGMENTS, max_size=12)))
    streamed = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reader, whole = parser(TOOLS, stream_arguments=streamed), parser(TOOLS, stream_arguments=streamed)
    message = collect([*(event for piece in pieces for event in reader.push(piece)), *reader.finish()])
    assert message == collect([*whole.push(text), *whole.finish()])
    if not message.tool_calls:
        assert message.content == text
    if not streamed:
        for call in message.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"type": "string"}, " a ", " a "),
        ({"type": "integer"}, "1", 1),
        ({"type": "integer"}, "one", "one"),
        ({"type": "integer"}, "1.0", 1.0),
        ({"type": "number"}, "1", 1),
        ({"type": "number"}, " 1.5 ", 1.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": ["string", "integer"]}, "15", 15),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["a", 1]}, "1", 1),
        ({"const": "true"}, "true", "true"),
        ({"$ref": "#/$defs/text"}, "5", "5"),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "#/$defs/missing"}, "5", 5),
        ({"$ref": "elsewhere"}, "5", 5),
        ({"type": "object"}, '{"a": [1, "\\n"]}', {"a": [1, "\n"]}),
        ({"type": "array"}, "[1,", "[1,"),
        ({}, "[1]", [1]),
        ({}, "so", "so"),
        (True, "1", 1),
        (None, "[" * 5000, "[" * 5000),
    ],
)
def test_the_schema_tells_text_from_numbers(schema: Any, text: str, value: Any) -> None:
    defs = {"text": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}
    parser = Qwen3CoderParser(TOOLS, schemas={"add": {"properties": {"a": schema}, "$defs": defs}})
    call = f"<tool_call>\n<function=add>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    message = collect([*parser.push(call), *parser.finish()])
    assert json.loads(message.tool_calls[0].arguments) == {"a": value}
    assert type(json.loads(message.tool_calls[0].arguments)["a"]) is type(value)


@pytest.mark.parametrize("schema", [None, "x", [], {"properties": []}, {"properties": {"a": 3}}])
def test_schemas_that_are_none_say_nothing(schema: Any) -> None:
    parser = Qwen3CoderParser(TOOLS, schemas={"add": schema})
    events = parser.push("<tool_call><function=add><parameter=a>1</parameter></function>")
    assert collect(events).tool_calls == calls(("add", '{"a": 1}'))
