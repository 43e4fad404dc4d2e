"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from quart import Blueprint, Response, request

from trio_llm.config import ServerSettings
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.engine.generation import Choice, Delta, Generation
from trio_llm.errors import InvalidRequest
from trio_llm.server.http import this_app, this_exchange
from trio_llm.server.openai.chunks import Chunks, Identity, timings_of, usage_of
from trio_llm.server.openai.field_names import fields_called
from trio_llm.server.openai.generate import (
    answer,
    answer_stream,
    check_prompt_logprobs,
    finish,
    sampling_params,
    start,
)
from trio_llm.server.openai.logprobs import chat_logprobs, of_text, prompt_logprobs
from trio_llm.server.openai.messages import conversation
from trio_llm.server.openai.parsing import parse_chat, read_json
from trio_llm.server.openai.structured import structured_output
from trio_llm.server.openai.wire import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    ChunkDelta,
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
    params, names = _params(body, app.settings)
    with fields_called(names):
        identity = await start(exchange, engine, [conversation(body)], params, body, prefix="chatcmpl-")
    if body.stream:
        detailed = body.logprobs or body.return_token_ids
        chunks = ChatChunks(identity, exchange.generations, body, detailed=detailed)
        return await answer_stream(exchange, chunks, app.settings)
    (generation,) = await finish(exchange)
    return answer(_completion(identity, generation, body))


def _params(body: ChatCompletionRequest, settings: ServerSettings) -> tuple[SamplingParams, dict[str, str]]:
    """The engine's parameters, and what the client calls them where that differs."""
    check_prompt_logprobs(body)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if limit == 0:
        raise InvalidRequest(f"{limit_name} must be at least 1", field=limit_name)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", field="top_logprobs")
    structured, structured_name = structured_output(body)
    names = {
        "prompt": "messages",
        "max_tokens": limit_name,
        "logprobs": "top_logprobs",
        "structured_output": structured_name,
    }
    with fields_called(names):
        params = sampling_params(
            body,
            settings,
            max_tokens=limit,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            structured_output=structured,
        )
    return params, names


def _completion(identity: Identity, generation: Generation, body: ChatCompletionRequest) -> ChatCompletion:
    choices = [
        ChatChoice(
            index=choice.index,
            message=AnswerMessage(content=choice.text),
            logprobs=_logprobs([choice], generation, body),
            finish_reason=str(choice.finish_reason),
            token_ids=choice.token_ids if body.return_token_ids else None,
        )
        for choice in generation.choices
    ]
    scored = generation.prompt_logprobs
    return ChatCompletion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        choices=choices,
        usage=usage_of([generation]),
        prompt_token_ids=generation.prompt_token_ids if body.return_token_ids else None,
        prompt_logprobs=None if scored is None else prompt_logprobs(scored, generation.token_bytes),
        timings=timings_of([generation]) if body.return_timings else None,
    )


def _logprobs(
    parts: Sequence[Choice] | Sequence[Delta], generation: Generation, body: ChatCompletionRequest
) -> ChatLogprobs | None:
    if not body.logprobs:
        return None
    return chat_logprobs((entry for part in parts for entry in of_text(part)), generation.token_bytes)


class ChatChunks(Chunks):
    """chat.completion.chunk."""

    body: ChatCompletionRequest

    def chunk(self, choices: list[Any]) -> ChatCompletionChunk:
        identity = self.identity
        return ChatCompletionChunk(id=identity.id, created=identity.created, model=identity.model, choices=choices)

    def opening(self, index: int) -> bytes:
        # the role comes once and in the order of the choices: clients join it, and index by it
        chunk = self.chunk([ChunkChoice(index=index, delta=ChunkDelta(role="assistant", content=""))])
        if index == 0 and self.body.return_token_ids:
            chunk = attrs.evolve(chunk, prompt_token_ids=self.generations[0].prompt_token_ids)
        return self.event(chunk)

    def text_choice(self, index: int, text: str) -> ChunkChoice:
        return ChunkChoice(index=index, delta=ChunkDelta(content=text))

    def detailed_choice(
        self, index: int, generation: Generation, text: str, deltas: Sequence[Delta]
    ) -> ChunkChoice | None:
        logprobs = _logprobs(deltas, generation, self.body)
        token_ids = [token for delta in deltas for token in delta.token_ids] if self.body.return_token_ids else None
        if not (text or token_ids or (logprobs is not None and logprobs.content)):
            return None
        return ChunkChoice(index=index, delta=ChunkDelta(content=text), logprobs=logprobs, token_ids=token_ids)

    def closing_choice(self, index: int, finish_reason: str) -> ChunkChoice:
        return ChunkChoice(index=index, delta=ChunkDelta(), finish_reason=finish_reason)
