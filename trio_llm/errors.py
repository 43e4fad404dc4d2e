"""The exception tree.

An error carries what happened (`kind`), a sentence for people, the request field
that is at fault and the numbers that matter.  It knows nothing of HTTP: each server
adapter maps kinds to its own status, type and code.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TrioLLMError(Exception):
    """Base of every error that trio_llm raises on purpose.

    Args:
        message: one sentence for a person; never holds a prompt or a key.
        field: the name of the request field or setting at fault, if there is one.
        details: numbers and names a program may want, such as limits.
    """

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, field: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.details = details


class InvalidRequest(TrioLLMError):
    """A request that can never be served as it is; `field` names the culprit."""

    kind = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and wanted tokens do not fit the model's context or the KV memory."""

    kind = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """A field of the protocol that this server does not support."""

    kind = "unsupported_parameter"


class ModelNotFound(TrioLLMError):
    """No model of that name is registered."""

    kind = "model_not_found"


class RequestNotFound(TrioLLMError):
    """No request of that id is in flight."""

    kind = "request_not_found"


class QueueFull(TrioLLMError):
    """The engine holds as many requests as it may; try again later."""

    kind = "queue_full"


class ShuttingDown(TrioLLMError):
    """The engine takes no new request because it is draining."""

    kind = "shutting_down"


class RequestFailed(TrioLLMError):
    """This one request failed inside the engine; the others go on."""

    kind = "request_failed"


class FormFailed(RequestFailed):
    """The form that a request asks for its text cannot be held: too much for its limits, or at odds with the rest."""

    kind = "form_failed"


class ReaderStalled(TrioLLMError):
    """The reader took nothing for longer than the stall limit."""

    kind = "reader_stalled"


class EngineDead(TrioLLMError):
    """The engine ended: its thread crashed or hangs."""

    kind = "engine_dead"


class ConfigurationError(TrioLLMError):
    """A setting is wrong; `field` names it."""

    kind = "configuration"


class ModelLoadError(TrioLLMError):
    """A model could not be found, fetched or loaded."""

    kind = "model_load"


class ModelNotSupported(ModelLoadError):
    """The architecture cannot run through paged attention, or runs wrongly."""

    kind = "model_not_supported"
