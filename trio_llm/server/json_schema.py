"""JSON Schema (draft 2020-12) of attrs classes: from their types, validators, docstrings and field tables."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import attrs

from trio_llm.core.sampling_params import Integer, Number, SamplingParams, Strings
from trio_llm.docstrings import attribute_docstrings
from trio_llm.server.openai.fields import Field, Table
from trio_llm.server.openai.limits import (
    MAX_ENTRIES,
    MAX_IDENTIFIER,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    check_boolean,
    check_count,
    check_free_form,
    check_identifier,
    check_index,
    check_metadata,
    check_object,
    check_text,
)

Schema = dict[str, Any]

_PLAIN: dict[Any, Schema] = {
    type(None): {"type": "null"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "format": "int64"},
    float: {"type": "number"},
    list: {"type": "array"},
    dict: {"type": "object"},
    object: {},
    Any: {},
}
_CHECKED: dict[Any, Schema] = {
    check_identifier: {"type": "string", "maxLength": MAX_IDENTIFIER},
    check_metadata: {
        "type": "object",
        "maxProperties": MAX_METADATA,
        "propertyNames": {"maxLength": MAX_METADATA_KEY},
        "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
    },
    check_boolean: {"type": "boolean"},
    check_free_form: {},
    check_text: {"type": "string"},
    check_object: {"type": "object"},
    check_count: {"type": "integer", "minimum": 1},
    check_index: {"type": "integer", "minimum": 0, "maximum": MAX_ENTRIES},
}
"""By the checks of accepted fields."""
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0}
"""The only integers of which a client sends several."""
SUPPORT = "x-support"
"""The keyword that tells a field's treatment: supported, accepted or refused."""


class Schemas:
    """Makes schemas; those of classes stand in `components` and are referred to.

    Args:
        tables: how the fields of a request's objects are treated.
        lenient: fields that are unknown or not supported are ignored.
    """

    def __init__(self, tables: Mapping[type, Table], *, lenient: bool) -> None:
        self.components: dict[str, Schema] = {}
        self._tables = tables
        self._lenient = lenient

    def of_request(self, kind: Any) -> Schema:
        """What a client may send: null is absent, and arrays, but those of token ids, are bounded."""
        return self._of(kind, self._request_object, most=MAX_ENTRIES)

    def of_answer(self, kind: Any) -> Schema:
        """What the server sends."""
        return self._of(kind, self._answer_object)

    def _of(self, kind: Any, of_object: Callable[[type], Schema], most: int | None = None) -> Schema:
        if (plain := _PLAIN.get(kind)) is not None:
            return dict(plain)
        if attrs.has(kind):
            return self._component(kind, of_object)
        if is_typeddict(kind):
            return self._component(kind, self._typed_dict)
        arguments = get_args(kind)
        match get_origin(kind):
            case origin if origin is Literal:
                return {"enum": list(arguments)}
            case origin if origin in (types.UnionType, Union):
                return _any_of([self._of(argument, of_object, most) for argument in arguments])
            case origin if isinstance(origin, type) and issubclass(origin, Mapping):
                names = {"propertyNames": {"pattern": "^[0-9]{1,19}$"}} if arguments[0] is int else {}
                return {"type": "object", "additionalProperties": self._of(arguments[1], of_object, most), **names}
            case origin if origin in (list, tuple):
                if most is not None and arguments[0] is int:
                    return {"type": "array", "items": _TOKEN_ID}
                bound = {} if most is None else {"maxItems": most}
                return {"type": "array", "items": self._of(arguments[0], of_object, most), **bound}
        raise TypeError(f"{kind} has no JSON Schema")

    def _component(self, kind: type, of_object: Callable[[type], Schema]) -> Schema:
        name = kind.__name__
        if name not in self.components:
            self.components[name] = {}  # it may hold itself
            description = {"description": inspect.cleandoc(kind.__doc__)} if kind.__doc__ else {}
            self.components[name] = {"type": "object", **description, **of_object(kind)}
        return {"$ref": f"#/components/schemas/{name}"}

    def _typed_dict(self, kind: type) -> Schema:
        properties = {name: self.of_answer(part) for name, part in get_type_hints(kind).items()}
        return {"properties": properties, "required": list(properties)}

    def _answer_object(self, kind: type) -> Schema:
        fields = attrs.fields(attrs.resolve_types(kind))
        return {
            "properties": {
                field.name: {**self.of_answer(field.type), **_described(field, kind.__mro__)} for field in fields
            },
            # what is None may be left out: a delta's parts, say
            "required": [field.name for field in fields if field.default is not None],
        }

    def _request_object(self, kind: type) -> Schema:
        properties = {}
        required = []
        for field in attrs.fields(attrs.resolve_types(kind)):
            schema = _limited(self.of_request(field.type), _validator(field))
            if field.default is attrs.NOTHING:
                required.append(field.name)
            else:
                schema = _nullable(schema)
                if isinstance(field.default, str | int | float):
                    schema["default"] = field.default
            properties[field.name] = {**schema, **_described(field, (*kind.__mro__, SamplingParams))}
        table = self._tables.get(kind)
        if table is not None:
            for name, row in table.items():
                remark = {"description": row.remark} if row.remark else {}
                properties[name] = {**(properties.get(name) or self._unused(row)), **remark, SUPPORT: row.treatment}
        bound = {} if table is None or self._lenient else {"additionalProperties": False}
        return {"properties": properties, "required": required, **bound}

    def _unused(self, row: Field) -> Schema:
        if row.treatment == "accepted":
            return _nullable(_CHECKED[row.check])
        if self._lenient:
            return {}
        return {"enum": [*row.neutral, None]}  # the values that ask for nothing


def _described(field: attrs.Attribute[Any], owners: Iterable[type]) -> Schema:
    for owner in owners:
        if attrs.has(owner) and (text := attribute_docstrings(owner).get(field.name)):
            return {"description": re.sub(r"\bNone\b", "null", text)}
    return {}


def _validator(field: attrs.Attribute[Any]) -> Any:
    """What limits a field: its own validator, else that of the sampling parameter of its name."""
    sampling = attrs.fields_dict(SamplingParams).get(field.name)
    return field.validator or (sampling and sampling.validator)


def _limited(schema: Schema, validator: Any) -> Schema:
    if "anyOf" in schema:
        return {**schema, "anyOf": [_limited(part, validator) for part in schema["anyOf"]]}
    kinds = schema.get("type", ())
    match validator:
        case Number() | Integer() if {"number", "integer"}.intersection([kinds] if isinstance(kinds, str) else kinds):
            above = isinstance(validator, Number) and validator.above
            limits = {"exclusiveMinimum" if above else "minimum": validator.low, "maximum": validator.high}
            return {name: value for name, value in schema.items() if name != "format"} | limits
        case Strings() if kinds == "string":
            return {**schema, "minLength": 1}
        case Strings() if kinds == "array":
            return {**schema, "items": {**schema["items"], "minLength": 1}, "maxItems": validator.most}
    return schema


def _nullable(schema: Schema) -> Schema:
    return schema if not schema or _allows_null(schema) else _any_of([schema, {"type": "null"}])


def _allows_null(schema: Schema) -> bool:
    kinds = schema.get("type", ())
    return kinds == "null" or "null" in kinds or any(_allows_null(part) for part in schema.get("anyOf", ()))


def _any_of(parts: list[Schema]) -> Schema:
    """One of several; as one schema with two types where one of them is null."""
    rest = [part for part in parts if part != {"type": "null"}]
    if len(rest) == len(parts) or not rest:
        return parts[0] if len(parts) == 1 else {"anyOf": parts}
    if len(rest) == 1:
        if "enum" in rest[0]:
            return {**rest[0], "enum": [*rest[0]["enum"], None]}
        if isinstance(rest[0].get("type"), str):
            return {**rest[0], "type": [rest[0]["type"], "null"]}
    return {"anyOf": [*rest, {"type": "null"}]}
