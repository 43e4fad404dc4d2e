"""create_app(): the Quart-Trio application, the same under `trio-llm serve` and `hypercorn -k trio`."""

from __future__ import annotations

import structlog
from quart import Response, request
from werkzeug.exceptions import HTTPException

from trio_llm.config import ServerSettings, resolve
from trio_llm.engine.registry import Registry
from trio_llm.errors import TrioLLMError
from trio_llm.server import logs
from trio_llm.server.access import CHALLENGES
from trio_llm.server.anthropic.messages import blueprint as messages
from trio_llm.server.dialects import dialect_of
from trio_llm.server.docs import blueprint as docs
from trio_llm.server.http import App, this_app, this_exchange
from trio_llm.server.openai.chat import blueprint as chat
from trio_llm.server.openai.completions import blueprint as completions
from trio_llm.server.openai.embeddings import blueprint as embeddings
from trio_llm.server.openai.error_bodies import Failure, failure_of, http_failure, phrase_of
from trio_llm.server.openai.models import blueprint as models
from trio_llm.server.openai.responses.endpoints import blueprint as responses
from trio_llm.server.openai.tokenizer import blueprint as tokenizer
from trio_llm.server.openapi import blueprint as openapi
from trio_llm.server.operations.aborts import blueprint as aborts
from trio_llm.server.operations.health import blueprint as health
from trio_llm.server.operations.scrape import blueprint as scrape
from trio_llm.server.operations.version import blueprint as version

logger = structlog.get_logger(__name__)


def create_app(settings: ServerSettings | str | None = None, *, registry: Registry | None = None) -> App:
    """Make the application: `trio_llm.create_app`, where it is documented, calls this."""
    if not isinstance(settings, ServerSettings):
        settings = resolve(config=settings)
    app = App(settings, Registry() if registry is None else registry)
    inference = (chat, completions, messages, responses, embeddings, models, tokenizer)
    for blueprint in (*inference, aborts, health, scrape, version, openapi, docs):
        app.register_blueprint(blueprint)
    app.before_request(_let_in)
    app.register_error_handler(TrioLLMError, _trio_llm_error)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _unexpected_error)
    if registry is None:
        _own_engine(app)
    return app


def _own_engine(app: App) -> None:
    """Open an engine when serving begins.

    It lives in a task of the application's nursery that never raises, since quart-trio would swallow
    what it raised; and not in `while_serving`, across whose yield a nursery would misnest.
    """

    @app.before_serving
    async def open_engine() -> None:
        logs.configure(app.settings)
        app.nursery.start_soon(app.lifecycle.run_engine, app.open_engine, app.settings.served_model_name)
        await app.lifecycle.opened.wait()
        if app.lifecycle.failure is not None:
            raise app.lifecycle.failure

    @app.after_serving
    async def close_engine() -> None:
        app.lifecycle.stopping.set()
        await app.lifecycle.stopped.wait()


async def _let_in() -> Response | None:
    """What comes before every handler: the browser's preflights, the key, and whether there is a model."""
    app = this_app()
    if (preflight := app.cors.preflight_headers(request)) is not None:
        # a body of nothing, not no body: what quart makes of that works under asyncio only
        return Response(b"", status=204, headers=preflight)
    app.access.let_in(request, this_exchange())
    if not app.registry and not request.path.startswith("/health"):
        refusal = app.lifecycle.refusal()
        if refusal is not None:
            raise refusal
    return None


async def _trio_llm_error(error: TrioLLMError) -> Response:
    failure = failure_of(error)
    this_exchange().error = error
    if failure.status == 500:
        logger.warning("a request failed", kind=error.kind, reason=error.message)
    response = _failed(failure, error.message, error.field)
    if failure.retry_after is not None:
        response.headers["retry-after"] = str(failure.retry_after)
    if failure.status == 401:
        for challenge in CHALLENGES:
            response.headers.add("www-authenticate", challenge)
    return response


async def _http_error(error: HTTPException) -> Response:
    status = error.code or 500
    original = error.get_response()
    response = _failed(http_failure(status), _explain(error) or phrase_of(status))
    if "allow" in original.headers:
        response.headers["allow"] = original.headers["allow"]
    return response


def _explain(error: HTTPException) -> str | None:
    app = this_app()
    match error.code:
        case 404:
            return f"there is nothing at {request.method} {request.path}"
        case 405:
            return f"{request.path} does not take {request.method}"
        case 408:
            return f"the request body did not arrive within {app.settings.body_timeout:g} s"
        case 413:
            return f"the request body is larger than {app.settings.max_request_bytes} bytes"
        case _:
            return error.description


async def _unexpected_error(error: Exception) -> Response:
    logger.error("a request failed unexpectedly", exc_info=error)
    return _failed(http_failure(500), "the server failed; its log says why")


def _failed(failure: Failure, message: str, param: str | None = None) -> Response:
    """A failure in the envelope that clients of the request's path expect."""
    body = dialect_of(request.path).error_body(message, failure, param, this_exchange().echoed_id)
    return Response(body, failure.status, content_type="application/json")
