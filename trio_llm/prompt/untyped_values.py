"""Values of a call that are written without quotes, so that text and number look alike: the schema tells them apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

KINDS = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
"""The types of JSON values, an integer being a kind of its own."""

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""As templates write them, which know Python's names."""
_MAX_REFERENCES = 16
_ANY = ("anyOf", "oneOf")


def kinds_of(schema: Any, root: Mapping[str, Any], known: dict[int, frozenset[str]] | None = None) -> frozenset[str]:
    """The kinds of the values that a schema allows, as far as it tells at a glance.

    Args:
        root: the schema that it is a part of.
        known: what was found out of parts of it, by their ids.
    """
    if not isinstance(schema, Mapping):
        return KINDS
    known = {} if known is None else known
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = found = KINDS  # for one that refers to itself
    if "type" in schema:
        found &= _named(schema["type"])
    if isinstance(schema.get("enum"), list):
        found &= {_kind(value) for value in schema["enum"]}
    if "const" in schema:
        found &= {_kind(schema["const"])}
    for keyword in _ANY:
        if isinstance(schema.get(keyword), list):
            found &= frozenset().union(*(kinds_of(part, root, known) for part in schema[keyword]))
    if isinstance(schema.get("$ref"), str):
        found &= kinds_of(_referred(schema["$ref"], root), root, known)
    known[id(schema)] = found
    return found


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with that in it to which it refers; {} if it is none that says anything."""
    found = dict(schema) if isinstance(schema, Mapping) else {}
    for _ in range(_MAX_REFERENCES):
        if not isinstance(found.get("$ref"), str):
            break
        referred = _referred(found.pop("$ref"), root)
        found = {**referred, **found} if isinstance(referred, Mapping) else found
    return found


def as_json(text: str, kinds: frozenset[str]) -> str:
    """The JSON text of a value.

    Args:
        text: as it is written.
        kinds: that it may be of.  What is of none of them is a string.
    """
    value = text.strip()
    value = _CONSTANTS.get(value, value)
    if kinds != {"string"} and _kind_of_text(value) in kinds - {"string"}:
        return value
    return json.dumps(text, ensure_ascii=False)


def written(value: Any) -> str:
    """A value as `as_json` reads it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _named(types: Any) -> frozenset[str]:
    names: Iterable[Any] = types if isinstance(types, list) else [types]
    found = frozenset(name for name in names if isinstance(name, str))
    return found | {"integer"} if "number" in found else found


def _kind_of_text(text: str) -> str | None:
    try:
        return _kind(json.loads(text, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case None:
            return "null"
        case list():
            return "array"
        case _:
            return "object"


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of a schema that a reference names; None if there is no such part."""
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
