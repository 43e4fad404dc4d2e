"""POST /v1/chat/completions."""

from __future__ import annotations

import attrs
from quart import Blueprint, Response, request

from trio_llm.config import ServerSettings
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.errors import InvalidRequest
from trio_llm.server.http import this_app, this_exchange
from trio_llm.server.openai.chat_answers import ChatChunks, Speech, completion
from trio_llm.server.openai.field_names import fields_called
from trio_llm.server.openai.generate import (
    answer,
    answer_stream,
    check_prompt_logprobs,
    finish,
    sampling_params,
    start,
)
from trio_llm.server.openai.messages import conversation
from trio_llm.server.openai.parsing import parse_chat, read_json
from trio_llm.server.openai.structured import structured_output
from trio_llm.server.openai.tools import formats_of, reading
from trio_llm.server.openai.wire import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
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
    read = reading(body, await formats_of(engine, app.settings), is_structured=params.structured_output is not None)
    if read.grammar is not None:
        params, names = attrs.evolve(params, structured_output=read.grammar), {**names, "structured_output": "tools"}
    if not read.is_plain:
        params = attrs.evolve(params, keep_special_tokens=read.special_token_ids)
    with fields_called(names):
        prompt = conversation(body, read.tools)
        identity = await start(exchange, engine, [prompt], params, body, prefix="chatcmpl-")
    (generation,) = exchange.generations
    speeches = None if read.is_plain else [Speech(read.parser(engine, generation), read) for _ in range(params.n)]
    if body.stream:
        return await answer_stream(exchange, ChatChunks(identity, generation, body, speeches), app.settings)
    await finish(exchange, None if speeches is None else lambda delta: speeches[delta.index].push([delta]))
    return answer(completion(identity, generation, body, speeches))


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
