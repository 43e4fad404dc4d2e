"""A request for a response, as the chat completion that it asks for."""

from __future__ import annotations

from typing import Any

import orjson

from trio_llm.errors import InvalidRequest, UnsupportedParameter
from trio_llm.server.openai import wire as chat
from trio_llm.server.openai.limits import MAX_ENTRIES, wrong_type
from trio_llm.server.openai.parsing import log_ignored, screen_object
from trio_llm.server.openai.responses import fields, wire
from trio_llm.server.openai.structuring import structure

LOGPROBS = "message.output_text.logprobs"

NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.name": "text.format.name",
    "response_format.json_schema.schema": "text.format.schema",
}
"""What fields of a chat completion are called here, besides those of tools."""

_KINDS: dict[str, type[wire.InputItem]] = {
    "message": wire.InputMessage,
    "function_call": wire.InputFunctionCall,
    "function_call_output": wire.InputFunctionCallOutput,
    "reasoning": wire.InputReasoning,
}


def parse(document: dict[str, Any], *, lenient: bool) -> tuple[wire.ResponseRequest, list[chat.Message]]:
    """A request, and its input as messages.

    Raises:
        InvalidRequest: a field has the wrong type, is missing or unknown; `field` names it.
        UnsupportedParameter: a field asks for what is not supported.
    """
    ignored: list[str] | None = [] if lenient else None
    body = structure(screen_object(document, fields.RESPONSE, "", ignored), wire.ResponseRequest)
    messages = _messages(body.input, ignored)
    log_ignored(ignored)
    for place, name in enumerate(body.include):
        if name != LOGPROBS:
            raise UnsupportedParameter(f"include[{place}] is not supported here", field=f"include[{place}]")
    return body, messages


def chat_request(body: wire.ResponseRequest, history: list[chat.Message]) -> chat.ChatCompletionRequest:
    """What is asked of the model.

    Args:
        history: all messages but the instructions.
    """
    instructions = [] if body.instructions is None else [chat.Message(role="system", content=body.instructions)]
    wants_logprobs = LOGPROBS in body.include or bool(body.top_logprobs)
    return chat.ChatCompletionRequest(
        model=body.model,
        messages=[*instructions, *history],
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        response_format=_response_format(body.text),
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        truncation=body.truncation,
        priority=body.priority,
        cache_salt=body.cache_salt,
        chat_template_kwargs=body.chat_template_kwargs,
        stream=body.stream,
    )


def _messages(given: str | list[dict[str, Any]], ignored: list[str] | None) -> list[chat.Message]:
    if isinstance(given, str):
        return [chat.Message(role="user", content=given)]
    if not 1 <= len(given) <= MAX_ENTRIES:
        raise InvalidRequest(f"input takes from 1 to {MAX_ENTRIES} items, got {len(given)}", field="input")
    items = [_item(item, f"input[{place}]", ignored) for place, item in enumerate(given)]
    messages: list[chat.Message] = []
    reasoning: str | None = None
    for place, item in enumerate(items):
        match item:
            case wire.InputReasoning():
                reasoning = "".join(part.text for part in item.content or ())
            case wire.InputFunctionCall():
                _check_arguments(item.arguments, f"input[{place}].arguments")
                call = chat.ToolCall(
                    id=item.call_id, function=chat.FunctionCall(name=item.name, arguments=item.arguments)
                )
                before = messages[-1] if messages else None
                if before is not None and before.role == "assistant" and reasoning is None:
                    # what one answer said and called is one message of a chat
                    messages[-1] = _evolved(before, call)
                else:
                    messages.append(chat.Message(role="assistant", tool_calls=[call], reasoning_content=reasoning))
                reasoning = None
            case wire.InputFunctionCallOutput():
                output = _content(item.output, f"input[{place}].output")
                messages.append(chat.Message(role="tool", tool_call_id=item.call_id, content=output))
            case wire.InputMessage():
                is_answer = item.role == "assistant"
                messages.append(
                    chat.Message(
                        role=item.role,
                        content=_content(item.content, f"input[{place}].content"),
                        reasoning_content=reasoning if is_answer else None,
                    )
                )
                reasoning = None if is_answer else reasoning
    if not messages:
        raise InvalidRequest("input has nothing but reasoning", field="input")
    return messages


def _evolved(message: chat.Message, call: chat.ToolCall) -> chat.Message:
    return chat.Message(
        role="assistant",
        content=message.content,
        tool_calls=[*(message.tool_calls or ()), call],
        reasoning_content=message.reasoning_content,
    )


def _item(item: Any, path: str, ignored: list[str] | None) -> wire.InputItem:
    if not isinstance(item, dict):
        raise wrong_type(path, "an object", item)
    kind = item.get("type") or "message"
    if not isinstance(kind, str):
        raise wrong_type(f"{path}.type", "a string", kind)
    if kind not in _KINDS:
        raise UnsupportedParameter(f"input items of type {kind[:60]} are not supported", field=f"{path}.type")
    kept = screen_object(item, fields.ITEMS[kind], f"{path}.", ignored)
    return structure(kept, _KINDS[kind], path)


def _content(content: str | list[wire.InputPart], path: str) -> str | list[chat.ContentPart]:
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"{path} must have at least one part", field=path)
    return [_part(part, f"{path}[{place}]") for place, part in enumerate(content)]


def _part(part: wire.InputPart, path: str) -> chat.ContentPart:
    name, text = ("refusal", part.refusal) if part.type == "refusal" else ("text", part.text)
    if text is None:
        raise InvalidRequest(f"{path}.{name} is missing", field=f"{path}.{name}", code="missing_required_parameter")
    return chat.ContentPart(type="text", text=text)


def _check_arguments(arguments: str, path: str) -> None:
    try:
        is_object = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    if not is_object:
        raise InvalidRequest(f"{path} must be the JSON text of an object", field=path)


def _response_format(text: wire.TextOptions | None) -> chat.ResponseFormat | None:
    wanted = None if text is None else text.format
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return chat.ResponseFormat(type=wanted.type)
    for name in ("name", "schema"):
        if getattr(wanted, name) is None:
            path = f"text.format.{name}"
            raise InvalidRequest(f"{path} is missing", field=path, code="missing_required_parameter")
    schema = chat.JsonSchema(name=wanted.name or "", schema=wanted.schema, strict=wanted.strict)
    return chat.ResponseFormat(type="json_schema", json_schema=schema)


def _tool(tool: wire.ResponseFunctionTool) -> chat.Tool:
    function = chat.FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return chat.Tool(type="function", function=function)


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """As chat completions have it: with what it names one level deeper."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        tools = [_tool_choice(tool) for tool in listed] if isinstance(listed, list) else listed
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice
