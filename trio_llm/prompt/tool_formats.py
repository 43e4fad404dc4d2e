"""Which syntax a model writes tool calls in."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from trio_llm.errors import ConfigurationError
from trio_llm.prompt.chat_template import template_of
from trio_llm.prompt.tool_parsers import HermesParser, Llama3Parser, MistralParser, PythonicParser, ToolParser
from trio_llm.prompt.vocabulary import marker_tokens, special_token_ids
from trio_llm.prompt.xml_calls import Qwen3CoderParser

_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}

TOOL_FORMATS = tuple(_PARSERS)
"""The names that there are."""

_MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "llama3": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    "pythonic": ["<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>"],
}

# In a call of `probe` as the template writes it or, where it writes none, in what it tells the model.
# The line ends of a template's source may be escapes in a string.
_TRACES = [
    ("mistral", r"\[TOOL_CALLS\]"),
    ("qwen3_coder", r"<function=(?:probe|example_function_name)>"),
    ("hermes", r"<tool_call>(?:\\n|\s)*\{"),
    ("pythonic", r"\[(?:probe|func_name1)\(|<\|python_start\|>|<\|tool_call_start\|>\["),
    ("llama3", r'"name":\s*"probe",\s*"parameters"|<\|python_tag\|>'),
]


@attrs.frozen
class ToolFormat:
    """A syntax of tool calls, in the vocabulary of one model."""

    name: str
    tokens: Mapping[str, int] = attrs.field(factory=dict)
    """Those of its markers that are one token each."""
    special_token_ids: frozenset[int] = frozenset()
    """Those of these that are special tokens, which decoding would leave out: they must stay in the text."""
    has_named_arguments: bool = False
    """Whether a Mistral vocabulary is of the kind that writes `name[ARGS]{...}`."""

    def parser(
        self, tools: Collection[str], *, stream_arguments: bool = False, schemas: Mapping[str, Any] | None = None
    ) -> ToolParser:
        """A parser for one choice.

        Args:
            tools: names of the functions that may be called; what calls another stays text.
            stream_arguments: give arguments as they come, and not when they are whole; for output
                of a grammar, which is valid as far as it goes.
            schemas: of their parameters, by name: in some syntaxes only these tell text from numbers.
        """
        return _PARSERS[self.name](tools, stream_arguments=stream_arguments, schemas=schemas)

    def new_call_id(self) -> str:
        """An id for a call that the format's own chat templates take when it comes back."""
        if self.name == "mistral":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def tool_format(tokenizer: Any, name: str = "auto") -> ToolFormat | None:
    """The syntax that a model writes tool calls in.

    Args:
        tokenizer: the model's; its chat template is tried out, so this takes some milliseconds
            when it is first asked.
        name: one of TOOL_FORMATS, "auto", which goes by the chat template, or "none".

    Returns:
        None if it is "none", or not known.

    Raises:
        ConfigurationError: there is no such format.
    """
    if name == "auto":
        name = detect(tokenizer) or "none"
    if name == "none":
        return None
    if name not in TOOL_FORMATS:
        known = ", ".join(["auto", "none", *TOOL_FORMATS])
        raise ConfigurationError(f"no tool call format {name!r}; there are {known}", field="tool_call_parser")
    tokens = marker_tokens(tokenizer, _MARKERS[name])
    special = special_token_ids(tokenizer).intersection(tokens.values())
    return ToolFormat(name, tokens, special, has_named_arguments="[ARGS]" in tokens)


def detect(tokenizer: Any) -> str | None:
    """The name of the format that a chat template speaks, by how it writes a call."""
    if not tokenizer.chat_template:
        return None
    template = template_of(tokenizer)
    if not template.mentions("tools"):
        return None
    text = template.written_call or template.source
    return next((name for name, trace in _TRACES if re.search(trace, text)), None)
