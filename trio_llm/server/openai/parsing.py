"""From a body's bytes to a wire object: strict, and every complaint names its field."""

from __future__ import annotations

import math
from typing import Any

import orjson
import structlog
import trio
from quart import Request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from trio_llm.errors import InvalidRequest, UnsupportedParameter
from trio_llm.server.openai import fields, wire
from trio_llm.server.openai.limits import show, wrong_type
from trio_llm.server.openai.structuring import structure

logger = structlog.get_logger(__name__)

_MAX_SHOWN = 60
"""Characters of a name that an error or the log repeats."""


class UnsupportedMediaType(InvalidRequest):
    """The body is not JSON."""

    kind = "unsupported_media_type"


async def read_json(request: Request) -> dict[str, Any]:
    """The request's body, a JSON object.  (Nesting is limited by orjson, to 1024.)

    Raises:
        InvalidRequest: it is something else.
        UnsupportedMediaType: it is declared to be something else.
        HTTPException: it is too large or did not arrive in time.
    """
    mimetype = request.mimetype
    if mimetype and mimetype != "application/json" and not mimetype.endswith("+json"):
        raise UnsupportedMediaType(f"the Content-Type must be application/json, not {mimetype[:_MAX_SHOWN]}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedMediaType(f"the body must not be compressed, got the Content-Encoding {encoding[:_MAX_SHOWN]}")
    try:
        document = orjson.loads(await _read_body(request))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return document


async def _read_body(request: Request) -> bytes:
    """The body, piece by piece: Quart itself would only look at the size of one that is whole."""
    limit, timeout = request.max_content_length, request.body_timeout
    body = bytearray()
    with trio.move_on_after(math.inf if timeout is None else timeout):
        async for piece in request.body:
            body += piece
            if limit is not None and len(body) > limit:
                raise RequestEntityTooLarge
        return bytes(body)
    raise RequestTimeout


def parse_chat(document: dict[str, Any], *, lenient: bool) -> wire.ChatCompletionRequest:
    """A chat request.

    Raises:
        InvalidRequest: a field has the wrong type, is missing or unknown; `field` names it.
        UnsupportedParameter: a field asks for what is not supported.
    """
    body = structure(screen(document, fields.CHAT, lenient=lenient), wire.ChatCompletionRequest)
    if not body.messages:
        raise InvalidRequest("messages must have at least one entry", field="messages")
    _check_stream_options(body)
    return body


def parse_completion(document: dict[str, Any], *, lenient: bool) -> wire.CompletionRequest:
    """A completion request.

    Raises:
        InvalidRequest: a field has the wrong type, is missing or unknown; `field` names it.
        UnsupportedParameter: a field asks for what is not supported.
    """
    body = structure(screen(document, fields.COMPLETION, lenient=lenient), wire.CompletionRequest)
    _check_stream_options(body)
    return body


def screen(document: dict[str, Any], table: fields.Table, *, lenient: bool) -> dict[str, Any]:
    """The supported fields of a body that say something; the table judges the others.

    Args:
        lenient: ignore what would be refused, and log it, once for a request.

    Raises:
        InvalidRequest: a field is unknown, or one has the wrong type or is too large.
        UnsupportedParameter: a field asks for what is not supported.
    """
    ignored: list[str] | None = [] if lenient else None
    kept = screen_object(document, table, "", ignored)
    log_ignored(ignored)
    return kept


def log_ignored(ignored: list[str] | None) -> None:
    """One line for all that a request had ignored."""
    if ignored:
        logger.info("ignored parameters", parameters=ignored)


def screen_object(
    document: dict[str, Any], table: fields.Table, path: str, ignored: list[str] | None
) -> dict[str, Any]:
    """Those of the fields of one object that count.

    Args:
        path: where the object stands in the body, with a dot at its end; "" is the body itself.
        ignored: takes the paths of what is ignored; None refuses it.

    Raises:
        InvalidRequest: a field is unknown, or one has the wrong type or is too large.
        UnsupportedParameter: a field asks for what is not supported.
    """
    kept = {}
    for name, value in document.items():
        if value is None:
            continue  # null is absent
        field = table.get(name)
        if field is None:
            where = path + name[:_MAX_SHOWN]
            if ignored is None:
                raise InvalidRequest(f"unknown parameter: {where}", field=where, code="unknown_parameter")
            ignored.append(where)
        elif field.treatment == "refused":
            if not field.is_neutral(value):
                if ignored is None:
                    text = f"{path}{name} is not supported here: {show(value)}"
                    raise UnsupportedParameter(text, field=path + name)
                ignored.append(path + name)
        else:
            if field.check is not None:
                field.check(value, path + name)
            if field.treatment == "supported":
                kept[name] = value if field.table is None else _inner(value, field, path + name, ignored)
    return kept


def _inner(value: Any, field: fields.Field, path: str, ignored: list[str] | None) -> Any:
    """A value that is an object, or an array of objects, with a table of its own.

    What is neither is left to structuring, which knows whether it may be.
    """
    assert field.table is not None
    if isinstance(value, dict):
        return screen_object(value, field.table, f"{path}.", ignored)
    if not isinstance(value, list):
        return value
    if len(value) > field.most:
        raise InvalidRequest(f"{path} takes at most {field.most} entries, got {len(value)}", field=path)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong_type(f"{path}[{index}]", "an object", item)
    return [screen_object(item, field.table, f"{path}[{index}].", ignored) for index, item in enumerate(value)]


def _check_stream_options(body: wire.GenerationFields) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise InvalidRequest("stream_options is only for streams: set stream", field="stream_options")
    if options.continuous_usage_stats and not options.include_usage:
        text = "stream_options.continuous_usage_stats needs stream_options.include_usage"
        raise InvalidRequest(text, field="stream_options.continuous_usage_stats")
