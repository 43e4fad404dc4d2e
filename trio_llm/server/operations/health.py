"""GET /health/live, /health/ready and /health: is the process alive, and should it get requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs
import orjson
from quart import Blueprint, Response

from trio_llm.errors import ShuttingDown
from trio_llm.server.http import App, this_app
from trio_llm.server.openapi import Operation

blueprint = Blueprint("health", __name__)


@attrs.frozen(kw_only=True)
class EngineHealth:
    state: Literal["ready", "draining", "stuck", "dead"]
    heartbeat_age: float
    """Seconds since the engine's thread last told that it runs."""


@attrs.frozen(kw_only=True)
class Health:
    """The server's state, and that of its engines by the names of their models."""

    status: str
    engines: Mapping[str, EngineHealth]


_REPORT = Operation(answer=Health, statuses=(200, 503))


@blueprint.get("/health/live")
@_REPORT
async def live() -> Response:
    """200 unless only a restart can help: the event loop answers, and no engine is dead.

    An engine is dead when its thread crashed or hung beyond its grace, which the engine's own
    watchdog decides from the heartbeat.  A long prefill, or no request at all, is no failure.
    """
    app = this_app()
    engines = _engines(app)
    dead = app.lifecycle.failure is not None or any(engine.state == "dead" for engine in engines.values())
    return _answer(not dead, "live" if not dead else "dead", engines)


@blueprint.get("/health/ready")
@blueprint.get("/health")
@_REPORT
async def ready() -> Response:
    """200 when new requests are taken: the model is loaded, nothing drains, no step is stuck."""
    app = this_app()
    engines = _engines(app)
    refusal = app.lifecycle.refusal()
    if refusal is not None:
        return _answer(False, refusal.kind, engines)
    if app.lifecycle.leaving:
        return _answer(False, ShuttingDown.kind, engines)
    unready = next((engine.state for engine in engines.values() if engine.state != "ready"), None)
    return _answer(unready is None, unready or "ready", engines)


def _engines(app: App) -> dict[str, EngineHealth]:
    return {
        name: EngineHealth(state=engine.state, heartbeat_age=round(engine.heartbeat_age, 3))
        for name, engine in app.registry.items()
    }


def _answer(good: bool, status: str, engines: dict[str, EngineHealth]) -> Response:
    body = orjson.dumps(attrs.asdict(Health(status=status, engines=engines)))
    return Response(body, 200 if good else 503, content_type="application/json")
