"""The objects of Anthropic's Messages API as they travel: requests, answers and events."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trio_llm.core.sampling_params import Number


@attrs.frozen(kw_only=True)
class SystemBlock:
    type: Literal["text"]
    text: str


ResultBlockType = Literal["text", "image", "document", "search_result", "tool_reference"]


@attrs.frozen(kw_only=True)
class ResultBlock:
    """Of what a tool gave."""

    type: ResultBlockType
    text: str | None = None


InputBlockType = Literal[
    "text",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "image",
    "document",
    "search_result",
    "server_tool_use",
    "web_search_tool_result",
    "container_upload",
]


@attrs.frozen(kw_only=True)
class InputBlock:
    """Of a message; which fields it has depends on its type."""

    type: InputBlockType
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = None
    is_error: bool = False


@attrs.frozen(kw_only=True)
class InputTurn:
    """An entry of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


@attrs.frozen(kw_only=True)
class ClientTool:
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    strict: bool | None = None


@attrs.frozen(kw_only=True)
class MessagesToolChoice:
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


@attrs.frozen(kw_only=True)
class Thinking:
    type: Literal["enabled", "adaptive", "disabled"]


@attrs.frozen(kw_only=True)
class OutputFormat:
    type: Literal["json_schema"]
    schema: dict[str, Any]


@attrs.frozen(kw_only=True)
class OutputConfig:
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


@attrs.frozen(kw_only=True)
class CountTokensRequest:
    """What a model is given to read."""

    model: str
    messages: list[InputTurn]
    system: str | list[SystemBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


@attrs.frozen(kw_only=True)
class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stop_sequences: list[str] = attrs.field(factory=list)
    temperature: float | None = attrs.field(default=None, validator=Number(0, 1))
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False


@attrs.frozen(kw_only=True)
class TextBlock:
    type: Literal["text"] = "text"
    text: str
    citations: None = None


@attrs.frozen(kw_only=True)
class ThinkingBlock:
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""
    """Empty: whoever has the thinking may change it."""


@attrs.frozen(kw_only=True)
class DirectCaller:
    """The model itself."""

    type: Literal["direct"] = "direct"


@attrs.frozen(kw_only=True)
class ToolUseBlock:
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller = DirectCaller()


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


@attrs.frozen(kw_only=True)
class ThinkingTokens:
    thinking_tokens: int


@attrs.frozen(kw_only=True)
class RunningUsage:
    """What an answer has used by now."""

    input_tokens: int
    """Of the prompt: those that were not found in the prefix cache."""
    cache_creation_input_tokens: int = 0
    """Nothing is cached on demand: all prefixes are, and it costs nothing."""
    cache_read_input_tokens: int
    """Of the prompt: those that were found there."""
    output_tokens: int
    output_tokens_details: ThinkingTokens
    server_tool_use: None = None


@attrs.frozen(kw_only=True)
class MessagesUsage(RunningUsage):
    cache_creation: None = None
    inference_geo: None = None
    service_tier: Literal["standard"] = "standard"


@attrs.frozen(kw_only=True)
class MessageAnswer:
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    """`end_turn`, `max_tokens`, `stop_sequence`, `tool_use`, or `abort`."""
    stop_sequence: str | None
    stop_details: None = None
    """Of a refusal, which no model here makes known."""
    container: None = None
    usage: MessagesUsage


@attrs.frozen(kw_only=True)
class TokenCount:
    input_tokens: int


@attrs.frozen(kw_only=True)
class MessageStart:
    type: Literal["message_start"] = "message_start"
    message: MessageAnswer


@attrs.frozen(kw_only=True)
class Ping:
    type: Literal["ping"] = "ping"


@attrs.frozen(kw_only=True)
class ContentBlockStart:
    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: AnswerBlock


@attrs.frozen(kw_only=True)
class TextDelta:
    type: Literal["text_delta"] = "text_delta"
    text: str


@attrs.frozen(kw_only=True)
class ThinkingDelta:
    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


@attrs.frozen(kw_only=True)
class SignatureDelta:
    type: Literal["signature_delta"] = "signature_delta"
    signature: str = ""


@attrs.frozen(kw_only=True)
class InputJsonDelta:
    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


@attrs.frozen(kw_only=True)
class ContentBlockDelta:
    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: BlockDelta


@attrs.frozen(kw_only=True)
class ContentBlockStop:
    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


@attrs.frozen(kw_only=True)
class StopDelta:
    stop_reason: str
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


@attrs.frozen(kw_only=True)
class MessageDelta:
    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: RunningUsage


@attrs.frozen(kw_only=True)
class MessageStop:
    type: Literal["message_stop"] = "message_stop"


@attrs.frozen(kw_only=True)
class MessagesError:
    type: str
    message: str


@attrs.frozen(kw_only=True)
class MessagesErrorBody:
    """Of every failure, and of an event of a stream that fails."""

    type: Literal["error"] = "error"
    error: MessagesError
    request_id: str


Event = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | MessagesErrorBody
)
