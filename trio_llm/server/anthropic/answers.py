"""What a message is answered with, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import attrs
import orjson

from trio_llm.engine.choice import Delta
from trio_llm.engine.generation import Generation
from trio_llm.errors import TrioLLMError
from trio_llm.prompt.events import Event, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallStart, joined
from trio_llm.server.anthropic import wire
from trio_llm.server.anthropic.errors import body_of
from trio_llm.server.openai.chunks import Identity
from trio_llm.server.openai.speech import Speech
from trio_llm.server.openai.turn import Turn
from trio_llm.server.openai.wire import encode

Usage = TypeVar("Usage", bound=wire.RunningUsage)

_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def message(turn: Turn) -> wire.MessageAnswer:
    """The whole answer."""
    (choice,) = turn.generation.choices
    speech = turn.speech()
    events = speech.events if turn.speeches else [TextPiece(choice.text)] if choice.text else []
    return wire.MessageAnswer(
        id=turn.identity.id,
        model=turn.identity.model,
        content=_blocks(events, speech),
        stop_reason=_stop_reason(str(choice.finish_reason), choice.stop_string, events),
        stop_sequence=choice.stop_string,
        usage=_usage(wire.MessagesUsage, turn.generation, speech),
    )


def _blocks(events: Iterable[Event], speech: Speech) -> list[wire.AnswerBlock]:
    blocks: list[wire.AnswerBlock] = []
    for event in joined(events):
        match event:
            case TextPiece(text):
                blocks.append(wire.TextBlock(text=text))
            case ReasoningPiece(text):
                blocks.append(wire.ThinkingBlock(thinking=text))
            case ToolCallStart():
                blocks.append(_opened(event, speech))
            case ToolCallArguments(_, text):
                call = blocks[-1]
                assert isinstance(call, wire.ToolUseBlock)
                blocks[-1] = attrs.evolve(call, input=_object(text))
    return blocks


def _object(text: str) -> dict[str, Any]:
    """The input of a call; empty if the answer came to its end before it was whole."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _opened(event: Event, speech: Speech) -> wire.AnswerBlock:
    """The block that an event belongs to, as it begins."""
    match event:
        case ToolCallStart(index, name):
            return wire.ToolUseBlock(id=speech.call_id(index), name=name, input={})
        case ReasoningPiece():
            return wire.ThinkingBlock(thinking="")
        case _:
            return wire.TextBlock(text="")


def _stop_reason(finish_reason: str, stop_string: str | None, events: Iterable[Event]) -> str:
    if stop_string is not None:
        return "stop_sequence"
    if finish_reason == "stop" and any(isinstance(event, ToolCallStart) for event in events):
        return "tool_use"
    return _REASONS.get(finish_reason, finish_reason)


def _usage(kind: type[Usage], generation: Generation, speech: Speech) -> Usage:
    usage = generation.usage
    return kind(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=wire.ThinkingTokens(thinking_tokens=speech.reasoning_tokens),
    )


class MessageEvents:
    """The events of one message: its blocks one after the other, each with a beginning and an end.

    Args:
        request_id: what an error names.
    """

    def __init__(self, turn: Turn, *, request_id: str) -> None:
        self._identity: Identity = turn.identity
        self._generation = turn.generation
        self._speech = turn.speech()
        self._request_id = request_id
        self._block: type | None = None
        """Of the block that is open."""
        self._num_blocks = 0
        self._stop_string: str | None = None

    def opening(self, index: int) -> bytes:
        """The message without its content."""
        return _event(
            wire.MessageStart(
                message=wire.MessageAnswer(
                    id=self._identity.id,
                    model=self._identity.model,
                    content=[],
                    stop_reason=None,
                    stop_sequence=None,
                    usage=_usage(wire.MessagesUsage, self._generation, self._speech),
                )
            )
        )

    def content(self, place: int, index: int, deltas: Sequence[Delta]) -> bytes:
        """More of its blocks."""
        self._stop_string = deltas[-1].stop_string
        return b"".join(part for event in self._speech.push(deltas) for part in self._tell(event))

    def _tell(self, event: Event) -> Iterable[bytes]:
        if isinstance(event, ToolCallArguments):
            yield self._delta(wire.InputJsonDelta(partial_json=event.text))
            return
        if isinstance(event, ToolCallStart) or type(event) is not self._block:
            yield self._close()
            yield _event(wire.ContentBlockStart(index=self._num_blocks, content_block=_opened(event, self._speech)))
            if self._num_blocks == 0:
                yield _PING
            self._block = type(event)
        match event:
            case TextPiece(text):
                yield self._delta(wire.TextDelta(text=text))
            case ReasoningPiece(text):
                yield self._delta(wire.ThinkingDelta(thinking=text))

    def _delta(self, delta: wire.BlockDelta) -> bytes:
        return _event(wire.ContentBlockDelta(index=self._num_blocks, delta=delta))

    def _close(self) -> bytes:
        """The end of the open block, if there is one."""
        if self._block is None:
            return b""
        # clients wait for a signature, which there is not
        signature = self._delta(wire.SignatureDelta()) if self._block is ReasoningPiece else b""
        end = signature + _event(wire.ContentBlockStop(index=self._num_blocks))
        self._block = None
        self._num_blocks += 1
        return end

    def closing(self, index: int, finish_reason: str, *, is_last: bool) -> bytes:
        """The end of the last block, and why it ended."""
        reason = _stop_reason(finish_reason, self._stop_string, self._speech.events)
        delta = wire.StopDelta(stop_reason=reason, stop_sequence=self._stop_string)
        return self._close() + _event(
            wire.MessageDelta(delta=delta, usage=_usage(wire.RunningUsage, self._generation, self._speech))
        )

    def end(self) -> bytes:
        """The end of the message."""
        return _event(wire.MessageStop())

    def failure(self, error: TrioLLMError) -> bytes:
        """The error envelope as the last event."""
        return b"event: error\ndata: " + body_of(error, self._request_id) + b"\n\n"


def _event(data: wire.Event) -> bytes:
    return b"event: " + data.type.encode() + b"\ndata: " + encode(data) + b"\n\n"
