"""Every failure as OpenAI's clients expect it: one table from kinds to status, type and code."""

from __future__ import annotations

import contextlib
from http import HTTPStatus

import attrs
import orjson

from trio_llm.errors import TrioLLMError


@attrs.frozen
class Failure:
    """How one kind of error looks in HTTP."""

    status: int
    type: str
    code: str | None
    retry_after: int | None = None
    """Seconds after which a client may try again: the Retry-After header."""


_REQUEST = "invalid_request_error"
_SERVER = "server_error"

FAILURES: dict[str, Failure] = {
    "invalid_request": Failure(400, _REQUEST, "invalid_value"),
    "form_failed": Failure(400, _REQUEST, "invalid_value"),
    "context_length_exceeded": Failure(400, _REQUEST, "context_length_exceeded"),
    "unsupported_parameter": Failure(400, _REQUEST, "unsupported_parameter"),
    "invalid_api_key": Failure(401, _REQUEST, "invalid_api_key"),
    "model_not_found": Failure(404, _REQUEST, "model_not_found"),
    "request_not_found": Failure(404, _REQUEST, "request_not_found"),
    "response_not_found": Failure(404, _REQUEST, "response_not_found"),
    "reader_stalled": Failure(408, _REQUEST, "reader_stalled"),
    "unsupported_media_type": Failure(415, _REQUEST, "unsupported_media_type"),
    # "requests", and not tokens, is what OpenAI calls that of which there were too many
    "too_many_requests": Failure(429, "requests", "rate_limit_exceeded", retry_after=1),
    "queue_full": Failure(503, _SERVER, "server_overloaded", retry_after=1),
    "not_ready": Failure(503, _SERVER, "model_loading", retry_after=2),
    "shutting_down": Failure(503, _SERVER, "shutting_down", retry_after=5),
    "engine_dead": Failure(503, _SERVER, "engine_dead", retry_after=5),
    "request_failed": Failure(500, _SERVER, "request_failed"),
    "internal": Failure(500, _SERVER, "internal_error"),
}
"""By TrioLLMError.kind.  A kind that is missing here counts as "internal"."""

HTTP_FAILURES: dict[int, Failure] = {
    400: Failure(400, _REQUEST, "bad_request"),
    404: Failure(404, _REQUEST, "not_found"),
    405: Failure(405, _REQUEST, "method_not_allowed"),
    408: Failure(408, _REQUEST, "request_timeout"),
    413: Failure(413, _REQUEST, "request_too_large"),
    415: Failure(415, _REQUEST, "unsupported_media_type"),
    431: Failure(431, _REQUEST, "request_header_fields_too_large"),
    500: FAILURES["internal"],
    503: Failure(503, _SERVER, "service_unavailable", retry_after=5),
}
"""By status, for what fails in HTTP before a request has a meaning."""


class NotReady(TrioLLMError):
    """The server is up, but its model is not loaded yet."""

    kind = "not_ready"


def failure_of(error: TrioLLMError) -> Failure:
    """The row of the table for an error.  An error may bring a finer code in its details."""
    failure = FAILURES.get(error.kind, FAILURES["internal"])
    code = error.details.get("code")
    return failure if code is None else attrs.evolve(failure, code=str(code))


def error_body(message: str, failure: Failure, param: str | None = None) -> bytes:
    """The JSON envelope; its four keys are always there."""
    error = {"message": message, "type": failure.type, "param": param, "code": failure.code}
    return orjson.dumps({"error": error})


def body_of(error: TrioLLMError) -> bytes:
    """The JSON envelope of an error."""
    return error_body(error.message, failure_of(error), error.field)


def http_failure(status: int) -> Failure:
    """A failure that has only an HTTP status."""
    code = phrase_of(status).lower().replace(" ", "_")
    return HTTP_FAILURES.get(status, Failure(status, _REQUEST if status < 500 else _SERVER, code))


def phrase_of(status: int) -> str:
    """What HTTP calls a status."""
    with contextlib.suppress(ValueError):
        return HTTPStatus(status).phrase
    return "request failed"


def http_error_body(status: int, message: str | None = None) -> bytes:
    """The JSON envelope of a failure that has only an HTTP status."""
    return error_body(message or phrase_of(status), http_failure(status))
