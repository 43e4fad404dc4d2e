"""Which format a model speaks: by how its template writes a call."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.prompt.whole import read_whole
from trio_llm.errors import ConfigurationError
from trio_llm.prompt.events import Message, ToolCall
from trio_llm.prompt.output_parser import OutputParser
from trio_llm.prompt.tool_formats import TOOL_FORMATS, detect, tool_format

ByteTokenizer = Callable[..., Any]

_HEAD = "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
_TAIL = "{% endfor %}"
_EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
TEMPLATES = {
    "hermes": _EACH
    + '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}',
    "qwen3_coder": _EACH + "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "llama3": _EACH + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}',
    "mistral": "{% if m.tool_calls %}[TOOL_CALLS][" + _EACH + "{% if c.id | length != 9 %}{{ raise_exception('id') }}"
    '{% endif %}{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{% endfor %}]{% endif %}',
    "pythonic": "{% if m.tool_calls %}[" + _EACH + "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
    "{{ v | tojson }}{% endfor %}){% endfor %}]{% endif %}",
}
_TOLD = (
    '{% if tools %}Answer with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>{% endif %}'
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_template_shows_its_format(byte_tokenizer: ByteTokenizer, name: str) -> None:
    tokenizer = byte_tokenizer(template=_HEAD + TEMPLATES[name] + _TAIL)
    assert detect(tokenizer) == name
    found = tool_format(tokenizer)
    assert found is not None
    assert found.name == name
    # and what the template writes is read back
    call = {"id": "abcdefghi", "function": {"name": "add", "arguments": {"a": "}"}}}
    text = tokenizer.apply_chat_template([{"role": "assistant", "content": "", "tool_calls": [call]}], tokenize=False)
    written = text.removeprefix("<assistant>")
    message = read_whole(OutputParser(tools=found.parser(["add"])), written)
    assert message == Message("", "", (ToolCall("add", '{"a": "}"}'),))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, None),
        (_HEAD + _TAIL, None),
        (_TOLD, "hermes"),
        ("{{ tools }}{{ messages[0].content }}[TOOL_CALLS]", "mistral"),
        ("{{ messages[0].content }}[TOOL_CALLS]", None),  # takes no tools
    ],
)
def test_a_template_that_shows_no_call(
    byte_tokenizer: ByteTokenizer, template: str | None, expected: str | None
) -> None:
    assert detect(byte_tokenizer(template=template)) == expected


def test_a_name_overrides(byte_tokenizer: ByteTokenizer) -> None:
    tokenizer = byte_tokenizer(template=_HEAD + TEMPLATES["hermes"] + _TAIL)
    found = tool_format(tokenizer, "pythonic")
    assert found is not None
    assert found.name == "pythonic"
    assert tool_format(tokenizer, "none") is None
    with pytest.raises(
        ConfigurationError, match="there are auto, none, hermes, qwen3_coder, llama3, mistral, pythonic"
    ) as caught:
        tool_format(tokenizer, "other")
    assert caught.value.field == "tool_call_parser"


def test_markers_that_are_special_tokens_are_named(byte_tokenizer: ByteTokenizer) -> None:
    tokenizer = byte_tokenizer(special=["[TOOL_CALLS]", "[ARGS]", "[INST]"], added=["<tool_call>", "</tool_call>"])
    mistral, hermes = tool_format(tokenizer, "mistral"), tool_format(tokenizer, "hermes")
    assert mistral is not None and hermes is not None
    assert sorted(tokenizer.convert_ids_to_tokens(list(mistral.special_token_ids))) == ["[ARGS]", "[TOOL_CALLS]"]
    assert sorted(hermes.tokens) == ["</tool_call>", "<tool_call>"]
    assert mistral.has_named_arguments
    assert (hermes.special_token_ids, hermes.has_named_arguments) == (frozenset(), False)


def test_ids_of_calls(byte_tokenizer: ByteTokenizer) -> None:
    for name in TOOL_FORMATS:
        found = tool_format(byte_tokenizer(), name)
        assert found is not None
        ids = {found.new_call_id() for _ in range(50)}
        assert len(ids) == 50
        form = "[a-zA-Z0-9]{9}" if name == "mistral" else "call_[0-9a-f]{24}"
        assert all(re.fullmatch(form, each) for each in ids)
