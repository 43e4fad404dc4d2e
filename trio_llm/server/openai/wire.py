"""The objects of the chat and completion endpoints as they travel: requests, answers and chunks."""

from __future__ import annotations

from typing import Any, Literal

import attrs

MAX_ENTRIES = 4096
"""Of any array in a request, but a prompt's token ids."""

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


@attrs.frozen(kw_only=True)
class ContentPart:
    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: str | None = None


@attrs.frozen(kw_only=True)
class Message:
    role: Role
    content: str | list[ContentPart]
    name: str | None = None


@attrs.frozen(kw_only=True)
class StreamOptions:
    include_usage: bool = False


@attrs.frozen(kw_only=True)
class GenerationFields:
    """What both endpoints take."""

    model: str
    n: int = 1
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = attrs.field(factory=list)
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None


@attrs.frozen(kw_only=True)
class ChatCompletionRequest(GenerationFields):
    messages: list[Message]
    max_completion_tokens: int | None = None


@attrs.frozen(kw_only=True)
class CompletionRequest(GenerationFields):
    prompt: str | list[int] | list[str] | list[list[int]]


@attrs.frozen(kw_only=True)
class PromptTokensDetails:
    cached_tokens: int = 0


@attrs.frozen(kw_only=True)
class UsageBody:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = attrs.field(factory=PromptTokensDetails)


@attrs.frozen(kw_only=True)
class AnswerMessage:
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


@attrs.frozen(kw_only=True)
class ChatChoice:
    index: int
    message: AnswerMessage
    logprobs: None = None
    finish_reason: str | None


@attrs.frozen(kw_only=True)
class ChatCompletion:
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


@attrs.frozen(kw_only=True)
class TextChoice:
    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None


@attrs.frozen(kw_only=True)
class TextCompletion:
    """Streamed or whole: the shape is the same."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody | None = None


@attrs.frozen(kw_only=True)
class ChunkDelta:
    """None is left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None


@attrs.frozen(kw_only=True)
class ChunkChoice:
    index: int
    delta: ChunkDelta
    logprobs: None = None
    finish_reason: str | None = None


@attrs.frozen(kw_only=True)
class ChatCompletionChunk:
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | None = None


@attrs.frozen(kw_only=True)
class ModelCard:
    id: str
    object: Literal["model"] = "model"
    created: int
    max_model_len: int
    owned_by: str = "trio_llm"


@attrs.frozen(kw_only=True)
class ModelList:
    object: Literal["list"] = "list"
    data: list[ModelCard]


@attrs.frozen(kw_only=True)
class ErrorObject:
    message: str
    type: str
    param: str | None
    code: str | None


@attrs.frozen(kw_only=True)
class ErrorBody:
    """Of every failure, and of an event of a stream that fails."""

    error: ErrorObject


def to_wire(value: Any) -> Any:
    """An answer object as plain data."""
    return attrs.asdict(value)
