"""GET /version."""

from __future__ import annotations

import attrs
from quart import Blueprint, Response

from trio_llm.server.openai.wire import encode
from trio_llm.server.openapi import Operation, package_version

blueprint = Blueprint("version", __name__)


@attrs.frozen
class Version:
    version: str


@blueprint.get("/version")
@Operation(answer=Version)
async def get_version() -> Response:
    """Which trio_llm this is."""
    return Response(encode(Version(package_version())), content_type="application/json")
