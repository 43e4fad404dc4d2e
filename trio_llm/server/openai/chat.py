"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quart import Blueprint, Response, request

from trio_llm.engine.generation import Generation
from trio_llm.server.http import this_app, this_exchange
from trio_llm.server.openai.chunks import Chunks, Identity, to_plain, usage_of
from trio_llm.server.openai.generate import answer, answer_stream, fields_called, finish, sampling_params, start
from trio_llm.server.openai.parsing import parse_chat, read_json
from trio_llm.server.openai.wire import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChunkChoice,
    ChunkDelta,
    Message,
    UsageBody,
)
from trio_llm.server.openapi import Operation

blueprint = Blueprint("chat", __name__)


@blueprint.post("/v1/chat/completions")
@Operation(
    request=ChatCompletionRequest,
    answer=ChatCompletion,
    event=ChatCompletionChunk,
    example={"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 60, "stream": True},
)
async def chat_completions() -> Response:
    """Continue a conversation, whole or as a stream."""
    app, exchange = this_app(), this_exchange()
    body = parse_chat(await read_json(request), lenient=app.settings.compat == "lenient")
    engine = app.engine_for(body.model)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    with fields_called(_names(body)):
        params = sampling_params(body, limit, app.settings)
        messages = [_message(message) for message in body.messages]
        identity = await start(exchange, engine, messages, params, body, prefix="chatcmpl-")
        if body.stream:
            assert exchange.generation is not None
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            chunks = ChatChunks(identity, exchange.generation, with_usage=with_usage)
            return await answer_stream(exchange, chunks, app.settings)
        return answer(_completion(identity, await finish(exchange)))


def _message(message: Message) -> Mapping[str, Any]:
    # templates know "system"; what OpenAI calls developer is that
    role = "system" if message.role == "developer" else message.role
    content = message.content
    parts = content if isinstance(content, str) else [{"type": part.type, "text": part.text} for part in content]
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": parts, **named}


def _names(body: ChatCompletionRequest) -> dict[str, str]:
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def _completion(identity: Identity, generation: Generation) -> ChatCompletion:
    choices = [
        ChatChoice(
            index=choice.index, message=AnswerMessage(content=choice.text), finish_reason=str(choice.finish_reason)
        )
        for choice in generation.choices
    ]
    return ChatCompletion(
        id=identity.id, created=identity.created, model=identity.model, choices=choices, usage=usage_of(generation)
    )


class ChatChunks(Chunks):
    """chat.completion.chunk."""

    def plain(self, choices: list[Any], usage: UsageBody | None = None) -> dict[str, Any]:
        identity = self.identity
        return to_plain(
            ChatCompletionChunk(
                id=identity.id, created=identity.created, model=identity.model, choices=choices, usage=usage
            )
        )

    def opening_choice(self, index: int) -> ChunkChoice:
        # the role comes once and in the order of the choices: clients join it, and index by it
        return ChunkChoice(index=index, delta=ChunkDelta(role="assistant", content=""))

    def text_choice(self, index: int, text: str) -> ChunkChoice:
        return ChunkChoice(index=index, delta=ChunkDelta(content=text))

    def closing_choice(self, index: int, finish_reason: str) -> ChunkChoice:
        return ChunkChoice(index=index, delta=ChunkDelta(), finish_reason=finish_reason)
