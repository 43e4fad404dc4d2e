"""Tells the reasoning at the beginning of an answer from the answer.

Reasoning stands between two markers, before everything else.  Some chat templates write
the first marker themselves, so that the answer begins inside; that shows at the end of the
prompt.  Line ends beside a marker belong to it: templates write them, and take them off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from trio_llm.errors import ConfigurationError, InvalidRequest
from trio_llm.prompt.chat_template import Conversation, render_text
from trio_llm.prompt.events import ReasoningPiece
from trio_llm.prompt.incremental import IncrementalParser, Steps
from trio_llm.prompt.vocabulary import marker_tokens, special_token_ids

_MARKERS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}

REASONING_FORMATS = tuple(_MARKERS)
"""The names that there are."""

_SHORT = ({"role": "user", "content": "?"},)

_TAIL = 16
"""Tokens at the end of a prompt that may spell the first marker and line ends."""


@attrs.frozen
class ReasoningFormat:
    """How a model marks its reasoning, in the vocabulary of one model."""

    name: str
    begin_token_id: int | None = None
    """The first marker, if it is one token."""
    end_token_id: int | None = None
    """The last marker, if it is one token."""
    special_token_ids: frozenset[int] = frozenset()
    """Those of its markers that are special tokens, which decoding would leave out: they must stay in the text."""

    @property
    def markers(self) -> tuple[str, str]:
        """What stands before the reasoning, and after it."""
        return _MARKERS[self.name]

    def begins_inside(self, tokenizer: Any, prompt_token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the first marker, so that the answer begins with reasoning."""
        tail = tokenizer.decode(list(prompt_token_ids[-_TAIL:]), skip_special_tokens=False)
        return str(tail).rstrip().endswith(self.markers[0])

    def is_opened_by_template(self, tokenizer: Any, conversation: Conversation) -> bool:
        """The same for a conversation, before it is tokenised: whether the header of an answer has the first marker.

        It is tried with a short message in place of the conversation's own.
        """
        if not conversation.add_generation_prompt:
            return False
        try:
            text = render_text(tokenizer, attrs.evolve(conversation, messages=_SHORT, tools=()))
        except InvalidRequest:
            return False
        return text.rstrip().endswith(self.markers[0])

    def parser(self, *, inside: bool = False) -> ReasoningParser:
        """A parser for one choice.

        Args:
            inside: whether the answer begins inside of the reasoning; see `begins_inside`.
        """
        return ReasoningParser(*self.markers, inside=inside)


def reasoning_format(tokenizer: Any, name: str = "auto") -> ReasoningFormat | None:
    """How a model marks its reasoning.

    Args:
        name: one of REASONING_FORMATS, "auto", which goes by the chat template, or "none".

    Returns:
        None if it is "none", or not known.

    Raises:
        ConfigurationError: there is no such format.
    """
    if name == "auto":
        source = str(tokenizer.chat_template or "")
        name = next((each for each, (_, end) in _MARKERS.items() if end in source), "none")
    if name == "none":
        return None
    if name not in _MARKERS:
        known = ", ".join(["auto", "none", *REASONING_FORMATS])
        raise ConfigurationError(f"no reasoning format {name!r}; there are {known}", field="reasoning_parser")
    tokens = marker_tokens(tokenizer, _MARKERS[name])
    special = special_token_ids(tokenizer).intersection(tokens.values())
    begin, end = _MARKERS[name]
    return ReasoningFormat(name, tokens.get(begin), tokens.get(end), special)


class ReasoningParser(IncrementalParser):
    """The text of one choice in; ReasoningPiece, then TextPiece out.

    What has no first marker at its very beginning is text.  Where the last marker never
    comes, all is reasoning.
    """

    def __init__(self, begin: str, end: str, *, inside: bool = False) -> None:
        self.has_reasoning = inside
        """Whether there is reasoning, as far as that is known."""
        self.is_over = False
        """Whether the reasoning has ended, or there is none."""
        self._begin = begin
        self._end = end
        self._line_ends: str | None = None
        """While reasoning: line ends that may be the last; None before there was anything else."""
        super().__init__()

    def _parse(self) -> Steps[None]:
        at = yield from self._after(0)
        # where the prompt has the marker already, some models write it once more
        if (yield from self._starts(at, self._begin)):
            self._drop(at + len(self._begin))
            self.has_reasoning = True
        if self.has_reasoning and (yield from self._until(self._end)):
            self._drop(len(self._end))
            self.is_over = True
            yield from self._skip_line_ends()
        self.is_over = True

    def _skip_line_ends(self) -> Steps[None]:
        while True:
            self._buffer = self._buffer.lstrip("\n")
            if self._buffer or not (yield from self._more()):
                return

    def _say(self, text: str) -> None:
        if not self.has_reasoning or self.is_over:
            super()._say(text)
            return
        text = text.lstrip("\n") if self._line_ends is None else self._line_ends + text
        inner = text.rstrip("\n")
        if inner:
            self._events.append(ReasoningPiece(inner))
            self._line_ends = text[len(inner) :]
        elif self._line_ends is not None:
            self._line_ends = text
