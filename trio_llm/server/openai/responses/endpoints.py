"""POST /v1/responses, and what can be done with a response that was made."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from quart import Blueprint, Response, request
from werkzeug.routing import BaseConverter

from trio_llm.errors import InvalidRequest
from trio_llm.server.exchange import Exchange
from trio_llm.server.http import App, this_app, this_exchange
from trio_llm.server.openai import wire as chat
from trio_llm.server.openai.field_names import names_of_tools
from trio_llm.server.openai.generate import answer, answer_stream, finish
from trio_llm.server.openai.parsing import read_json
from trio_llm.server.openai.responses import wire
from trio_llm.server.openai.responses.answers import ResponseAnswer, plain_items
from trio_llm.server.openai.responses.request import NAMES, chat_request, parse
from trio_llm.server.openai.responses.store import ResponseStore, StoredResponse
from trio_llm.server.openai.turn import Turn, begin_turn
from trio_llm.server.openai.wire import encode
from trio_llm.server.openapi import Operation

blueprint = Blueprint("responses", __name__)

PREFIX = "resp_"
MAX_PAGE = 100
"""Items of one answer."""
_PAGE = {"order": "desc", "after": "", "limit": "20"}
"""What a query for items may say, and what it says by default."""
_QUERY: dict[str, dict[str, Any]] = {
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string", "description": "The id of the item behind which the page begins."},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 20},
}


class _ResponseID(BaseConverter):
    """What else stands behind /v1/responses/ is an endpoint that is not here."""

    regex = f"{PREFIX}[^/]+"


blueprint.record(lambda state: state.app.url_map.converters.update(response=_ResponseID))

_stores: WeakKeyDictionary[App, ResponseStore] = WeakKeyDictionary()


def store_of(app: App) -> ResponseStore:
    """The responses that an application keeps."""
    return _stores.setdefault(app, ResponseStore(app.settings.max_stored_responses))


@blueprint.post("/v1/responses")
@Operation(
    request=wire.ResponseRequest,
    answer=wire.Response,
    event=wire.ResponseEvent,
    is_named=True,
    example={"input": "Name three rivers.", "max_output_tokens": 60, "stream": True},
)
async def create_response() -> Response:
    """Answer a text or a conversation, whole or as a stream."""
    app, exchange = this_app(), this_exchange()
    body, messages = parse(await read_json(request), lenient=app.settings.compat == "lenient")
    store = store_of(app)
    if body.store and not store.capacity:
        raise InvalidRequest("this server stores no response (max_stored_responses is 0)", field="store")
    before = [] if body.previous_response_id is None else _history(store, body.previous_response_id)
    history = [*before, *messages]
    chat_body = chat_request(body, history)
    turn = await begin_turn(
        app, exchange, chat_body, prefix=PREFIX, names=NAMES | names_of_tools(len(body.tools or ()))
    )
    wants_store = store.capacity > 0 and body.store is not False
    writer = _Recorder(turn, body, history, exchange, store if wants_store else None)
    in_flight = store.in_flight
    in_flight[writer.id] = writer
    exchange.at_end(lambda: in_flight.pop(writer.id, None))
    if body.stream:
        return await answer_stream(app, exchange, writer)
    (generation,) = await finish(exchange, lambda delta: writer.content(0, 0, [delta]))
    writer.closing(0, str(generation.finish_reason), is_last=True)
    writer.end()
    return await answer(writer.response, is_large=chat_body.logprobs)


class _Recorder(ResponseAnswer):
    """An answer that is kept when it has ended well, unless nobody waits for it any more.

    Args:
        history: all messages that led to it.
        exchange: in which it is made.
        store: where; None keeps nothing.
    """

    def __init__(
        self,
        turn: Turn,
        body: wire.ResponseRequest,
        history: list[chat.Message],
        exchange: Exchange,
        store: ResponseStore | None,
    ) -> None:
        super().__init__(turn, body, store=store is not None)
        self._exchange = exchange
        self._history = history
        self._kept_in = store

    def end(self) -> bytes:
        events = super().end()
        if self._kept_in is not None and not self._exchange.client_gone:
            items = plain_items(self._body.input, self.id)
            body = encode(self.response())
            self._kept_in.add(StoredResponse(self.id, body, [*self._history, *self.messages()], items))
        return events


def _history(store: ResponseStore, response_id: str) -> list[chat.Message]:
    if response_id in store.in_flight:
        text = f"the response {response_id!r} has not ended yet"
        raise InvalidRequest(text, field="previous_response_id")
    return list(store.get(response_id, field="previous_response_id").history)


@blueprint.get("/v1/responses/<response:response_id>")
@Operation(answer=wire.Response)
async def get_response(response_id: str) -> Response:
    """A response that is stored, or is being made."""
    if request.args.get("stream") == "true":
        raise InvalidRequest("a response cannot be streamed again", field="stream", code="unsupported_parameter")
    store = store_of(this_app())
    if response_id in store.in_flight:
        return _json(store.in_flight[response_id].response())
    return Response(store.get(response_id).body, content_type="application/json")


@blueprint.get("/v1/responses/<response:response_id>/input_items")
@Operation(answer=wire.InputItemList, query=_QUERY)
async def input_items(response_id: str) -> Response:
    """The input of a response that is stored: its last items first, or as `order`, `after` and `limit` say."""
    items = list(store_of(this_app()).get(response_id).input_items)
    order, after, limit = (request.args.get(name, default) for name, default in _PAGE.items())
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", field="order")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:4]) <= MAX_PAGE):
        raise InvalidRequest(f"limit must be an integer from 1 to {MAX_PAGE}", field="limit", limit=MAX_PAGE)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after and after not in ids:
        raise InvalidRequest("after names no item of this response", field="after")
    start = ids.index(after) + 1 if after else 0
    page = items[start : start + int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return _json(wire.InputItemList(data=page, first_id=first, last_id=last, has_more=start + len(page) < len(items)))


@blueprint.delete("/v1/responses/<response:response_id>")
@Operation(answer=wire.DeletedResponse)
async def delete_response(response_id: str) -> Response:
    """Forget a response."""
    store_of(this_app()).delete(response_id)
    return _json(wire.DeletedResponse(id=response_id))


@blueprint.post("/v1/responses/<response:response_id>/cancel")
@Operation(answer=wire.Response)
async def cancel_response(response_id: str) -> Response:
    """End a response that is being made; gives it as it stands.  Whoever waits for it gets what there is."""
    app = this_app()
    store = store_of(app)
    writer = store.in_flight.get(response_id)
    if writer is None:
        store.get(response_id)
        raise InvalidRequest(f"the response {response_id!r} has ended", field="response_id")
    for exchange in app.exchanges:
        if exchange.request_id == response_id.removeprefix(PREFIX):
            exchange.abandon()
    return _json(writer.response(status="cancelled"))


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
