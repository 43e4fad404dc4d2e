"""Whose API a path belongs to: how its failures are spelled, and which headers its answers bear."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from trio_llm.server.anthropic import errors as anthropic
from trio_llm.server.exchange import Exchange
from trio_llm.server.openai import error_bodies as openai
from trio_llm.server.openai.error_bodies import Failure

Headers = list[tuple[bytes, bytes]]

_OPENAI_VERSION = b"2020-10-01"
_ANTHROPIC_PATH = "/v1/messages"


@attrs.frozen
class Dialect:
    """How one API speaks of what it does not say itself."""

    error_body: Callable[[str, Failure, str | None, str], bytes]
    """Of a message, the failure, the parameter, and the id of the request."""
    headers: Callable[[Exchange], Headers]
    """Of every answer."""


def dialect_of(path: str) -> Dialect:
    """The dialect of a path; that of OpenAI where nobody else's is."""
    return _ANTHROPIC if path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/") else _OPENAI


def _openai_headers(exchange: Exchange) -> Headers:
    milliseconds = 1000 * (trio.current_time() - exchange.started)
    return [
        (b"openai-version", _OPENAI_VERSION),
        (b"openai-processing-ms", b"%d" % milliseconds),  # until now, where a stream begins
    ]


def _anthropic_headers(exchange: Exchange) -> Headers:
    return [(b"request-id", exchange.echoed_id.encode())]


_OPENAI = Dialect(
    lambda message, failure, param, request_id: openai.error_body(message, failure, param), _openai_headers
)
_ANTHROPIC = Dialect(
    lambda message, failure, param, request_id: anthropic.error_body(message, failure, request_id), _anthropic_headers
)
