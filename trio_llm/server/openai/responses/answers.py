"""What a response is answered with: the same items, whole or as the events in which they come about."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs
import orjson

from trio_llm.engine.choice import Delta
from trio_llm.errors import TrioLLMError
from trio_llm.prompt.events import Event, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallStart
from trio_llm.server.openai import wire as chat
from trio_llm.server.openai.chunks import truncated_of
from trio_llm.server.openai.error_bodies import failure_of
from trio_llm.server.openai.logprobs import chat_logprobs, of_text
from trio_llm.server.openai.responses import wire
from trio_llm.server.openai.turn import Turn
from trio_llm.server.openai.wire import TokenLogprobWithTop, encode, to_plain

_ENDINGS: dict[str, wire.Status] = {"length": "incomplete", "abort": "cancelled"}


@attrs.define(eq=False)
class _Open:
    """An item that is being said."""

    place: int
    id: str
    kind: type[wire.OutputItem]
    text: list[str] = attrs.field(factory=list)
    logprobs: list[TokenLogprobWithTop] = attrs.field(factory=list)
    name: str = ""
    call_id: str = ""

    def item(self, status: wire.ItemStatus) -> wire.OutputItem:
        """As it stands."""
        text = "".join(self.text)
        if self.kind is wire.OutputFunctionCall:
            return wire.OutputFunctionCall(
                id=self.id, status=status, call_id=self.call_id, name=self.name, arguments=text
            )
        if self.kind is wire.OutputReasoning:
            return wire.OutputReasoning(
                id=self.id, status=status, content=[wire.ReasoningText(text=text)] if text else []
            )
        return wire.OutputMessage(id=self.id, status=status, content=[self.part()] if text else [])

    def part(self) -> wire.OutputText:
        return wire.OutputText(text="".join(self.text), logprobs=self.logprobs)


class ResponseAnswer:
    """The answer to one request, as it comes about.

    Whole answers are made by the way that streams go, so that both say the same.

    Args:
        body: the request.
        store: whether it will be kept.
    """

    def __init__(self, turn: Turn, body: wire.ResponseRequest, *, store: bool) -> None:
        self._turn = turn
        self._body = body
        self._store = store
        self._speech = turn.speech()
        self._wants_logprobs = turn.generation.params.logprobs is not None
        self._done: list[wire.OutputItem] = []
        self._open: _Open | None = None
        self._status: wire.Status = "in_progress"
        self._completed_at: int | None = None
        self._error: wire.ResponseFailure | None = None
        self._sequence_number = 0
        self._untold: list[TokenLogprobWithTop] = []
        """Log-probabilities of tokens whose meaning is not known yet."""
        self._only_text = True
        """Whether they can be nothing but those of text."""

    # --- what sse.EventStream asks for ---

    def opening(self, index: int) -> bytes:
        """That it has begun."""
        return self._told("response.created") + self._told("response.in_progress")

    def content(self, place: int, index: int, deltas: Sequence[Delta]) -> bytes:
        """What has come."""
        if not self._wants_logprobs:
            return b"".join(self._say(event, []) for event in self._speech.push(deltas))
        written = []
        for delta in deltas:  # one by one: what stands in which is known then
            self._untold += chat_logprobs(of_text(delta), self._turn.generation.token_bytes).content
            written += [self._say(event, self._logprobs_of(event)) for event in self._speech.push([delta])]
        return b"".join(written)

    def closing(self, index: int, finish_reason: str, *, is_last: bool) -> bytes:
        """How it ended."""
        self._status = _ENDINGS.get(finish_reason, "completed")
        if self._status == "completed":
            self._completed_at = int(time.time())
        if self._open is not None and self._open.kind is wire.OutputMessage:
            self._open.logprobs += self._untold  # of tokens without text
        return self._close("completed" if self._status == "completed" else "incomplete")

    def end(self) -> bytes:
        """The whole response, once more."""
        return self._told("response.completed" if self._status == "completed" else "response.incomplete")

    def failure(self, error: TrioLLMError) -> bytes:
        """That it failed."""
        self._status = "failed"
        self._error = wire.ResponseFailure(code=failure_of(error).code or "server_error", message=error.message)
        return self._close("incomplete") + self._told("response.failed")

    # --- the response itself ---

    @property
    def id(self) -> str:
        return self._turn.identity.id

    def response(self, status: wire.Status | None = None) -> wire.Response:
        """As it stands, or as if it had a status."""
        status = status or self._status
        body, generation, is_over = self._body, self._turn.generation, status != "in_progress"
        params = generation.params
        truncated = truncated_of([generation])
        return wire.Response(
            id=self.id,
            created_at=self._turn.identity.created,
            completed_at=self._completed_at,
            status=status,
            error=self._error,
            incomplete_details=wire.IncompleteDetails() if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=body.model,
            output=[*self._done, *([] if self._open is None else [self._open.item("in_progress")])],
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            safety_identifier=body.safety_identifier,
            store=self._store,
            temperature=1.0 if params.temperature is None else params.temperature,
            text={"format": _format(body.text)},
            tool_choice=body.tool_choice or ("auto" if body.tools else "none"),
            tools=[_tool(tool) for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=1.0 if params.top_p is None else params.top_p,
            truncation=body.truncation or "disabled",
            usage=self._usage() if is_over and self._error is None else None,
            truncated=None if truncated is None else to_plain(truncated),
        )

    def messages(self) -> list[chat.Message]:
        """The answer as it stands in the history of the next turn."""
        said = self._speech.said
        calls = [
            chat.ToolCall(
                id=self._speech.call_id(place), function=chat.FunctionCall(name=call.name, arguments=call.arguments)
            )
            for place, call in enumerate(said.tool_calls)
        ]
        return [
            chat.Message(
                role="assistant",
                content=said.content,
                tool_calls=calls or None,
                reasoning_content=said.reasoning or None,
            )
        ]

    def _usage(self) -> wire.ResponseUsage:
        usage = self._turn.generation.usage
        return wire.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=wire.InputTokensDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=wire.OutputTokensDetails(reasoning_tokens=self._speech.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )

    def _logprobs_of(self, event: Event) -> list[TokenLogprobWithTop]:
        """Those that belong to an event: a message has those of its text, not of reasoning, calls and their marks."""
        if not isinstance(event, TextPiece):
            self._only_text = False
            return []
        first = 0
        if not self._only_text:
            first, missing = len(self._untold), len(event.text.encode())
            while first and missing > 0:
                first -= 1
                missing -= len(self._untold[first]["bytes"] or ())
        told, self._untold, self._only_text = self._untold[first:], [], True
        return told

    # --- items and their events ---

    def _say(self, event: Event, logprobs: list[TokenLogprobWithTop]) -> bytes:
        match event:
            case TextPiece(text):
                opened = self._item(wire.OutputMessage, "msg")
                self._current.text.append(text)
                self._current.logprobs += logprobs
                delta = self._in_part("response.output_text.delta", delta=text, logprobs=logprobs)
            case ReasoningPiece(text):
                opened = self._item(wire.OutputReasoning, "rs")
                self._current.text.append(text)
                delta = self._in_part("response.reasoning_text.delta", delta=text)
            case ToolCallStart(index, name):
                opened = self._close("completed")
                self._open = self._new(wire.OutputFunctionCall, "fc")
                self._open.name, self._open.call_id = name, self._speech.call_id(index)
                delta = self._of_item("response.output_item.added", item=self._open.item("in_progress"), bare=True)
            case ToolCallArguments(_, text):
                opened = b""
                self._current.text.append(text)
                delta = self._of_item("response.function_call_arguments.delta", delta=text)
        return opened + delta

    @property
    def _current(self) -> _Open:
        assert self._open is not None
        return self._open

    def _new(self, kind: type[wire.OutputItem], prefix: str) -> _Open:
        place = len(self._done)
        return _Open(place, f"{prefix}_{self.id.removeprefix('resp_')}_{place}", kind)

    def _item(self, kind: type[wire.OutputItem], prefix: str) -> bytes:
        """Go on with an item of this kind, or begin one."""
        if self._open is not None and self._open.kind is kind:
            return b""
        closed = self._close("completed")
        self._open = self._new(kind, prefix)
        added = self._of_item("response.output_item.added", item=self._open.item("in_progress"), bare=True)
        part: Any = wire.OutputText(text="") if kind is wire.OutputMessage else wire.ReasoningText(text="")
        return closed + added + self._in_part("response.content_part.added", part=part)

    def _close(self, status: wire.ItemStatus) -> bytes:
        """End the item that is being said."""
        if self._open is None:
            return b""
        item, text = self._open.item(status), "".join(self._open.text)
        if isinstance(item, wire.OutputFunctionCall):
            events = self._of_item("response.function_call_arguments.done", arguments=text, name=item.name)
        elif isinstance(item, wire.OutputReasoning):
            events = self._in_part("response.reasoning_text.done", text=text)
            events += self._in_part("response.content_part.done", part=wire.ReasoningText(text=text))
        else:
            events = self._in_part("response.output_text.done", text=text, logprobs=self._open.logprobs)
            events += self._in_part("response.content_part.done", part=self._open.part())
        events += self._of_item("response.output_item.done", item=item, bare=True)
        self._done.append(item)
        self._open = None
        return events

    def _in_part(self, kind: str, **fields: Any) -> bytes:
        """An event of the open item's only part."""
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, *, bare: bool = False, **fields: Any) -> bytes:
        """An event of the open item.

        Args:
            bare: without the item's id, which stands in the item.
        """
        named = {} if bare else {"item_id": self._current.id}
        return self._event(kind, **named, output_index=self._current.place, **fields)

    def _told(self, kind: str) -> bytes:
        return self._event(kind, response=self.response())

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(data) + b"\n\n"


def _format(text: wire.TextOptions | None) -> dict[str, Any]:
    wanted = None if text is None else text.format
    if wanted is None or wanted.type != "json_schema":
        return {"type": "text" if wanted is None else wanted.type}
    return {
        "type": "json_schema",
        "name": wanted.name,
        "schema": wanted.schema,
        "strict": wanted.strict,
        "description": wanted.description,
    }


def _tool(tool: wire.ResponseFunctionTool) -> dict[str, Any]:
    return attrs.asdict(tool)


def plain_items(items: str | Sequence[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """A request's input as items that have ids, as the API lists them."""
    given: Sequence[dict[str, Any]]
    if isinstance(items, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": items}]}]
    else:
        given = orjson.loads(orjson.dumps(items))
    suffix = response_id.removeprefix("resp_")
    return [
        {
            "id": f"in_{suffix}_{place}",
            "type": "message",
            **{name: part for name, part in item.items() if part is not None},
        }
        for place, item in enumerate(given)
    ]
