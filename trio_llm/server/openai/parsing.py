"""From a body's bytes to a wire object: strict, and every complaint names its field."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar, get_args, get_origin

import attrs
import cattrs
import orjson
import structlog
import trio
from cattrs.cols import list_structure_factory
from cattrs.errors import (
    AttributeValidationNote,
    ClassValidationError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn
from quart import Request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from trio_llm.errors import InvalidRequest, UnsupportedParameter
from trio_llm.server.openai import fields, wire

logger = structlog.get_logger(__name__)

T = TypeVar("T")
_MAX_SHOWN = 60
"""Characters of a wrong value that an error repeats."""


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
    document = screen(document, fields.CHAT, lenient=lenient)
    messages = document.get("messages")
    if isinstance(messages, list):
        if not 1 <= len(messages) <= wire.MAX_ENTRIES:
            text = f"messages must have from 1 to {wire.MAX_ENTRIES} entries, got {len(messages)}"
            raise InvalidRequest(text, field="messages")
        document["messages"] = [
            _screen_message(message, f"messages[{index}]", lenient=lenient) for index, message in enumerate(messages)
        ]
    return _structure(_screen_stream_options(document, lenient=lenient), wire.ChatCompletionRequest)


def parse_completion(document: dict[str, Any], *, lenient: bool) -> wire.CompletionRequest:
    """A completion request.

    Raises:
        InvalidRequest: a field has the wrong type, is missing or unknown; `field` names it.
        UnsupportedParameter: a field asks for what is not supported.
    """
    document = screen(document, fields.COMPLETION, lenient=lenient)
    return _structure(_screen_stream_options(document, lenient=lenient), wire.CompletionRequest)


def screen(document: dict[str, Any], table: fields.Table, path: str = "", *, lenient: bool) -> dict[str, Any]:
    """The supported fields of an object that say something; the table judges the others.

    Args:
        path: where the object stands in the body, with a dot at its end; "" is the body itself.
        lenient: ignore and log what would be refused.

    Raises:
        InvalidRequest: a field is unknown, or an accepted one has the wrong type.
        UnsupportedParameter: a field asks for what is not supported.
    """
    kept = {}
    ignored = []
    for name, value in document.items():
        if value is None:
            continue  # null is absent
        field = table.get(name)
        if field is None:
            if not lenient:
                text = f"unknown parameter: {path}{name[:_MAX_SHOWN]}"
                raise InvalidRequest(text, field=f"{path}{name[:_MAX_SHOWN]}", code="unknown_parameter")
            ignored.append(path + name[:_MAX_SHOWN])
        elif field.treatment == "supported":
            kept[name] = value
        elif field.treatment == "accepted":
            if not isinstance(value, field.type):
                kind = getattr(field.type, "__name__", "other value")
                raise _wrong_type(path + name, _NAMES.get(kind, kind), value)
        elif not field.is_neutral(value):
            if not lenient:
                raise UnsupportedParameter(f"{path}{name} is not supported here: {_show(value)}", field=path + name)
            ignored.append(path + name)
    if ignored:
        logger.info("ignored parameters", parameters=ignored)
    return kept


def _screen_message(message: Any, path: str, *, lenient: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong_type(path, "an object", message)
    if message.get("role") in ("tool", "function"):
        raise UnsupportedParameter(f"the role {message['role']} is not supported yet", field=f"{path}.role")
    kept = screen(message, fields.MESSAGE, f"{path}.", lenient=lenient)
    content = kept.get("content")
    if isinstance(content, list):
        path = f"{path}.content"
        if not 1 <= len(content) <= wire.MAX_ENTRIES:
            raise InvalidRequest(f"{path} must have from 1 to {wire.MAX_ENTRIES} parts, got {len(content)}", field=path)
        kept["content"] = [_screen_part(part, f"{path}[{i}]", lenient=lenient) for i, part in enumerate(content)]
    return kept


def _screen_part(part: Any, path: str, *, lenient: bool) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise _wrong_type(path, "an object", part)
    kind = part.get("type")
    if isinstance(kind, str) and kind != "text":
        raise UnsupportedParameter(f"content parts of type {kind[:_MAX_SHOWN]} are not supported", field=f"{path}.type")
    kept = screen(part, fields.CONTENT_PART, f"{path}.", lenient=lenient)
    if "text" not in kept:
        raise InvalidRequest(f"{path}.text is missing", field=f"{path}.text", code="missing_required_parameter")
    return kept


def _screen_stream_options(document: dict[str, Any], *, lenient: bool) -> dict[str, Any]:
    options = document.get("stream_options")
    if isinstance(options, dict):
        if not document.get("stream"):
            raise InvalidRequest("stream_options is only for streams: set stream", field="stream_options")
        document["stream_options"] = screen(options, fields.STREAM_OPTIONS, "stream_options.", lenient=lenient)
    return document


# structuring: cattrs would turn 1 into "1" and "no" into True, so each plain type has a strict hook

_NAMES = {
    "str": "a string",
    "bool": "a boolean",
    "int": "an integer",
    "float": "a number",
    "list": "an array",
    "dict": "an object",
}


class _WrongValue(ValueError):
    """Carries what was expected and what came, until the path is known."""

    def __init__(self, expected: str, value: Any) -> None:
        super().__init__(expected)
        self.expected = expected
        self.value = value


def _strict(kind: type) -> Any:
    def hook(value: Any, _: Any) -> Any:
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        if kind is int and type(value) is float and abs(value) >= 2**63:
            # the JSON parser knows integers of 64 bits, and reads longer ones as floats
            raise _WrongValue("an integer of at most 64 bits", value)
        raise _WrongValue(_NAMES[kind.__name__], value)

    return hook


def _literal(value: Any, annotation: Any) -> Any:
    choices = get_args(annotation)
    if value in choices:
        return value
    raise _WrongValue(f"one of {', '.join(choices)}", value)


def _stop(value: Any, _: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    raise _WrongValue("a string or an array of strings", value)


def _content(value: Any, _: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _converter.structure(value, list[wire.ContentPart])
    raise _WrongValue("a string or an array of content parts", value)


def _prompt(value: Any, _: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        kinds = {type(item) for item in value}
        if kinds in ({int}, {str}):
            return value
        if kinds == {list} and all(type(token) is int for row in value for token in row):
            return value
    raise _WrongValue("a string, or a non-empty array of strings or of token ids", value)


def _origin(annotation: Any) -> Any:
    return get_origin(annotation)


def _checked(kind: Any, expected: str, make: Any) -> Any:
    """A hook factory: what `make` would structure, if it is of the right JSON kind at all."""

    def factory(annotation: Any) -> Any:
        structure: Any = make(annotation, _converter)

        def hook(value: Any, _: Any) -> Any:
            if not isinstance(value, kind):
                raise _WrongValue(expected, value)
            if kind is list and len(value) > wire.MAX_ENTRIES:
                raise _WrongValue(f"an array of at most {wire.MAX_ENTRIES} entries", value)
            return structure(value, annotation)

        return hook

    return factory


_converter = cattrs.Converter(detailed_validation=True)
for _kind in (str, bool, int, float):
    _converter.register_structure_hook(_kind, _strict(_kind))
_converter.register_structure_hook_factory(
    lambda annotation: _origin(annotation) is list, _checked(list, "an array", list_structure_factory)
)
_converter.register_structure_hook_factory(attrs.has, _checked(dict, "an object", make_dict_structure_fn))
_converter.register_structure_hook_func(lambda annotation: annotation == str | list[str] | None, _stop)
_converter.register_structure_hook_func(lambda annotation: annotation == str | list[wire.ContentPart], _content)
_converter.register_structure_hook_func(
    lambda annotation: annotation == str | list[int] | list[str] | list[list[int]], _prompt
)
_converter.register_structure_hook_func(lambda annotation: _origin(annotation) is Literal, _literal)


def _structure(document: dict[str, Any], kind: type[T]) -> T:
    try:
        return _converter.structure(document, kind)
    except (ClassValidationError, IterableValidationError) as group:
        raise _explain(group, "") from None


def _explain(error: Exception, path: str) -> InvalidRequest:
    """The first complaint in a tree of them, with the path to its field."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        part = error.exceptions[0]
        for note in getattr(part, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                path = f"{path}.{note.name}" if path else note.name
            elif isinstance(note, IterableValidationNote):
                path = f"{path}[{note.index}]"
        return _explain(part, path)
    if isinstance(error, _WrongValue):
        return _wrong_type(path, error.expected, error.value)
    if isinstance(error, KeyError):
        # the note on it names the object's field already
        return InvalidRequest(f"{path} is missing", field=path, code="missing_required_parameter")
    return InvalidRequest(f"{path} is not valid: {error}", field=path)


def _wrong_type(path: str, expected: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{path} must be {expected}, got {_show(value)}", field=path, code="invalid_type")


def _show(value: Any) -> str:
    """A value as JSON, cut short: errors go into logs, and prompts do not."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = orjson.dumps(value, default=str).decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
