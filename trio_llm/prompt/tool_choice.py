"""Which tools a model may call, must call, and in what form: `tool_choice` as a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from trio_llm.core.sampling_params import StructuredOutput
from trio_llm.errors import InvalidRequest
from trio_llm.prompt.tool_formats import ToolFormat
from trio_llm.prompt.untyped_values import kinds_of, resolved, written

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NOTES = frozenset(["type", "properties", "required", "title", "description", "$schema", "strict"])
"""Keywords of a schema that say nothing of properties which it does not name."""
_OF_KEYWORDS = _NOTES | {"$defs", "definitions", "additionalProperties"}
"""Keywords that a call with keyword arguments can be held to."""
_OF_TEXT = frozenset(["type", "title", "description", "default", "examples", "minLength", "maxLength"])
"""Keywords that a value without quotes can be held to, where it may be a text."""


@attrs.frozen
class ToolChoice:
    """What a request lets its model call."""

    names: tuple[str, ...] = ()
    """Functions that may be called, in the order of the tools."""
    is_required: bool = False
    """Whether the answer must be a call."""
    is_named: bool = False
    """Whether it must be the one call of a function that the request names."""


def read_tool_choice(tool_choice: Any, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """What `tool_choice` says about `tools`, both as OpenAI has them.

    Args:
        tool_choice: None (auto where there are tools), "none", "auto", "required", or an object
            that names a function or the allowed ones.

    Raises:
        InvalidRequest: a tool is no function, two have one name, or the choice is of none of
            these forms or names a function that is not among the tools.
    """
    names = tuple(_name(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidRequest(f"two tools are called {name!r}", field="tools")
        seen.add(name)
    if tool_choice is None:
        tool_choice = "auto" if tools else "none"
    if tool_choice == "none":
        return ToolChoice()
    if not tools:
        raise InvalidRequest("tool_choice needs tools to choose from", field="tool_choice")
    if tool_choice in ("auto", "required"):
        return ToolChoice(names, is_required=tool_choice == "required")
    kind = tool_choice.get("type") if isinstance(tool_choice, Mapping) else None
    if kind == "function":
        name = _known(tool_choice, names)
        return ToolChoice((name,), is_required=True, is_named=True)
    allowed = tool_choice.get("allowed_tools") if kind == "allowed_tools" else None
    if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required"):
        message = 'tool_choice is "none", "auto", "required", a function, or allowed_tools with a mode and tools'
        raise InvalidRequest(message, field="tool_choice")
    listed = allowed.get("tools")
    if not isinstance(listed, list | tuple) or not listed:
        raise InvalidRequest("allowed_tools must list at least one tool", field="tool_choice")
    chosen = {_known(tool, names) for tool in listed}
    return ToolChoice(tuple(name for name in names if name in chosen), is_required=allowed["mode"] == "required")


def tool_grammar(
    tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, *, parallel: bool = True
) -> StructuredOutput | None:
    """The grammar of the calls that an answer must consist of, in the model's own syntax.

    Where calls are allowed and not required, and a function is `strict`, the grammar is that of
    any text in which what follows the marker of a call is one.  A syntax that needs no marker
    (llama3, pythonic) cannot be told from text, so nothing is enforced there.

    Args:
        tools: as OpenAI has them; the arguments of a call satisfy the schema of its function.
        parallel: whether there may be several calls; with a named function there is one.

    Returns:
        None where nothing is enforced.

    Raises:
        InvalidRequest: the parameters of a function are no schema of an object, or (pythonic)
            say more than keyword arguments can be held to; `field` is "tools".
    """
    chosen = frozenset(choice.names)
    functions = [tool["function"] for tool in tools if tool["function"]["name"] in chosen]
    is_strict = {function["name"]: function.get("strict") is True for function in functions}
    writer_type = _WRITERS[tool_format.name]
    if not choice.is_required and not (writer_type.opening and any(is_strict.values())):
        return None
    schemas = {
        function["name"]: _schema(function) if choice.is_required or is_strict[function["name"]] else {"type": "object"}
        for function in functions
    }
    writer = writer_type(tool_format, schemas)
    if choice.is_required:
        writer.rule("start", writer.calls(several=parallel and not choice.is_named))
    else:
        writer.rule("start", writer.text_with_calls(several=parallel))
    return StructuredOutput("lark", "\n".join(writer.rules) + "\n")


def _name(tool: Any, where: str, field: str = "tools") -> str:
    function = (
        tool.get("function") if isinstance(tool, Mapping) and tool.get("type", "function") == "function" else None
    )
    if not isinstance(function, Mapping):
        raise InvalidRequest(f'{where} must be of the type "function" and have a function', field=field)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        path = f"{where}.function.name"
        raise InvalidRequest(f"{path} must be of 1 to 64 letters, digits, underscores and dashes", field=path)
    return name


def _known(tool: Any, names: Sequence[str]) -> str:
    name = _name(tool, "tool_choice", "tool_choice")
    if name not in names:
        raise InvalidRequest(f"tool_choice names {name!r}, which is none of the tools", field="tool_choice")
    return name


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments; a function that names none takes none."""
    schema = function.get("parameters")
    if schema is None:
        schema = {}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        message = f"the parameters of {function['name']!r} must be a JSON schema of the type object"
        raise InvalidRequest(message, field="tools")
    schema = {**schema, "type": "object"}
    if not schema.get("properties") and schema.keys() <= _NOTES:
        schema["additionalProperties"] = False
    return schema


def _text(text: str) -> str:
    """A text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


class _Writer:
    """Writes the rules of a format; `calls` is their sum."""

    opening = ""
    """The marker that calls begin with, if they must."""
    opens_each = False
    """Whether each call has that marker, so that several calls are several texts with one."""

    def __init__(self, tool_format: ToolFormat, schemas: Mapping[str, dict[str, Any]]) -> None:
        self.schemas = schemas
        self.rules: list[str] = []
        self._tokens = tool_format.tokens
        self._begin = self.marker(self.opening)
        self._has_named_arguments = tool_format.has_named_arguments

    def rule(self, name: str, body: str) -> str:
        """Add a rule; gives its name."""
        self.rules.append(f"{name}: {body}")
        return name

    def calls(self, *, several: bool) -> str:
        raise NotImplementedError

    def text_with_calls(self, *, several: bool) -> str:
        """Any text, with calls in it."""
        is_token = self.opening in self._tokens
        # a text that is lazy ends with the first marker; and no text spells a token
        self._begin = self.rule("reach" if is_token else "reach[lazy]", f"/(.|\\n)*/ {self._begin}").partition("[")[0]
        calls = self.calls(several=several and not self.opens_each)
        return f"({calls}){'*' if several else '?'} /(.|\\n)*/"

    def marker(self, text: str) -> str:
        """A marker: the token where it is one, since to llguidance no text spells that."""
        return f"<[{self._tokens[text]}]>" if text in self._tokens else _text(text)

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule(f"json_{len(self.rules)}", f"%json {json.dumps(schema, ensure_ascii=False)}")

    def one_of(self, bodies: Sequence[str]) -> str:
        return self.rule("call", " | ".join(bodies))

    def properties(self, name: str, is_key: Callable[[str], object]) -> tuple[dict[str, Any], Collection[str]]:
        """The parameters of a function, one by one, and which of them are required.

        Args:
            is_key: whether the syntax takes a text for the name of one.

        Raises:
            InvalidRequest: the schema says more than that.
        """
        schema = self.schemas[name]
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        strange = sorted(schema.keys() - _OF_KEYWORDS)
        if strange:
            raise _not_held(f"the keyword {strange[0]!r}", name)
        if not isinstance(properties, dict) or not all(map(is_key, properties)):
            raise _not_held("properties of strange names", name)
        if not isinstance(required, list | tuple) or not all(key in list(properties) for key in required):
            raise _not_held("required properties that are not named", name)
        return properties, required

    def objects(self, key: str) -> str:
        """A call as an object with a name and arguments."""
        heads = {name: f'{{"name": {_text(name)}, "{key}": ' for name in self.schemas}
        return self.one_of([f'{_text(heads[name])} {self.json(self.schemas[name])} "}}"' for name in heads])


def _not_held(what: str, name: str) -> InvalidRequest:
    message = f"this model writes keyword arguments, which cannot be held to {what} in the parameters of {name!r}"
    return InvalidRequest(message, field="tools")


def _repeated(call: str, between: str, several: bool) -> str:
    return f"{call} ({between} {call})*" if several else call


class _Hermes(_Writer):
    opening = "<tool_call>"
    opens_each = True

    def calls(self, *, several: bool) -> str:
        body = f'"\\n" {self.objects("arguments")} "\\n"'
        call = self.rule("tagged", f"{self._begin} {body} {self.marker('</tool_call>')}")
        return _repeated(call, r'"\n"', several)


class _Qwen3Coder(_Writer):
    opening = "<tool_call>"
    opens_each = True

    def calls(self, *, several: bool) -> str:
        bodies = [
            f'{_text(f"<function={name}>")} "\\n" {self._parameters(name)} "</function>"' for name in self.schemas
        ]
        call = self.rule("tagged", f'{self._begin} "\\n" {self.one_of(bodies)} "\\n" {self.marker("</tool_call>")}')
        return _repeated(call, r'"\n"', several)

    def _parameters(self, name: str) -> str:
        properties, required = self.properties(name, re.compile(r"[^<>\n]+").fullmatch)
        if not properties and self.schemas[name].get("additionalProperties") is not False:
            return f"(/<parameter=[^<>\\n]+>\\n/ {self._any_text()})*"
        parts = []
        for key, schema in properties.items():
            part = f'({_text(f"<parameter={key}>")} "\\n" {self._value(name, key, schema)})'
            parts.append(part if key in required else f"{part}?")
        return " ".join(parts)

    def _value(self, name: str, key: str, schema: Any) -> str:
        """A value, and what ends it."""
        whole = self.schemas[name]
        schema = resolved(schema, whole)
        parts = [schema]
        if isinstance(schema.get("anyOf"), list) and schema.keys() <= _OF_TEXT | {"anyOf"}:
            parts = [resolved(part, whole) for part in schema["anyOf"]]
        texts = [part for part in parts if "string" in kinds_of(part, whole) and not part.keys() & {"enum", "const"}]
        if texts:
            # whatever is written is read as what it looks like, which must then be allowed
            strange = sorted(set().union(*parts) - _OF_TEXT)
            if strange:
                raise _not_held(f"the keyword {strange[0]!r} of {key!r}", name)
            least, most = texts[0].get("minLength", 0), texts[0].get("maxLength")
            if type(least) is not int or (most is not None and type(most) is not int):
                raise _not_held(f"a length of {key!r} that is no integer", name)
            return self._any_text(least, most)
        shared: dict[str, Any] = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
        bodies: list[str] = []
        for part in parts:
            if "string" in kinds_of(part, whole):
                values = part.get("enum", [part.get("const")])
                if not isinstance(values, list):
                    raise _not_held(f"an enum of {key!r} that is no list", name)
                bodies += [_text(written(value)) for value in values]
            else:
                bodies.append(self.json({**shared, **part}))
        return f'({" | ".join(bodies)}) "\\n</parameter>\\n"'

    def _any_text(self, least: int = 0, most: int | None = None) -> str:
        """A text of so many characters, up to the first line that ends a parameter."""
        body = f"/(.|\\n){{{least},{'' if most is None else most}}}\\n<\\/parameter>\\n/"
        return self.rule(f"text_{len(self.rules)}[lazy]", body).partition("[")[0]


class _Llama3(_Writer):
    def calls(self, *, several: bool) -> str:
        return _repeated(self.objects("parameters"), '"; "', several)


class _Mistral(_Writer):
    opening = "[TOOL_CALLS]"

    def calls(self, *, several: bool) -> str:
        if not self._has_named_arguments:
            calls = _repeated(self.objects("arguments"), '", "', several)
            return f'{self._begin} "[" {calls} "]"'
        named = [f"{_text(name)} {self.marker('[ARGS]')} {self.json(self.schemas[name])}" for name in self.schemas]
        call = self.rule("opened", f"{self._begin} {self.one_of(named)}")
        return f"{call}+" if several else call


class _Pythonic(_Writer):
    def calls(self, *, several: bool) -> str:
        bodies = [f'{_text(f"{name}(")} {self._arguments(name)} ")"' for name in self.schemas]
        calls = _repeated(self.one_of(bodies), '", "', several)
        return f'"[" {calls} "]"'

    def _arguments(self, name: str) -> str:
        """Keyword arguments in the order of the properties, those that are not required or not."""
        properties, required = self.properties(name, str.isidentifier)
        schema = self.schemas[name]
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        # from the last to the first: what may follow, once without and once with an argument before it
        first = following = '""'
        for key, value in reversed(properties.items()):
            whole = value if isinstance(value, bool) else {**value, **shared}
            argument = f"{_text(f'{key}=')} {self.rule(f'value_{len(self.rules)}', f'%json {json.dumps(whole)}')}"
            after = self.rule(f"rest_{len(self.rules)}", following)
            skipped = "" if key in required else f" | {first}"
            first = self.rule(f"first_{len(self.rules)}", f"{argument} {after}{skipped}")
            skipped = "" if key in required else f" | {after}"
            following = self.rule(f"next_{len(self.rules)}", f'", " {argument} {after}{skipped}')
        return first


_WRITERS: Mapping[str, type[_Writer]] = {
    "hermes": _Hermes,
    "qwen3_coder": _Qwen3Coder,
    "llama3": _Llama3,
    "mistral": _Mistral,
    "pythonic": _Pythonic,
}
