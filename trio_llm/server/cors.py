"""CORS: pages of which origins a browser lets use this server."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from quart import Request

_METHODS = "GET, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, request-id, openai-processing-ms, retry-after"
_MAX_AGE = "600"
"""Seconds for which a browser need not ask again."""


class CORS:
    """The headers that let pages of some origins read our answers.

    Credentials are not allowed: pages send their key as a header, and not what the browser was told at /docs.

    Args:
        origins: scheme, host and port each, or "*" for all; none means no header at all.
    """

    def __init__(self, origins: Collection[str] = ()) -> None:
        self._origins = frozenset(origins)

    def headers(self, request_headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """What an answer bears beside its own headers, those of errors and preflights too."""
        if not self._origins:
            return []
        if "*" in self._origins:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED)]
        vary = (b"vary", b"origin")  # or a cache would give one origin's answer to another
        origin = next((value for name, value in request_headers if name.lower() == b"origin"), b"")
        if origin.decode("latin1") not in self._origins:
            return [vary]
        return [vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED)]

    def preflight_headers(self, request: Request) -> dict[str, str] | None:
        """What answers a preflight, beside `headers`; None if the request is none, or of no allowed origin.

        A browser sends it before the request that has the key, and without one.
        """
        origin = request.headers.get("origin")
        asked = request.headers.get("access-control-request-method")
        if request.method != "OPTIONS" or origin is None or asked is None:
            return None
        if not self._origins & {origin, "*"}:
            return None
        wanted = request.headers.get("access-control-request-headers", "authorization, content-type")
        return {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": wanted,
            "access-control-max-age": _MAX_AGE,
        }
