"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, over the same turns as chat completions."""

from __future__ import annotations

from quart import Blueprint, Response, request

from trio_llm.server.anthropic import wire
from trio_llm.server.anthropic.answers import MessageEvents, message
from trio_llm.server.anthropic.translation import NAMES, chat_request, parse_count_tokens, parse_messages
from trio_llm.server.http import this_app, this_exchange
from trio_llm.server.openai.field_names import names_of_tools
from trio_llm.server.openai.generate import answer, answer_stream
from trio_llm.server.openai.parsing import read_json
from trio_llm.server.openai.turn import begin_turn, count_prompt_tokens
from trio_llm.server.openapi import Operation

blueprint = Blueprint("messages", __name__)

_EXAMPLE = {"messages": [{"role": "user", "content": "Name three rivers."}]}


@blueprint.post("/v1/messages")
@Operation(
    request=wire.MessagesRequest,
    answer=wire.MessageAnswer,
    event=wire.Event,
    is_named=True,
    failure=wire.MessagesErrorBody,
    example={**_EXAMPLE, "max_tokens": 60, "stream": True},
)
async def messages() -> Response:
    """Continue a conversation as Anthropic's API does, whole or as a stream."""
    app, exchange = this_app(), this_exchange()
    body = parse_messages(await read_json(request), lenient=app.settings.compat == "lenient")
    turn = await begin_turn(app, exchange, chat_request(body), prefix="msg_", names=_names(body))
    if body.stream:
        return await answer_stream(app, exchange, MessageEvents(turn, request_id=exchange.echoed_id))
    await turn.finish(exchange)
    return await answer(lambda: message(turn), is_large=False)


@blueprint.post("/v1/messages/count_tokens")
@Operation(request=wire.CountTokensRequest, answer=wire.TokenCount, failure=wire.MessagesErrorBody, example=_EXAMPLE)
async def count_tokens() -> Response:
    """Count the tokens that a message's prompt has; nothing is generated."""
    app = this_app()
    body = parse_count_tokens(await read_json(request), lenient=app.settings.compat == "lenient")
    count = await count_prompt_tokens(app, chat_request(body), names=_names(body))
    return await answer(lambda: wire.TokenCount(input_tokens=count), is_large=False)


def _names(body: wire.CountTokensRequest) -> dict[str, str]:
    """What clients call the fields of the chat completion that this is."""
    return NAMES | names_of_tools(len(body.tools or ()))
