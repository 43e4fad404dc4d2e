"""Messages as the API has them, as the conversation that a chat template is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trio_llm.errors import InvalidRequest, UnsupportedParameter
from trio_llm.prompt.chat_template import Conversation
from trio_llm.server.openai.wire import ChatCompletionRequest, ContentPart, FunctionCall, Message


def conversation(body: ChatCompletionRequest, tools: Sequence[Mapping[str, Any]]) -> Conversation:
    """All that a chat request gives its model to read.

    Args:
        tools: what the model is told of.

    Raises:
        InvalidRequest: a message lacks something, or the fields contradict each other.
        UnsupportedParameter: a part of a message is not text.
    """
    add = body.add_generation_prompt
    return Conversation(
        [_message(message, f"messages[{place}]") for place, message in enumerate(body.messages)],
        tools,
        add_generation_prompt=not body.continue_final_message if add is None else add,
        continue_final_message=body.continue_final_message,
        reasoning_effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs or {},
    )


def _message(message: Message, path: str) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": _content(message, path)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            written[name] = value
    if message.role == "function":
        written["role"] = "tool"  # as what was called a function is called today
    elif message.role == "tool" and message.tool_call_id is None:
        raise _missing(f"{path}.tool_call_id")
    if message.role == "assistant":
        calls = _calls(message)
        if calls:
            written["tool_calls"] = calls
    return written


def _content(message: Message, path: str) -> str | list[dict[str, str]] | None:
    content = message.content
    if isinstance(content, list):
        if not content:
            raise InvalidRequest(f"{path}.content must have at least one part", field=f"{path}.content")
        return [_part(part, f"{path}.content[{place}]") for place, part in enumerate(content)]
    if content is not None:
        return content
    if message.role == "assistant":
        if message.refusal is not None:
            return message.refusal
        if message.tool_calls or message.function_call is not None:
            return None
    raise _missing(f"{path}.content")


def _part(part: ContentPart, path: str) -> dict[str, str]:
    if part.type not in ("text", "refusal"):
        raise UnsupportedParameter(f"content parts of type {part.type} are not supported", field=f"{path}.type")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise _missing(f"{path}.{part.type}")
    return {"type": "text", "text": text}


def _calls(message: Message) -> list[dict[str, Any]]:
    calls = [
        {"id": call.id, "type": call.type, "function": _function(call.function)} for call in message.tool_calls or ()
    ]
    if message.function_call is not None:
        calls.append({"type": "function", "function": _function(message.function_call)})
    return calls


def _function(call: FunctionCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(f"{path} is missing", field=path, code="missing_required_parameter")
