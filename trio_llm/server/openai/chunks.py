"""How the chunks of a stream are spelled: what all endpoints share, and the hot path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import attrs
import orjson

from trio_llm.engine.choice import Delta
from trio_llm.engine.generation import Generation
from trio_llm.errors import TrioLLMError
from trio_llm.server.openai.error_bodies import body_of
from trio_llm.server.openai.wire import (
    ChatCompletionChunk,
    ChunkChoice,
    CompletionTokensDetails,
    GenerationFields,
    PromptTokensDetails,
    TextChoice,
    TextCompletion,
    TimingsBody,
    TruncatedBody,
    UsageBody,
    encode,
    to_plain,
)

DONE = b"data: [DONE]\n\n"
_MARK = "\N{WHITE SQUARE}"

AnyChoice = ChunkChoice | TextChoice
AnyChunk = ChatCompletionChunk | TextCompletion


@attrs.frozen(kw_only=True)
class Identity:
    """What every chunk and answer of one request bears."""

    id: str
    model: str
    created: int


def event(data: object) -> bytes:
    """One event of the stream."""
    return b"data: " + encode(data) + b"\n\n"


def usage_of(generations: Sequence[Generation], *, reasoning_tokens: int = 0) -> UsageBody:
    """The usage of a whole request, all prompts and choices together."""
    usages = [generation.usage for generation in generations]
    return UsageBody(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        total_tokens=sum(usage.total_tokens for usage in usages),
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(usage.cached_tokens for usage in usages)),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )


def timings_of(generations: Sequence[Generation]) -> TimingsBody:
    """Where the time went; of several prompts, that of the slowest in each part."""
    timings = [generation.timings for generation in generations]
    return TimingsBody(
        queue_ms=_milliseconds(max(timing.queue for timing in timings)),
        prefill_ms=_milliseconds(max(timing.prefill for timing in timings)),
        decode_ms=_milliseconds(max(timing.decode for timing in timings)),
    )


def truncated_of(generations: Sequence[Generation]) -> TruncatedBody | None:
    """What the prompts of a request were cut by, all together; None if they were not."""
    dropped = [generation.dropped for generation in generations if generation.dropped is not None]
    if not dropped:
        return None
    tokens = [each.tokens for each in dropped if each.tokens is not None]
    return TruncatedBody(
        messages=sum(each.messages for each in dropped), tokens=sum(tokens) if len(tokens) == len(dropped) else None
    )


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


class Chunks(ABC):
    """Writes the chunks of one stream, each a complete event.

    A chunk of text and nothing else is the hot one: the full chunk is cut once, around its text,
    and pasted together from then on.

    Args:
        generations: one for each prompt; all have as many choices.
        body: the request: what it wants to have in its chunks.
        detailed: whether chunks have more than text: log-probabilities, token ids, an echo.
    """

    def __init__(
        self, identity: Identity, generations: Sequence[Generation], body: GenerationFields, *, detailed: bool
    ) -> None:
        options = body.stream_options
        self.identity = identity
        self.generations = generations
        self.body = body
        self.with_usage = options is not None and options.include_usage
        self.running_usage = options is not None and options.continuous_usage_stats
        self.detailed = detailed
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def chunk(self, choices: list[Any]) -> AnyChunk:
        """A chunk of the endpoint's, with nothing in it but its choices."""

    @abstractmethod
    def text_choice(self, index: int, text: str) -> AnyChoice:
        """More text of a choice."""

    @abstractmethod
    def detailed_choice(
        self, index: int, generation: Generation, text: str, deltas: Sequence[Delta]
    ) -> AnyChoice | None:
        """More of a choice, with all that the request wants to know of it; None if that is nothing."""

    @abstractmethod
    def closing_choice(self, index: int, finish_reason: str) -> AnyChoice:
        """The end of a choice."""

    def usage(self) -> UsageBody:
        """The usage so far."""
        return usage_of(self.generations)

    def opening(self, index: int) -> bytes:
        """What a choice begins with, whatever comes; empty if the endpoint has nothing of the kind."""
        return b""

    def content(self, place: int, index: int, deltas: Sequence[Delta]) -> bytes:
        """A chunk with what has come of a choice; empty if that is nothing.

        Args:
            place: of the generation.
            index: of the choice in the answer.
        """
        # a delta may hold no text: half a character, or what may become a stop string
        text = deltas[0].text if len(deltas) == 1 else "".join(delta.text for delta in deltas)
        if self.detailed:
            choice = self.detailed_choice(index, self.generations[place], text, deltas)
            return b"" if choice is None else self.event(self.chunk([choice]))
        return self.text(index, text) if text else b""

    def text(self, index: int, text: str) -> bytes:
        """A chunk with more text of a choice."""
        if self.running_usage:
            return self.event(self.chunk([self.text_choice(index, text)]))
        template = self._templates.get(index)
        if template is None:
            full = self.event(self.chunk([self.text_choice(index, _MARK)]))
            before, _, after = full.rpartition(orjson.dumps(_MARK))
            template = self._templates[index] = (before, after)
        return template[0] + orjson.dumps(text) + template[1]

    def closing(self, index: int, finish_reason: str, *, is_last: bool) -> bytes:
        """The last chunk of a choice.

        Args:
            is_last: no other choice is left.
        """
        chunk = self.chunk([self.closing_choice(index, finish_reason)])
        if is_last and self.body.return_timings:
            chunk = attrs.evolve(chunk, timings=timings_of(self.generations))
        return self.event(chunk)

    def end(self) -> bytes:
        """What ends the stream: the chunk with the usage of the whole request, if asked for, and [DONE]."""
        if not self.with_usage:
            return DONE
        return event(attrs.evolve(self.chunk([]), usage=self.usage())) + DONE

    def failure(self, error: TrioLLMError) -> bytes:
        """What ends a stream that fails: the envelope that a status would have come with, and [DONE]."""
        return b"data: " + body_of(error) + b"\n\n" + DONE

    def event(self, chunk: AnyChunk) -> bytes:
        """A chunk as an event, with as much of usage as was asked for."""
        if self.running_usage:
            return event(attrs.evolve(chunk, usage=self.usage()))
        if self.with_usage:
            return event(chunk)
        plain = to_plain(chunk)
        del plain["usage"]
        return event(plain)
