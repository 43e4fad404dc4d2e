"""All that a choice's text goes through between the detokenizer and a protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trio_llm.prompt.events import Event, TextPiece, joined
from trio_llm.prompt.reasoning import ReasoningParser
from trio_llm.prompt.tool_parsers import ToolParser


class OutputParser:
    """The text of one choice in; reasoning, text and tool calls out.

    Args:
        reasoning: finds the reasoning; None if the model has none.
        tools: finds the calls in what follows it; None if there are no tools.
        reasoning_end_token_id: the last marker of the reasoning, if it is one token.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        reasoning_end_token_id: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._end_token_id = reasoning_end_token_id
        self._num_reasoning_tokens = 0
        self._is_counting = reasoning is not None

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """Take what is new; gives what is certain now.

        Args:
            token_ids: the tokens that came with it, for `reasoning_tokens`.
        """
        events = self._after_reasoning(self._reasoning.push(text) if self._reasoning else [TextPiece(text)])
        self._count(token_ids)
        return events

    def finish(self) -> list[Event]:
        """Nothing follows: what was held back is decided as it stands."""
        events = self._after_reasoning(self._reasoning.finish()) if self._reasoning else []
        return joined([*events, *(self._tools.finish() if self._tools else [])])

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the end of the reasoning, with its markers.

        Exact where the last marker is one token.  Elsewhere those tokens count that were
        pushed before the text of the marker was whole, or together with its end.
        """
        return self._num_reasoning_tokens if self._reasoning and self._reasoning.has_reasoning else 0

    def _after_reasoning(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            if self._tools and isinstance(event, TextPiece):
                found += self._tools.push(event.text)
            elif not isinstance(event, TextPiece) or event.text:
                found.append(event)
        return joined(found)

    def _count(self, token_ids: Sequence[int]) -> None:
        if not self._is_counting:
            return
        assert self._reasoning is not None
        if self._end_token_id is not None and self._end_token_id in token_ids:
            self._num_reasoning_tokens += list(token_ids).index(self._end_token_id) + 1
            self._is_counting = False
            return
        self._num_reasoning_tokens += len(token_ids)
        if self._reasoning.is_over and (self._end_token_id is None or not self._reasoning.has_reasoning):
            self._is_counting = False
