"""How the chunks of a stream are spelled: what all endpoints share, and the hot path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import attrs
import orjson

from trio_llm.engine.generation import Generation
from trio_llm.server.openai.wire import ChunkChoice, PromptTokensDetails, TextChoice, UsageBody, to_wire

DONE = b"data: [DONE]\n\n"
_MARK = "\N{WHITE SQUARE}"

AnyChoice = ChunkChoice | TextChoice


@attrs.frozen(kw_only=True)
class Identity:
    """What every chunk and answer of one request bears."""

    id: str
    model: str
    created: int


def event(data: object) -> bytes:
    """One event of the stream."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def usage_of(generation: Generation) -> UsageBody:
    """The usage of a whole request, all choices together."""
    usage = generation.usage
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


class Chunks(ABC):
    """Writes the chunks of one stream, each a complete event.

    A chunk of text is the hot one: the full chunk is cut once, around its text, and pasted
    together from then on.

    Args:
        with_usage: the client asked for usage: a chunk of its own, and `usage: null` on all others.
    """

    def __init__(self, identity: Identity, generation: Generation, *, with_usage: bool) -> None:
        self.identity = identity
        self.generation = generation
        self.with_usage = with_usage
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def plain(self, choices: list[Any], usage: UsageBody | None = None) -> dict[str, Any]:
        """A chunk as plain data, `usage` always in it."""

    @abstractmethod
    def opening_choice(self, index: int) -> AnyChoice | None:
        """What a choice begins with."""

    @abstractmethod
    def text_choice(self, index: int, text: str) -> AnyChoice:
        """More text of a choice."""

    @abstractmethod
    def closing_choice(self, index: int, finish_reason: str) -> AnyChoice:
        """The end of a choice."""

    def opening(self, index: int) -> bytes:
        """The first chunk of a choice; empty if the endpoint has none."""
        choice = self.opening_choice(index)
        return b"" if choice is None else self._event(choice)

    def text(self, index: int, text: str) -> bytes:
        """A chunk with more text of a choice."""
        template = self._templates.get(index)
        if template is None:
            before, _, after = self._event(self.text_choice(index, _MARK)).rpartition(orjson.dumps(_MARK))
            template = self._templates[index] = (before, after)
        return template[0] + orjson.dumps(text) + template[1]

    def closing(self, index: int, finish_reason: str) -> bytes:
        """The last chunk of a choice."""
        return self._event(self.closing_choice(index, finish_reason))

    def end(self) -> bytes:
        """What ends the stream: the chunk with the usage of the whole request, if asked for, and [DONE]."""
        return (event(self.plain([], usage_of(self.generation))) if self.with_usage else b"") + DONE

    def _event(self, choice: AnyChoice) -> bytes:
        plain = self.plain([choice])
        if not self.with_usage:
            del plain["usage"]
        return event(plain)


def to_plain(chunk: Any) -> dict[str, Any]:
    """A chunk object as plain data; what a delta does not hold is left out of it."""
    plain: dict[str, Any] = to_wire(chunk)
    for choice in plain["choices"]:
        if "delta" in choice:
            choice["delta"] = {name: value for name, value in choice["delta"].items() if value is not None}
    return plain
