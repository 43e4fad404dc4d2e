"""POST /v1/chat/completions."""

from __future__ import annotations

from quart import Blueprint, Response, request

from trio_llm.server.http import this_app, this_exchange
from trio_llm.server.openai.chat_answers import ChatChunks, completion
from trio_llm.server.openai.generate import answer, answer_stream
from trio_llm.server.openai.parsing import parse_chat, read_json
from trio_llm.server.openai.turn import begin_turn
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
    turn = await begin_turn(app, exchange, body, prefix="chatcmpl-")
    if body.stream:
        chunks = ChatChunks(turn.identity, turn.generation, body, turn.speeches)
        return await answer_stream(app, exchange, chunks)
    await turn.finish(exchange)
    return await answer(
        lambda: completion(turn.identity, turn.generation, body, turn.speeches),
        is_large=body.logprobs or body.prompt_logprobs is not None,
    )
