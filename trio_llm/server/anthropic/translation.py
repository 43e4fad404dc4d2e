"""A request for a message as the chat completion that it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import orjson

from trio_llm.errors import InvalidRequest, UnsupportedParameter
from trio_llm.server.anthropic import fields, wire
from trio_llm.server.openai.parsing import screen
from trio_llm.server.openai.structuring import structure
from trio_llm.server.openai.wire import (
    ChatCompletionRequest,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    JsonSchema,
    Message,
    ResponseFormat,
    Tool,
    ToolCall,
)

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""What clients call the fields of a chat completion, where that differs."""

_TYPES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The blocks that a message may have, by its role."""


def parse_messages(document: dict[str, Any], *, lenient: bool) -> wire.MessagesRequest:
    """A request for a message.

    Raises:
        InvalidRequest: a field has the wrong type, is missing or unknown; `field` names it.
        UnsupportedParameter: a field asks for what is not supported.
    """
    return structure(screen(document, fields.MESSAGES, lenient=lenient), wire.MessagesRequest)


def parse_count_tokens(document: dict[str, Any], *, lenient: bool) -> wire.CountTokensRequest:
    """A request to count what a message would have to read.

    Raises:
        InvalidRequest: a field has the wrong type, is missing or unknown; `field` names it.
        UnsupportedParameter: a field asks for what is not supported.
    """
    return structure(screen(document, fields.COUNT_TOKENS, lenient=lenient), wire.CountTokensRequest)


def chat_request(body: wire.CountTokensRequest) -> ChatCompletionRequest:
    """The chat completion that a request asks for.

    Raises:
        InvalidRequest: a message lacks something.
        UnsupportedParameter: a part of a message is not supported.
    """
    if not body.messages:
        raise InvalidRequest("messages must have at least one entry", field="messages")
    messages = [*_system(body.system), *_messages(body.messages)]
    if messages[-1].tool_calls:
        raise InvalidRequest("messages must not end with a tool_use, whose tool_result is to follow", field="messages")
    choice = wire.MessagesToolChoice(type="auto") if body.tool_choice is None else body.tool_choice
    request = ChatCompletionRequest(
        model=body.model,
        messages=messages,
        continue_final_message=messages[-1].role == "assistant",
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        chat_template_kwargs=_switches(body.thinking),
    )
    config = body.output_config
    if config is not None:
        request = attrs.evolve(
            request,
            reasoning_effort=config.effort,
            response_format=None if config.format is None else _response_format(config.format),
        )
    if isinstance(body, wire.MessagesRequest):
        request = attrs.evolve(
            request,
            max_tokens=body.max_tokens,
            stop=body.stop_sequences,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stream=body.stream,
        )
    return request


def _switches(thinking: wire.Thinking | None) -> dict[str, Any] | None:
    return None if thinking is None else {"enable_thinking": thinking.type != "disabled"}


def _response_format(wanted: wire.OutputFormat) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name="output", schema=wanted.schema))


def _tool(tool: wire.ClientTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _tool_choice(choice: wire.MessagesToolChoice) -> str | dict[str, Any]:
    match choice.type:
        case "tool":
            if choice.name is None:
                raise _missing("tool_choice.name")
            return {"type": "function", "function": {"name": choice.name}}
        case "any":
            return "required"
        case _:
            return choice.type


def _system(system: str | list[wire.SystemBlock] | None) -> list[Message]:
    if not system:
        return []
    if isinstance(system, str):
        return [Message(role="system", content=system)]
    return [Message(role="system", content=[ContentPart(type="text", text=block.text) for block in system])]


@attrs.frozen
class _Block:
    """A block and where it stands."""

    role: Any
    path: str
    block: wire.InputBlock


def _blocks(turns: Iterable[wire.InputTurn]) -> Iterator[_Block]:
    for place, turn in enumerate(turns):
        path = f"messages[{place}].content"
        if isinstance(turn.content, str):
            yield _Block(turn.role, path, wire.InputBlock(type="text", text=turn.content))
            continue
        if not turn.content:
            raise InvalidRequest(f"{path} must have at least one block", field=path)
        for number, block in enumerate(turn.content):
            here = _Block(turn.role, f"{path}[{number}]", block)
            if not any(block.type in types for types in _TYPES.values()):
                text = f"content blocks of type {block.type} are not supported"
                raise UnsupportedParameter(text, field=f"{here.path}.type")
            if block.type not in _TYPES[turn.role]:
                text = (
                    f"{here.path}.type must be one of {', '.join(_TYPES[turn.role])} in a message of role {turn.role}"
                )
                raise InvalidRequest(f"{text}, got {block.type}", field=f"{here.path}.type")
            yield here


def _messages(turns: list[wire.InputTurn]) -> Iterator[Message]:
    """The messages of a conversation: neighbours of one role are one turn, and what tools gave stands alone."""
    for role, group in itertools.groupby(_blocks(turns), lambda each: each.role):
        if role == "assistant":
            yield _of_assistant(list(group))
            continue
        for is_result, part in itertools.groupby(group, lambda each: each.block.type == "tool_result"):
            if is_result:
                yield from map(_of_tool, part)
            else:
                yield Message(role=role, content=_texts(part))


def _of_assistant(blocks: list[_Block]) -> Message:
    texts = [each for each in blocks if each.block.type == "text"]
    # what is redacted says nothing to a model here
    thoughts = [_given(each, "thinking") for each in blocks if each.block.type == "thinking"]
    calls = [_call(each) for each in blocks if each.block.type == "tool_use"]
    return Message(
        role="assistant",
        content=_texts(texts) if texts else None if calls else "",
        reasoning_content="\n".join(thoughts) if thoughts else None,
        tool_calls=calls or None,
    )


def _call(each: _Block) -> ToolCall:
    arguments = orjson.dumps(_given(each, "input")).decode()
    return ToolCall(id=_given(each, "id"), function=FunctionCall(name=_given(each, "name"), arguments=arguments))


def _of_tool(each: _Block) -> Message:
    content = each.block.content
    parts = content if isinstance(content, list) else [wire.ResultBlock(type="text", text=content or "")]
    texts = []
    for number, part in enumerate(parts):
        path = f"{each.path}.content[{number}]"
        if part.type != "text":
            text = f"content blocks of type {part.type} are not supported in a tool_result"
            raise UnsupportedParameter(text, field=f"{path}.type")
        if part.text is None:
            raise _missing(f"{path}.text")
        texts.append(part.text)
    said = "\n".join(texts)
    # templates have no word for failures
    return Message(
        role="tool",
        tool_call_id=_given(each, "tool_use_id"),
        content=f"Error: {said}" if each.block.is_error else said,
    )


def _texts(blocks: Iterable[_Block]) -> str | list[ContentPart]:
    texts = [_given(each, "text") for each in blocks]
    return texts[0] if len(texts) == 1 else [ContentPart(type="text", text=text) for text in texts]


def _given(each: _Block, name: str) -> Any:
    value = getattr(each.block, name)
    if value is None:
        raise _missing(f"{each.path}.{name}")
    return value


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(f"{path} is missing", field=path, code="missing_required_parameter")
