"""What one choice says, whatever protocol it is told in."""

from __future__ import annotations

from collections.abc import Sequence

from trio_llm.engine.choice import Delta
from trio_llm.prompt.events import Event, Message, ToolCallStart, collect
from trio_llm.prompt.output_parser import OutputParser
from trio_llm.server.openai.tools import Reading


class Speech:
    """What one choice says, as it comes: read from its text.

    Streamed or not, it is read the same way, so that both say the same.
    """

    def __init__(self, parser: OutputParser, reading: Reading) -> None:
        self._parser = parser
        self._reading = reading
        self._events: list[Event] = []
        self._call_ids: list[str] = []

    def push(self, deltas: Sequence[Delta]) -> list[Event]:
        """Take what is new, and with the last of it what was held back."""
        events: list[Event] = []
        for delta in deltas:
            for text, token_ids in delta.by_token():
                events += self._parser.push(text, token_ids)
            if delta.finish_reason is not None:
                events += self._parser.finish()
        if not self._reading.parallel:
            events = [event for event in events if getattr(event, "index", 0) == 0]
        self._call_ids += [self._new_id() for event in events if isinstance(event, ToolCallStart)]
        self._events += events
        return events

    def call_id(self, index: int) -> str:
        """The id of a call that was told."""
        return self._call_ids[index]

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def finish_reason(self, reason: str) -> str:
        """What an end is called: a call that the model chose to make has a name of its own."""
        if reason == "stop" and self._call_ids and not self._reading.choice.is_named:
            return "tool_calls"
        return reason

    @property
    def events(self) -> list[Event]:
        """All that was said, in its order."""
        return self._events

    @property
    def said(self) -> Message:
        """All that was said."""
        return collect(self._events)

    def _new_id(self) -> str:
        assert self._reading.tool_format is not None
        return self._reading.tool_format.new_call_id()
