"""The OpenAPI 3.1 document: every route of the application, described from its wire types."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import attrs
import orjson
from quart import Blueprint, Response
from werkzeug.routing import Rule

from trio_llm.server.access import OPEN_BLUEPRINTS
from trio_llm.server.anthropic import fields as message_fields
from trio_llm.server.anthropic import wire as messages
from trio_llm.server.anthropic.errors import error_type
from trio_llm.server.http import App, this_app
from trio_llm.server.json_schema import Schemas
from trio_llm.server.openai import fields, text_fields, text_wire, wire
from trio_llm.server.openai.error_bodies import FAILURES, HTTP_FAILURES, Failure
from trio_llm.server.openai.responses import fields as response_fields
from trio_llm.server.openai.responses import wire as responses

blueprint = Blueprint("openapi", __name__)

Handler = TypeVar("Handler", bound=Callable[..., Any])

TABLES: Mapping[type, fields.Table] = {
    wire.ChatCompletionRequest: fields.CHAT,
    wire.CompletionRequest: fields.COMPLETION,
    wire.Message: fields.MESSAGE,
    wire.Tool: fields.TOOL,
    wire.FunctionDefinition: fields.FUNCTION,
    wire.ToolCall: fields.TOOL_CALL,
    wire.FunctionCall: fields.FUNCTION_CALL,
    wire.ContentPart: fields.CONTENT_PART,
    wire.StreamOptions: fields.STREAM_OPTIONS,
    responses.ResponseRequest: response_fields.RESPONSE,
    responses.ResponseFunctionTool: response_fields.TOOL,
    responses.TextOptions: response_fields.TEXT,
    responses.TextFormat: response_fields.FORMAT,
    responses.ReasoningOptions: response_fields.REASONING_OPTIONS,
    wire.ResponseFormat: fields.RESPONSE_FORMAT,
    wire.JsonSchema: fields.JSON_SCHEMA,
    wire.StructuredOutputs: fields.STRUCTURED_OUTPUTS,
    text_wire.EmbeddingRequest: text_fields.EMBEDDING,
    text_wire.TokenizeRequest: text_fields.TOKENIZE,
    text_wire.DetokenizeRequest: text_fields.DETOKENIZE,
    messages.MessagesRequest: message_fields.MESSAGES,
    messages.CountTokensRequest: message_fields.COUNT_TOKENS,
    messages.InputTurn: message_fields.MESSAGE,
    messages.InputBlock: message_fields.INPUT_BLOCK,
    messages.ResultBlock: message_fields.RESULT_BLOCK,
    messages.SystemBlock: message_fields.SYSTEM_BLOCK,
    messages.ClientTool: message_fields.TOOL,
    messages.MessagesToolChoice: message_fields.TOOL_CHOICE,
    messages.Thinking: message_fields.THINKING,
    messages.OutputConfig: message_fields.OUTPUT_CONFIG,
    messages.OutputFormat: message_fields.OUTPUT_FORMAT,
}
"""How the fields of a request's objects are treated."""

_WORDS = "OpenAI's API, and a little more, for models that are served here."
_EVENT = "One event of the stream.  The last one is `[DONE]`; a failure is an event too, with the error envelope."
_NAMED_EVENT = "One event of the stream.  A failure is one too, the last, with the error envelope."
_KEYS: dict[str, dict[str, Any]] = {
    "key": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "password": {"type": "http", "scheme": "basic", "description": "The key is the password."},
}
"""The ways to show a key, any of which will do."""
_SKIPPED_METHODS = {"HEAD", "OPTIONS"}


@attrs.frozen(kw_only=True)
class Operation:
    """A decorator of handlers: what the document says of a route beside the handler's docstring."""

    request: type | None = None
    """The JSON body that it takes."""
    query: Mapping[str, Mapping[str, Any]] = {}
    """Schemas of what its query may have, none of which must be there."""
    answer: type | None = None
    """The JSON body that it gives."""
    event: Any = None
    """What the events of its streamed answer hold: a type, or one of several."""
    is_named: bool = False
    """Whether these events have names, and the last is none of its own."""
    failure: type = wire.ErrorBody
    """The JSON body of its errors."""
    media_type: str | None = None
    """Of an answer that is not JSON."""
    statuses: tuple[int, ...] = (200,)
    """With which it gives its answer; others are errors."""
    example: Mapping[str, Any] | None = None
    """Of the body that it takes.  The served model is named in it."""

    def __call__(self, handler: Handler) -> Handler:
        handler.operation = self  # type: ignore[attr-defined]
        return handler


@blueprint.get("/openapi.json")
@Operation(answer=dict)
async def openapi() -> Response:
    """This document."""
    app = this_app()
    lenient = app.settings.compat == "lenient"
    return Response(orjson.dumps(document(app, lenient=lenient)), content_type="application/json")


def document(app: App, *, lenient: bool = False) -> dict[str, Any]:
    """The OpenAPI document of an application.

    Args:
        lenient: request fields that are unknown or not supported are ignored.
    """
    schemas = Schemas(TABLES, lenient=lenient)
    paths: dict[str, dict[str, Any]] = {}
    for rule in sorted(app.url_map.iter_rules(), key=_order):
        handler = inspect.unwrap(app.view_functions[rule.endpoint])
        operation = getattr(handler, "operation", None)
        if isinstance(operation, Operation):
            for method in (rule.methods or set()) - _SKIPPED_METHODS:
                entry = _entry(method, rule, handler, operation, schemas)
                if operation.example is not None:
                    example = {"model": next(iter(app.registry), ""), **operation.example}
                    entry["requestBody"]["content"]["application/json"]["example"] = example
                paths.setdefault(_path(rule), {})[method.lower()] = entry
    components = {
        "schemas": schemas.components,
        "responses": {
            kind.__name__: {
                "description": _failures(words),
                "content": {"application/json": {"schema": schemas.of_answer(kind)}},
            }
            for kind, words in _ENVELOPES.items()
        },
    }
    locks: dict[str, Any] = {}
    if app.access.required:
        components["securitySchemes"] = _KEYS
        locks = {"security": [{name: []} for name in _KEYS]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "trio_llm", "version": package_version(), "description": _WORDS},
        "servers": [{"url": "/"}],
        **locks,
        "paths": paths,
        "components": components,
    }


def package_version() -> str:
    """The version of trio_llm that runs."""
    try:
        return version("trio-llm")
    except PackageNotFoundError:  # it runs from a source tree
        return "unknown"


def _order(rule: Rule) -> tuple[bool, str]:
    return not rule.rule.startswith("/v1/"), rule.rule


def _path(rule: Rule) -> str:
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule)


def _entry(
    method: str, rule: Rule, handler: Callable[..., Any], operation: Operation, schemas: Schemas
) -> dict[str, Any]:
    path = _path(rule)
    summary, _, text = _words(handler).partition("\n\n")
    entry: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "tags": [rule.endpoint.partition(".")[0]],
        "summary": " ".join(summary.split()).removesuffix("."),
    }
    if text:
        entry["description"] = text
    if entry["tags"][0] in OPEN_BLUEPRINTS:
        entry["security"] = []
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in sorted(rule.arguments)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]
    if parameters:
        entry["parameters"] = parameters
    if operation.request is not None:
        content = {"application/json": {"schema": schemas.of_request(operation.request)}}
        entry["requestBody"] = {"required": True, "content": content}
    answer = {"description": "The answer.", "content": _content(operation, schemas)}
    entry["responses"] = {
        **{str(status): answer for status in operation.statuses},
        "4XX": {"$ref": f"#/components/responses/{operation.failure.__name__}"},
        "5XX": {"$ref": f"#/components/responses/{operation.failure.__name__}"},
    }
    return entry


def _content(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": schemas.of_answer(operation.answer)}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _event(operation, schemas)}
    if operation.media_type is not None:
        content[operation.media_type] = {"schema": {"type": "string"}}
    return content


def _event(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    """OpenAPI 3.1 has no word for the items of a stream: by custom, this describes each of them."""
    contents = {"anyOf": [schemas.of_answer(operation.event), schemas.of_answer(operation.failure)]}
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": contents}
    if operation.is_named:
        properties = {"event": {"type": "string"}, "data": data}
        return {"type": "object", "description": _NAMED_EVENT, "properties": properties, "required": ["event", "data"]}
    data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {"type": "object", "description": _EVENT, "properties": {"data": data}, "required": ["data"]}


def _words(handler: Callable[..., Any]) -> str:
    """A handler's docstring, without what it says to programmers."""
    return re.split(r"\n\n(?:Args|Raises|Returns):", inspect.getdoc(handler) or "")[0]


def _failures(words: Callable[[Failure], Mapping[str, Any]]) -> str:
    """All failures: in one table, as in the code.

    Args:
        words: what an envelope says of one.
    """
    failures = (*FAILURES.values(), *HTTP_FAILURES.values())
    head = ["status", *words(failures[0])]
    rows = sorted({(row.status, *words(row).values()) for row in failures})
    lines = [f"| {status} | {' | '.join(f'`{word}`' for word in rest)} |" for status, *rest in rows]
    return "\n".join(["A failure.", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])


_ENVELOPES: Mapping[type, Callable[[Failure], Mapping[str, Any]]] = {
    wire.ErrorBody: lambda failure: {"type": failure.type, "code": failure.code},
    messages.MessagesErrorBody: lambda failure: {"type": error_type(failure)},
}
"""The bodies of failures, and what each says of one beside its status."""
