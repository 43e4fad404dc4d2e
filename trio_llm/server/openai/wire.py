"""The objects of the chat and completion endpoints as they travel: requests, answers and chunks."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, Literal, TypedDict

import attrs
import orjson

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


@attrs.frozen(kw_only=True)
class ContentPart:
    type: Literal["text", "refusal", "image_url", "input_audio", "file"]
    text: str | None = None
    refusal: str | None = None


@attrs.frozen(kw_only=True)
class FunctionCall:
    name: str
    arguments: str = ""
    """JSON text of an object."""


@attrs.frozen(kw_only=True)
class ToolCall:
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


@attrs.frozen(kw_only=True)
class Message:
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None


@attrs.frozen(kw_only=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage_stats: bool = False


@attrs.frozen(kw_only=True)
class JsonSchema:
    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


@attrs.frozen(kw_only=True)
class ResponseFormat:
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


@attrs.frozen(kw_only=True)
class StructuredOutputs:
    """One of them."""

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


@attrs.frozen(kw_only=True)
class FunctionDefinition:
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@attrs.frozen(kw_only=True)
class Tool:
    type: Literal["function"]
    function: FunctionDefinition


TruncationPolicy = Literal["disabled", "auto", "oldest_turns", "last_tokens"]


@attrs.frozen(kw_only=True)
class GenerationFields:
    """What both endpoints take."""

    model: str
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = attrs.field(factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float = 0
    frequency_penalty: float = 0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = attrs.field(factory=list)
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    truncation: TruncationPolicy | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""
    return_token_ids: bool = False
    return_timings: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None


@attrs.frozen(kw_only=True)
class ChatCompletionRequest(GenerationFields):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True


@attrs.frozen(kw_only=True)
class CompletionRequest(GenerationFields):
    prompt: str | list[int] | list[str] | list[list[int]]
    suffix: str | None = None
    echo: bool = False
    logprobs: int | None = None


ABSENT = {"absent": True}
"""Marks a field that is left out of the JSON when it is None."""


@attrs.frozen(kw_only=True)
class PromptTokensDetails:
    cached_tokens: int = 0


@attrs.frozen(kw_only=True)
class CompletionTokensDetails:
    reasoning_tokens: int = 0


@attrs.frozen(kw_only=True)
class UsageBody:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = attrs.field(factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = attrs.field(factory=CompletionTokensDetails)


@attrs.frozen(kw_only=True)
class TruncatedBody:
    """What prompts were cut by."""

    messages: int
    tokens: int | None
    """None where the whole was too long to be counted."""


@attrs.frozen(kw_only=True)
class TimingsBody:
    """Milliseconds."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float


class TokenLogprob(TypedDict):
    """Plain data, as all that an answer may have thousands of."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobWithTop(TokenLogprob):
    top_logprobs: list[TokenLogprob]


@attrs.frozen(kw_only=True)
class ChatLogprobs:
    content: list[TokenLogprobWithTop]
    refusal: None = None


@attrs.frozen(kw_only=True)
class TextLogprobs:
    tokens: list[str] = attrs.field(factory=list)
    token_logprobs: list[float | None] = attrs.field(factory=list)
    top_logprobs: list[dict[str, float] | None] = attrs.field(factory=list)
    text_offset: list[int] = attrs.field(factory=list)


class PromptLogprob(TypedDict):
    """Of one token at one place of a prompt, in vLLM's shape."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt by token id: its own and the likeliest; nothing for the first."""


@attrs.frozen(kw_only=True)
class AnswerFunction:
    name: str
    arguments: str
    """JSON text of an object."""


@attrs.frozen(kw_only=True)
class AnswerToolCall:
    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


@attrs.frozen(kw_only=True)
class AnswerMessage:
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = attrs.field(default=None, metadata=ABSENT)
    tool_calls: list[AnswerToolCall] | None = attrs.field(default=None, metadata=ABSENT)


@attrs.frozen(kw_only=True)
class ChatChoice:
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    token_ids: list[int] | None = attrs.field(default=None, metadata=ABSENT)


@attrs.frozen(kw_only=True)
class ChatCompletion:
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | None = attrs.field(default=None, metadata=ABSENT)
    prompt_logprobs: PromptLogprobs | None = attrs.field(default=None, metadata=ABSENT)
    timings: TimingsBody | None = attrs.field(default=None, metadata=ABSENT)
    truncated: TruncatedBody | None = attrs.field(default=None, metadata=ABSENT)


@attrs.frozen(kw_only=True)
class TextChoice:
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = attrs.field(default=None, metadata=ABSENT)
    prompt_token_ids: list[int] | None = attrs.field(default=None, metadata=ABSENT)
    prompt_logprobs: PromptLogprobs | None = attrs.field(default=None, metadata=ABSENT)


@attrs.frozen(kw_only=True)
class TextCompletion:
    """Streamed or whole: the shape is the same."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody | None = None
    timings: TimingsBody | None = attrs.field(default=None, metadata=ABSENT)
    truncated: TruncatedBody | None = attrs.field(default=None, metadata=ABSENT)


@attrs.frozen(kw_only=True)
class FunctionDelta:
    name: str | None = attrs.field(default=None, metadata=ABSENT)
    arguments: str


@attrs.frozen(kw_only=True)
class ToolCallDelta:
    """Its index always; id, type and name once, in the first."""

    index: int
    id: str | None = attrs.field(default=None, metadata=ABSENT)
    type: Literal["function"] | None = attrs.field(default=None, metadata=ABSENT)
    function: FunctionDelta


@attrs.frozen(kw_only=True)
class ChunkDelta:
    role: Literal["assistant"] | None = attrs.field(default=None, metadata=ABSENT)
    content: str | None = attrs.field(default=None, metadata=ABSENT)
    reasoning_content: str | None = attrs.field(default=None, metadata=ABSENT)
    tool_calls: list[ToolCallDelta] | None = attrs.field(default=None, metadata=ABSENT)


@attrs.frozen(kw_only=True)
class ChunkChoice:
    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = attrs.field(default=None, metadata=ABSENT)


@attrs.frozen(kw_only=True)
class ChatCompletionChunk:
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageBody | None = None
    prompt_token_ids: list[int] | None = attrs.field(default=None, metadata=ABSENT)
    timings: TimingsBody | None = attrs.field(default=None, metadata=ABSENT)
    truncated: TruncatedBody | None = attrs.field(default=None, metadata=ABSENT)


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


def encode(value: Any) -> bytes:
    """A wire object as JSON."""
    return orjson.dumps(value, default=to_plain)


def to_plain(value: Any) -> dict[str, Any]:
    """The fields of a wire object itself, without those that are absent."""
    plain = {}
    for name, may_be_absent in _fields(value.__class__):
        item = getattr(value, name)
        if item is not None or not may_be_absent:
            plain[name] = item
    return plain


@functools.cache
def _fields(kind: Hashable) -> list[tuple[str, bool]]:
    return [(field.name, "absent" in field.metadata) for field in attrs.fields(kind)]  # type: ignore[arg-type]
