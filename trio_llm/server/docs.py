"""GET /docs: the OpenAPI document as a page, with a form to try each route.  It needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from quart import Blueprint, Response

from trio_llm.server.openapi import Operation

blueprint = Blueprint("docs", __name__)


def _read(name: str) -> str:
    return (resources.files("trio_llm.server") / "docs_page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a Content-Security-Policy names what may stand inside a page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE, _SCRIPT = _read("page.css"), _read("page.js")
_PAGE = (
    _read("page.html")
    .replace("<style></style>", f"<style>{_STYLE}</style>")
    .replace('<script type="module"></script>', f'<script type="module">{_SCRIPT}</script>')
)
_HEADERS = {
    # this style and script, requests to this server, and nothing of anybody else's
    "content-security-policy": (
        f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@blueprint.get("/docs")
@Operation(media_type="text/html")
async def page() -> Response:
    """This API as a page."""
    return Response(_PAGE, content_type="text/html; charset=utf-8", headers=_HEADERS)
