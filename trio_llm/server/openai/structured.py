"""`response_format` and `structured_outputs`: two ways to say what form the text must have."""

from __future__ import annotations

import re
from typing import Any

import orjson

from trio_llm.core.sampling_params import StructuredOutput
from trio_llm.errors import InvalidRequest
from trio_llm.server.openai.field_names import fields_called
from trio_llm.server.openai.wire import GenerationFields, ResponseFormat, StructuredOutputs

_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def structured_output(fields: GenerationFields) -> tuple[StructuredOutput | None, str]:
    """What a request wants its text to be, and the field that says so.

    Raises:
        InvalidRequest: the fields contradict each other, or what they want is larger than its limit.
    """
    by_format, by_ours = fields.response_format, fields.structured_outputs
    if by_ours is not None and by_format is not None and by_format.type != "text":
        raise InvalidRequest("structured_outputs does not go with response_format", field="structured_outputs")
    if by_ours is not None:
        return _of_structured_outputs(by_ours)
    if by_format is not None:
        return _of_response_format(by_format)
    return None, ""


def _of_response_format(wanted: ResponseFormat) -> tuple[StructuredOutput | None, str]:
    if wanted.type == "text":
        return None, ""
    if wanted.type == "json_object":
        return StructuredOutput("json_object"), "response_format"
    schema = wanted.json_schema
    if schema is None:
        path = "response_format.json_schema"
        raise InvalidRequest(f"{path} is missing", field=path, code="missing_required_parameter")
    if not _SCHEMA_NAME.fullmatch(schema.name):
        path = "response_format.json_schema.name"
        raise InvalidRequest(f"{path} takes from 1 to 64 letters, digits, _ and -", field=path)
    if schema.schema is None:
        return StructuredOutput("json_object"), "response_format"
    return _named("json_schema", _text(schema.schema), "response_format.json_schema.schema")


def _of_structured_outputs(wanted: StructuredOutputs) -> tuple[StructuredOutput | None, str]:
    given = {
        "json": None if wanted.json is None else _text(wanted.json),
        "json_object": "" if wanted.json_object else None,
        "regex": wanted.regex,
        "choice": None if wanted.choice is None else _text(wanted.choice),
        "grammar": wanted.grammar,
    }
    chosen = [(name, value) for name, value in given.items() if value is not None]
    if not chosen:
        return None, ""
    if len(chosen) > 1:
        names = " and ".join(name for name, _ in chosen)
        raise InvalidRequest(f"structured_outputs takes one of its fields, got {names}", field="structured_outputs")
    (name, value), kinds = chosen[0], {"json": "json_schema", "grammar": "lark"}
    return _named(kinds.get(name, name), value, f"structured_outputs.{name}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _named(kind: Any, value: str, path: str) -> tuple[StructuredOutput, str]:
    with fields_called({"structured_output": path}):
        return StructuredOutput(kind, value), path
