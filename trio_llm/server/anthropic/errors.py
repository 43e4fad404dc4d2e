"""Every failure as Anthropic's clients expect it: the statuses are the same, the envelope is another."""

from __future__ import annotations

from trio_llm.errors import TrioLLMError
from trio_llm.server.anthropic.wire import MessagesError, MessagesErrorBody
from trio_llm.server.openai.error_bodies import Failure, failure_of
from trio_llm.server.openai.wire import encode

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; others are `invalid_request_error` or `api_error`."""


def error_type(failure: Failure) -> str:
    """What Anthropic calls a failure."""
    return TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")


def error_body(message: str, failure: Failure, request_id: str) -> bytes:
    """The JSON envelope."""
    return encode(
        MessagesErrorBody(error=MessagesError(type=error_type(failure), message=message), request_id=request_id)
    )


def body_of(error: TrioLLMError, request_id: str) -> bytes:
    """The JSON envelope of an error."""
    return error_body(error.message, failure_of(error), request_id)
