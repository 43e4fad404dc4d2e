"""The objects of the Responses API as they travel."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trio_llm.server.openai.wire import ABSENT, ReasoningEffort, TokenLogprobWithTop

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


@attrs.frozen(kw_only=True)
class InputPart:
    type: Literal["input_text", "output_text", "refusal", "text"]
    text: str | None = None
    refusal: str | None = None


@attrs.frozen(kw_only=True)
class InputMessage:
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]


@attrs.frozen(kw_only=True)
class InputFunctionCall:
    call_id: str
    name: str
    arguments: str


@attrs.frozen(kw_only=True)
class InputFunctionCallOutput:
    call_id: str
    output: str | list[InputPart]


@attrs.frozen(kw_only=True)
class InputReasoning:
    """Reasoning of an answer that comes back with the history."""

    content: list[InputReasoningPart] | None = None


@attrs.frozen(kw_only=True)
class InputReasoningPart:
    text: str


InputItem = InputMessage | InputFunctionCall | InputFunctionCallOutput | InputReasoning


@attrs.frozen(kw_only=True)
class ResponseFunctionTool:
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@attrs.frozen(kw_only=True)
class ReasoningOptions:
    effort: ReasoningEffort | None = None


@attrs.frozen(kw_only=True)
class TextFormat:
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


@attrs.frozen(kw_only=True)
class TextOptions:
    format: TextFormat | None = None


@attrs.frozen(kw_only=True)
class ResponseRequest:
    model: str
    input: str | list[dict[str, Any]]
    """A text, or items, each of a type."""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] = attrs.field(factory=list)
    text: TextOptions | None = None
    tools: list[ResponseFunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    priority: int = 0
    cache_salt: str = ""
    chat_template_kwargs: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None


@attrs.frozen(kw_only=True)
class OutputText:
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]] = attrs.field(factory=list)
    logprobs: list[TokenLogprobWithTop] = attrs.field(factory=list)


@attrs.frozen(kw_only=True)
class OutputMessage:
    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


@attrs.frozen(kw_only=True)
class OutputFunctionCall:
    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


@attrs.frozen(kw_only=True)
class ReasoningText:
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


@attrs.frozen(kw_only=True)
class OutputReasoning:
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[dict[str, Any]] = attrs.field(factory=list)
    content: list[ReasoningText]


OutputItem = OutputMessage | OutputFunctionCall | OutputReasoning


@attrs.frozen(kw_only=True)
class InputTokensDetails:
    cached_tokens: int
    cache_write_tokens: int = 0


@attrs.frozen(kw_only=True)
class OutputTokensDetails:
    reasoning_tokens: int


@attrs.frozen(kw_only=True)
class ResponseUsage:
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@attrs.frozen(kw_only=True)
class IncompleteDetails:
    reason: Literal["max_output_tokens"] = "max_output_tokens"


@attrs.frozen(kw_only=True)
class ResponseFailure:
    code: str
    message: str


@attrs.frozen(kw_only=True)
class Response:
    """Of a request: what it asked for, and what came of it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Status
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float = 0
    frequency_penalty: float = 0
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    truncated: dict[str, Any] | None = attrs.field(default=None, metadata=ABSENT)
    """Ours: what the prompt was cut by."""


@attrs.frozen(kw_only=True)
class ResponseEvent:
    """One event of the stream: its type, its number and what belongs to the type."""

    type: str
    sequence_number: int


@attrs.frozen(kw_only=True)
class DeletedResponse:
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


@attrs.frozen(kw_only=True)
class InputItemList:
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
