"""What a model's text turns out to be, piece by piece: reasoning, text, tool calls."""

from __future__ import annotations

from collections.abc import Iterable

import attrs


@attrs.frozen
class TextPiece:
    """Text of the answer."""

    text: str


@attrs.frozen
class ReasoningPiece:
    """Text of the reasoning before the answer."""

    text: str


@attrs.frozen
class ToolCallStart:
    """A tool call begins; its arguments follow."""

    index: int
    """Of the call in its message, from 0."""
    name: str


@attrs.frozen
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Event = TextPiece | ReasoningPiece | ToolCallStart | ToolCallArguments


@attrs.frozen
class ToolCall:
    """A whole tool call."""

    name: str
    arguments: str
    """JSON text of an object."""


@attrs.frozen
class Message:
    """All that was said in one answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def collect(events: Iterable[Event]) -> Message:
    """The message that events add up to."""
    said: dict[type, list[str]] = {TextPiece: [], ReasoningPiece: []}
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            names.append(event.name)
            arguments.append([])
        elif isinstance(event, ToolCallArguments):
            arguments[event.index].append(event.text)
        else:
            said[type(event)].append(event.text)
    calls = (ToolCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True))
    return Message("".join(said[TextPiece]), "".join(said[ReasoningPiece]), tuple(calls))


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbouring pieces of one kind made one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, TextPiece) and isinstance(last, TextPiece):
            found[-1] = TextPiece(last.text + event.text)
        elif isinstance(event, ReasoningPiece) and isinstance(last, ReasoningPiece):
            found[-1] = ReasoningPiece(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments) and event.index == last.index:
            found[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found
