"""The application class and its connection class: what holds for every request, whoever serves it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import structlog
import trio
from quart import current_app, request
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection

from trio_llm.config import ServerSettings
from trio_llm.engine.embedding import Embedder
from trio_llm.engine.engine import Engine
from trio_llm.engine.opening import open_model
from trio_llm.engine.registry import Registry
from trio_llm.errors import InvalidRequest
from trio_llm.server import logs
from trio_llm.server.access import access_of
from trio_llm.server.cors import CORS
from trio_llm.server.dialects import dialect_of
from trio_llm.server.exchange import Exchange
from trio_llm.server.lifecycle import Lifecycle, OpenEngine
from trio_llm.server.metrics import Metrics

logger = structlog.get_logger(__name__)

_SCOPE_KEY = "trio_llm.exchange"
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_BODY_GRACE = 1.0
"""Seconds that an early answer waits for the rest of its request."""
_NOT_TRIO = "trio_llm runs under Trio: start it with `hypercorn -k trio`"


_ENDLESS = {408, 413}
"""Statuses of requests whose rest nobody waits for."""


class _HTTPConnection(TrioASGIHTTPConnection):
    """One request: holds its Exchange open around everything that handles and answers it.

    It stands between server and framework, where only messages of ASGI pass, and minds four of them:

    * A disconnect reaches the engine first, synchronously: the handler may be stuck in a write that
      does not feel its cancellation.
    * The disconnect that follows every finished response is kept from quart-trio, which would cancel
      the nursery in which the connection is being recycled just then: no idle connection could be
      closed properly, and `Connection: close` would not be honoured.
    * An answer that comes before the whole request (a 404 needs no body) ends the connection.  It waits
      a moment for the rest, else it says so: a client that was not told would see its next request fail.
    * The last piece of a stream is told as the end, so that both are one write.
    """

    app: App

    async def __call__(self, receive: Any, send: Any) -> None:
        exchange = Exchange(self.scope["method"], self.scope["path"])
        exchange.echoed_id = _client_request_id(self.scope["headers"]) or exchange.request_id
        cast(dict[str, Any], self.scope)[_SCOPE_KEY] = exchange
        finished = False
        body_ended = trio.Event()

        async def watched_receive() -> Any:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                body_ended.set()
            if message["type"] == "http.disconnect":
                if finished:
                    await trio.sleep_forever()  # until the handler returns
                exchange.client_gone = True
                exchange.abandon()
            return message

        async def watched_send(message: Any) -> None:
            nonlocal finished
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = [
                    *message["headers"],
                    (b"x-request-id", exchange.echoed_id.encode()),
                    *dialect_of(exchange.path).headers(exchange),
                    *self.app.cors.headers(self.scope["headers"]),
                ]
                if message["status"] not in _ENDLESS:
                    with trio.move_on_after(_BODY_GRACE):
                        await body_ended.wait()
                if self.app.lifecycle.draining or not body_ended.is_set():
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            elif message["type"] == "http.response.body":
                if finished:
                    return  # the end was told with the last piece
                finished = exchange.said_all or not message.get("more_body", False)
                if finished:
                    await exchange.end()  # before its client can ask for more
                    message = {**message, "more_body": False}
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=exchange.request_id), self.app.holding(exchange):
            try:
                async with exchange:
                    await self._handle(watched_receive, watched_send)
            except Exception:
                if not exchange.client_gone:
                    raise
                logger.debug("an error after the client was gone", exc_info=True)
            finally:
                logs.access(exchange, finished=finished)

    async def _handle(self, receive: Any, send: Any) -> None:
        """As quart-trio does it, with one task less."""
        request = self._create_request_from_scope(send)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.handle_messages, nursery, request, receive)
            await self.handle_request(nursery, request, send)


def _client_request_id(headers: Any) -> str | None:
    """The client's x-request-id if it can be echoed safely.  It names nothing here: clients
    may repeat one, or take another's."""
    for name, value in headers:
        if name.lower() == b"x-request-id":
            text = value.decode("latin1")
            return text if _REQUEST_ID.fullmatch(text) else None
    return None


class App(QuartTrio):
    """The application.  Its engines are in `registry`, its state in `lifecycle`.

    Attributes:
        open_engine: opens the engine when the application has to bring its own; may be replaced
            before it is served.

    Raises:
        ConfigurationError: the file with the API keys cannot be used.
    """

    asgi_http_class = _HTTPConnection

    def __init__(self, settings: ServerSettings, registry: Registry) -> None:
        super().__init__(__name__, static_folder=None)
        self.settings = settings
        self.registry = registry
        self.lifecycle = Lifecycle(registry)
        self.metrics = Metrics(registry)
        self.access = access_of(settings)
        self.cors = CORS(settings.allowed_origins)
        self.exchanges: set[Exchange] = set()
        self.created = int(time.time())
        self.open_engine: OpenEngine = lambda: open_model(settings.model, settings=settings.engine)
        self._left = trio.lowlevel.ParkingLot()
        self.url_map.strict_slashes = False
        self.url_map.merge_slashes = False
        self.config.update(
            RESPONSE_TIMEOUT=None,  # a stream takes as long as it takes
            MAX_CONTENT_LENGTH=settings.max_request_bytes,
            BODY_TIMEOUT=settings.body_timeout,
            PROPAGATE_EXCEPTIONS=False,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not trio.lowlevel.in_trio_run():
            if scope["type"] == "lifespan":
                await receive()
                await send({"type": "lifespan.startup.failed", "message": _NOT_TRIO})
                return
            raise RuntimeError(_NOT_TRIO)
        await super().__call__(scope, receive, send)

    @contextmanager
    def holding(self, exchange: Exchange) -> Iterator[None]:
        """Count an exchange among those in flight."""
        self.exchanges.add(exchange)
        try:
            yield
        finally:
            self.exchanges.discard(exchange)
            self._left.unpark_all()

    async def all_left(self) -> None:
        """Wait until no exchange is in flight."""
        while self.exchanges:
            await self._left.park()

    def served(self, model: str | None) -> Engine | Embedder:
        """What serves a model, whatever it is for; None is the first.

        Raises:
            ModelNotFound: nothing does.
            TrioLLMError: no new request is taken now.
        """
        refusal = self.lifecycle.refusal()
        if refusal is not None:
            raise refusal
        engine = self.registry.get(next(iter(self.registry)) if model is None else model)
        self.metrics.observe(engine)
        return engine

    def engine_for(self, model: str) -> Engine:
        """The engine that generates with a model.

        Raises:
            ModelNotFound: none does.
            InvalidRequest: the model is for embeddings.
            TrioLLMError: no new request is taken now.
        """
        engine = self.served(model)
        if not isinstance(engine, Engine):
            raise _wrong_task(f"the model {model!r} makes embeddings and no text: use /v1/embeddings")
        return engine

    def embedder_for(self, model: str) -> Embedder:
        """The engine that makes embeddings with a model.

        Raises:
            ModelNotFound: none does.
            InvalidRequest: the model is not for embeddings.
            TrioLLMError: no new request is taken now.
        """
        embedder = self.served(model)
        if not isinstance(embedder, Embedder):
            raise _wrong_task(f"the model {model!r} makes text and no embeddings: serve an embedding model for them")
        return embedder


def _wrong_task(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="model", code="model_not_supported")


def this_app() -> App:
    """The application of the request that is being handled."""
    return cast(App, current_app._get_current_object())  # type: ignore[attr-defined]


def this_exchange() -> Exchange:
    """The exchange of the request that is being handled."""
    return cast(Exchange, cast(dict[str, Any], request.scope)[_SCOPE_KEY])
