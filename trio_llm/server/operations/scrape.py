"""GET /metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from quart import Blueprint, Response

from trio_llm.server.http import this_app
from trio_llm.server.openapi import Operation

blueprint = Blueprint("metrics", __name__)


@blueprint.get("/metrics")
@Operation(media_type="text/plain")
async def scrape() -> Response:
    """Prometheus' text format."""
    return Response(this_app().metrics.render(), content_type=CONTENT_TYPE_LATEST)
