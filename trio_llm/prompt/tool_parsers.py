"""Finds tool calls in what a model says, as it says it.

A call is reported when it is whole: its arguments are then the JSON text of an object, and
its name one of the tools'.  Everything else that looks like a call (another name, wrong
JSON, a text that ends in its middle) is text, with its markers, so nothing is lost.  White
space alone before, between and after calls is no text.

With `stream_arguments` arguments are given as they come.  That is for output that a grammar
has made: there only the end of the output can cut a call short, and then the pieces given
stay what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from trio_llm.prompt.events import Event, TextPiece, ToolCallArguments, ToolCallStart
from trio_llm.prompt.incremental import BracketedValue, IncrementalParser, Steps
from trio_llm.prompt.python_calls import read_calls

_ARGUMENT_KEYS = ("arguments", "parameters")
_FIRST_KEYS = tuple(f'"{key}"' for key in ("name", "type", "id", "function", *_ARGUMENT_KEYS))
_CALL_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_CALL_ID = re.compile(r"[\w-]*")


class ToolParser(IncrementalParser):
    """The text of one choice in; TextPiece, ToolCallStart and ToolCallArguments out.

    Args:
        tools: names of the functions that may be called.
        stream_arguments: give arguments as they come, and not when they are whole.
        schemas: of their parameters, by name, for syntaxes whose values do not show what they are.
    """

    def __init__(
        self, tools: Collection[str], *, stream_arguments: bool = False, schemas: Mapping[str, Any] | None = None
    ) -> None:
        self.num_calls = 0
        """Calls reported so far."""
        self._tools = frozenset(tools)
        self._stream_arguments = stream_arguments
        self._schemas = schemas or {}
        self._blanks: str | None = ""
        """White space since the beginning or the last call; None once there was text after it."""
        super().__init__()

    def finish(self) -> list[Event]:
        events = super().finish()
        if self._blanks and not self.num_calls:
            events.append(TextPiece(self._blanks))
            self._blanks = None
        return events

    def _say(self, text: str) -> None:
        if self._blanks is not None:
            text = self._blanks + text
            self._blanks = text if text.isspace() else None
            if self._blanks:
                return
        super()._say(text)

    # --- for formats ---

    def _start(self, name: str) -> None:
        self._events.append(ToolCallStart(self.num_calls, name))
        self.num_calls += 1
        self._blanks = ""

    def _give(self, arguments: str) -> None:
        if arguments:
            self._events.append(ToolCallArguments(self.num_calls - 1, arguments))

    def _objects(self, at: int, between: re.Pattern[str], marker: str = "") -> Steps[bool]:
        """Read calls that are objects with a name and arguments, the first of them at `at`.

        They are consumed.  What is no call becomes text: if none can begin at `at` the marker
        alone, otherwise all that had to be read to find it out.

        Args:
            between: what may stand between two.
            marker: what the buffer begins with.

        Returns:
            Whether there was a call.
        """
        found = False
        while (yield from self._may_be_call(at)):
            end, is_call = yield from self._object(at)
            if not is_call:
                self._take_text(end)
                return found
            self._drop(end)
            found = True
            at = yield from self._after(0, between)
        if not found:
            self._take_text(len(marker))
        elif at == len(self._buffer):
            self._drop(at)  # the text has ended; what would stand between says nothing
        return found

    def _may_be_call(self, at: int) -> Steps[bool]:
        """Whether an object stands at `at` that begins as a call does."""
        if not (yield from self._starts(at, "{")):
            return False
        at = yield from self._after(at + 1)
        key = yield from self._starts(at, *_FIRST_KEYS)
        if key != '"name"':
            return bool(key)
        at = yield from self._after(at + len(key))
        if not (yield from self._starts(at, ":")):
            return False
        at = yield from self._after(at + 1)
        return bool((yield from self._starts(at, *map(_quoted, self._tools))))

    def _object(self, at: int) -> Steps[tuple[int, bool]]:
        """Read the object at `at`; gives where it ends, and whether it was a call, which is then reported."""
        value = BracketedValue(at)
        while True:
            is_open = value.read(self._buffer)
            head = _CALL_HEAD.match(self._buffer, at) if self._stream_arguments else None
            if head:
                end, is_call = yield from self._arguments(json.loads(head.group(1)), head.end())
                return ((yield from self._value_end(value)) or end, is_call)
            if not is_open:
                break
            if not (yield from self._more()):
                return len(self._buffer), False
        call = _read_call(self._buffer[at : value.end]) if value.end else None
        if call is None or call[0] not in self._tools:
            return value.end or value.broken_at, False
        self._start(call[0])
        self._give(call[1])
        return value.end, True

    def _arguments(self, name: str, at: int) -> Steps[tuple[int, bool]]:
        """Read the arguments of `name` at `at`; gives the same as `_object`."""
        value = BracketedValue(at)
        if self._stream_arguments:
            self._start(name)
            while value.is_open:
                is_open = value.read(self._buffer)
                end = value.end or value.broken_at or len(self._buffer)
                self._give(self._buffer[at:end])
                at = end
                if is_open and not (yield from self._more()):
                    break
            return at, True
        end = yield from self._value_end(value)
        if not end or not _is_object(self._buffer[at:end]):
            return end or value.broken_at or len(self._buffer), False
        self._start(name)
        self._give(self._buffer[at:end])
        return end, True


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes and Qwen."""

    def _parse(self) -> Steps[None]:
        opening, closing = "<tool_call>", "</tool_call>"
        while (yield from self._until(opening)):
            at = yield from self._after(len(opening))
            if (yield from self._objects(at, _BLANKS, opening)):
                at = yield from self._after(0)
                if (yield from self._starts(at, closing)):
                    self._drop(at + len(closing))


class Llama3Parser(ToolParser):
    """`{"name": ..., "parameters": {...}}`, several with `;` between, of Llama 3.

    They count at the very beginning of the text, or after `<|python_tag|>`.
    """

    def _parse(self) -> Steps[None]:
        tag = "<|python_tag|>"
        at = yield from self._after(0)
        yield from self._objects(at, _SEMICOLONS)
        while (yield from self._until(tag)):
            at = yield from self._after(len(tag))
            yield from self._objects(at, _SEMICOLONS, tag)


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` and `[TOOL_CALLS]name[ARGS]{...}`, of Mistral."""

    def _parse(self) -> Steps[None]:
        opening = "[TOOL_CALLS]"
        while (yield from self._until(opening)):
            at = yield from self._after(len(opening))
            if (yield from self._starts(at, "[")):
                at = yield from self._after(at + 1)
                if (yield from self._objects(at, _COMMAS, opening)):
                    at = yield from self._after(0)
                    if (yield from self._starts(at, "]")):
                        self._drop(at + 1)
            else:
                yield from self._named(at, opening)

    def _named(self, at: int, marker: str) -> Steps[None]:
        """Read `name[ARGS]{...}`, perhaps with `[CALL_ID]...` after the name."""
        heads = [name + following for name in self._tools for following in ("[ARGS]", "[CALL_ID]")]
        head = yield from self._starts(at, *heads)
        at += len(head)
        if head.endswith("[CALL_ID]"):
            at = yield from self._after(at, _CALL_ID)
            arguments = yield from self._starts(at, "[ARGS]")
            at += len(arguments)
        at = yield from self._after(at)
        if head and (yield from self._starts(at, "{")):
            end, is_call = yield from self._arguments(head.rpartition("[")[0], at)
            if is_call:
                self._drop(end)
            else:
                self._take_text(end)
        else:
            self._take_text(len(marker))


class PythonicParser(ToolParser):
    """`[weather(city="Bern"), time()]`, of Llama 3.2 and 4, LFM2 and others.

    They count at the very beginning of the text, or after one of the markers.  A list is
    whole or no call at all, so its arguments are never streamed.
    """

    def _parse(self) -> Steps[None]:
        closing = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}
        at = yield from self._after(0)
        yield from self._list(at, "")
        while opening := (yield from self._until(*closing)):
            at = yield from self._after(len(opening))
            if (yield from self._list(at, opening)):
                at = yield from self._after(0)
                if (yield from self._starts(at, closing[opening])):
                    self._drop(at + len(closing[opening]))

    def _list(self, start: int, marker: str) -> Steps[bool]:
        """Read a list of calls; as `_objects`."""
        begins = yield from self._starts(start, "[")
        if begins:
            at = yield from self._after(start + 1)
            begins = yield from self._starts(at, *(f"{name}(" for name in self._tools))
        if not begins:
            self._take_text(len(marker))
            return False
        value = BracketedValue(start, "\"'")
        end = yield from self._value_end(value)
        calls = self._read(self._buffer[start:end]) if end else []
        for name, arguments in calls:
            self._start(name)
            self._give(arguments)
        if calls:
            self._drop(end)
        else:
            self._take_text(end or value.broken_at or len(self._buffer))
        return bool(calls)

    def _read(self, text: str) -> list[tuple[str, str]]:
        try:
            calls = read_calls(text)
            if any(name not in self._tools for name, _ in calls):
                return []
            return [(name, json.dumps(each, ensure_ascii=False, allow_nan=False)) for name, each in calls]
        except ValueError:
            return []


_BLANKS = re.compile(r"\s*")
_SEMICOLONS = re.compile(r"[\s;]*")
_COMMAS = re.compile(r"\s*(?:,\s*)?")


# --- the JSON of a call ---


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments, as they are written, of an object that is a call; None if it is none."""
    try:
        members = _members(text)
    except (ValueError, RecursionError):
        return None
    name, _ = members.get("name", (None, ""))
    value, arguments = next((members[key] for key in _ARGUMENT_KEYS if key in members), (None, ""))
    if not isinstance(name, str):
        return None
    if value is None:
        return name, "{}"
    if isinstance(value, str):  # the object's text in a string, as OpenAI writes it
        arguments, value = value, _loads(value)
    return (name, arguments) if isinstance(value, Mapping) else None


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """The members of an object, each with its text.

    Raises:
        ValueError: it is no object.
    """
    found: dict[str, tuple[Any, str]] = {}
    at = _past(text, 0, "{")
    while not text.startswith("}", at):
        if found:
            at = _past(text, at, ",")
        key, at = _decoder.raw_decode(text, at)
        at = _past(text, _skip(text, at), ":")
        value, end = _decoder.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a key that is no string")
        found[key] = value, text[at:end]
        at = _skip(text, end)
    return found


def _past(text: str, at: int, character: str) -> int:
    if not text.startswith(character, at):
        raise ValueError(f"{character} was expected")
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\n", "\r", "\t"):
        at += 1
    return at


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _is_object(text: str) -> bool:
    return isinstance(_loads(text), dict)


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
