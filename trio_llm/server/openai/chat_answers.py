"""What a chat is answered with, whole or in chunks: text, reasoning, tool calls, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from trio_llm.engine.choice import Choice, Delta
from trio_llm.engine.generation import Generation
from trio_llm.prompt.events import (
    Event,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
)
from trio_llm.server.openai.chunks import Chunks, Identity, timings_of, truncated_of, usage_of
from trio_llm.server.openai.logprobs import chat_logprobs, of_text, prompt_logprobs
from trio_llm.server.openai.speech import Speech
from trio_llm.server.openai.wire import (
    AnswerFunction,
    AnswerMessage,
    AnswerToolCall,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    ChunkDelta,
    FunctionDelta,
    ToolCallDelta,
    UsageBody,
)

Speeches = Sequence[Speech] | None
"""One for each choice; None where the text is the answer as it is."""


def completion(
    identity: Identity, generation: Generation, body: ChatCompletionRequest, speeches: Speeches
) -> ChatCompletion:
    """The whole answer."""
    scored = generation.prompt_logprobs
    return ChatCompletion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        choices=[_choice(choice, generation, body, speeches) for choice in generation.choices],
        usage=_usage(generation, speeches),
        prompt_token_ids=generation.prompt_token_ids if body.return_token_ids else None,
        prompt_logprobs=None if scored is None else prompt_logprobs(scored, generation.token_bytes),
        timings=timings_of([generation]) if body.return_timings else None,
        truncated=truncated_of([generation]),
    )


def _choice(choice: Choice, generation: Generation, body: ChatCompletionRequest, speeches: Speeches) -> ChatChoice:
    speech, reason = None if speeches is None else speeches[choice.index], str(choice.finish_reason)
    return ChatChoice(
        index=choice.index,
        message=AnswerMessage(content=choice.text) if speech is None else _message(speech),
        logprobs=_logprobs([choice], generation, body),
        finish_reason=reason if speech is None else speech.finish_reason(reason),
        token_ids=choice.token_ids if body.return_token_ids else None,
    )


def _message(speech: Speech) -> AnswerMessage:
    """All that was said."""
    said = speech.said
    calls = [
        AnswerToolCall(id=speech.call_id(place), function=AnswerFunction(name=call.name, arguments=call.arguments))
        for place, call in enumerate(said.tool_calls)
    ]
    return AnswerMessage(
        content=said.content or (None if calls else ""),
        reasoning_content=said.reasoning or None,
        tool_calls=calls or None,
    )


def _delta(speech: Speech, event: Event) -> ChunkDelta:
    """One piece of it."""
    match event:
        case TextPiece(text):
            return ChunkDelta(content=text)
        case ReasoningPiece(text):
            return ChunkDelta(reasoning_content=text)
        case ToolCallStart(index, name):
            function = FunctionDelta(name=name, arguments="")
            call = ToolCallDelta(index=index, id=speech.call_id(index), type="function", function=function)
            return ChunkDelta(tool_calls=[call])
        case ToolCallArguments(index, text):
            return ChunkDelta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])


def _usage(generation: Generation, speeches: Speeches) -> UsageBody:
    return usage_of([generation], reasoning_tokens=sum(speech.reasoning_tokens for speech in speeches or ()))


def _logprobs(
    parts: Sequence[Choice] | Sequence[Delta], generation: Generation, body: ChatCompletionRequest
) -> ChatLogprobs | None:
    if not body.logprobs:
        return None
    return chat_logprobs((entry for part in parts for entry in of_text(part)), generation.token_bytes)


class ChatChunks(Chunks):
    """chat.completion.chunk."""

    body: ChatCompletionRequest

    def __init__(
        self, identity: Identity, generation: Generation, body: ChatCompletionRequest, speeches: Speeches = None
    ) -> None:
        super().__init__(identity, [generation], body, detailed=body.logprobs or body.return_token_ids)
        self._generation = generation
        self._speeches = speeches

    def chunk(self, choices: list[Any]) -> ChatCompletionChunk:
        identity = self.identity
        return ChatCompletionChunk(id=identity.id, created=identity.created, model=identity.model, choices=choices)

    def usage(self) -> UsageBody:
        return _usage(self._generation, self._speeches)

    def opening(self, index: int) -> bytes:
        # the role comes once and in the order of the choices: clients join it, and index by it
        chunk = self.chunk([ChunkChoice(index=index, delta=ChunkDelta(role="assistant", content=""))])
        if index == 0:
            token_ids = self._generation.prompt_token_ids if self.body.return_token_ids else None
            chunk = attrs.evolve(chunk, prompt_token_ids=token_ids, truncated=truncated_of(self.generations))
        return self.event(chunk)

    def content(self, place: int, index: int, deltas: Sequence[Delta]) -> bytes:
        if self._speeches is None:
            return super().content(place, index, deltas)
        speech = self._speeches[index]
        events = speech.push(deltas)
        if not self.detailed:
            return b"".join(
                self.text(index, event.text)
                if isinstance(event, TextPiece)
                else self.event(self.chunk([ChunkChoice(index=index, delta=_delta(speech, event))]))
                for event in events
            )
        # tokens are told when they come, their meaning when it is certain
        choices = [ChunkChoice(index=index, delta=_delta(speech, event)) for event in events]
        details = self._details(index, deltas)
        if details is not None:
            choices[:1] = [attrs.evolve(details, delta=choices[0].delta) if choices else details]
        return b"".join(self.event(self.chunk([choice])) for choice in choices)

    def closing(self, index: int, finish_reason: str, *, is_last: bool) -> bytes:
        if self._speeches is not None:
            finish_reason = self._speeches[index].finish_reason(finish_reason)
        return super().closing(index, finish_reason, is_last=is_last)

    def text_choice(self, index: int, text: str) -> ChunkChoice:
        return ChunkChoice(index=index, delta=ChunkDelta(content=text))

    def detailed_choice(
        self, index: int, generation: Generation, text: str, deltas: Sequence[Delta]
    ) -> ChunkChoice | None:
        details = self._details(index, deltas)
        if details is None and not text:
            return None
        return attrs.evolve(details or ChunkChoice(index=index, delta=ChunkDelta()), delta=ChunkDelta(content=text))

    def _details(self, index: int, deltas: Sequence[Delta]) -> ChunkChoice | None:
        """What is to be told beside the text; None if that is nothing."""
        logprobs = _logprobs(deltas, self._generation, self.body)
        token_ids = [token for delta in deltas for token in delta.token_ids] if self.body.return_token_ids else None
        if not token_ids and (logprobs is None or not logprobs.content):
            return None
        return ChunkChoice(index=index, delta=ChunkDelta(), logprobs=logprobs, token_ids=token_ids)

    def closing_choice(self, index: int, finish_reason: str) -> ChunkChoice:
        return ChunkChoice(index=index, delta=ChunkDelta(), finish_reason=finish_reason)
