"""JSON schemas of the kinds that structured output supports, and a validator for them, written from the specification."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def same(left: Any, right: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def is_valid(schema: Any, value: Any) -> bool:
    try:
        validate(schema, value)
    except AssertionError:
        return False
    return True


def validate(schema: Any, value: Any) -> None:
    """Raise AssertionError unless the schema allows the value.  Keywords that it does not know raise KeyError."""
    known = {"$ref", "additionalProperties", "required", "properties"}
    for keyword, argument in schema.items():
        match keyword:
            case "type":
                names = argument if isinstance(argument, list) else [argument]
                types = [TYPES[name] for name in names]
                assert any(isinstance(value, kind) for kind in types), (names, value)
                assert not isinstance(value, bool) or "boolean" in names
            case "enum":
                assert any(same(value, item) for item in argument), (argument, value)
            case "const":
                assert same(value, argument), (argument, value)
            case "anyOf":
                assert any(is_valid(inner, value) for inner in argument), (argument, value)
            case "minimum":
                assert not isinstance(value, int | float) or value >= argument
            case "maximum":
                assert not isinstance(value, int | float) or value <= argument
            case "minLength":
                assert not isinstance(value, str) or len(value) >= argument
            case "maxLength":
                assert not isinstance(value, str) or len(value) <= argument
            case "pattern":
                assert not isinstance(value, str) or re.search(argument, value)
            case "minItems":
                assert not isinstance(value, list) or len(value) >= argument
            case "maxItems":
                assert not isinstance(value, list) or len(value) <= argument
            case "items":
                for item in value if isinstance(value, list) else ():
                    validate(argument, item)
            case _:
                if keyword not in known:
                    raise KeyError(keyword)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        assert set(schema.get("required", ())) <= value.keys()
        for key, item in value.items():
            assert key in properties or schema.get("additionalProperties", True) is not False, key
            validate(properties.get(key, {}), item)


def texts(*, min_size: int = 0, max_size: int = 6) -> st.SearchStrategy[str]:
    """Of all characters but those that SmolLM2's tokenizer cannot spell."""
    alphabet = st.characters(
        max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d"
    )
    return st.text(alphabet, min_size=min_size, max_size=max_size)


_names = texts()
_constants = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | _names,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_names, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def _ranges(draw: st.DrawFn, low: str, high: str, least: int, most: int) -> dict[str, int]:
    first, second = sorted(draw(st.tuples(st.integers(least, most), st.integers(least, most))))
    return {low: first, high: second}


@st.composite
def _arrays(draw: st.DrawFn, items: st.SearchStrategy[Any]) -> dict[str, Any]:
    return {"type": "array", "items": draw(items), **draw(_ranges("minItems", "maxItems", 0, 3))}


@st.composite
def _objects(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_names, values, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def schemas() -> st.SearchStrategy[Any]:
    """Schemas whose values are all short."""
    leaves = (
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])
        | _ranges("minimum", "maximum", -300, 300).map(lambda limits: {"type": "integer", **limits})
        | _ranges("minLength", "maxLength", 0, 6).map(lambda limits: {"type": "string", **limits})
        | st.sampled_from([{"type": "string", "pattern": "^[a-f]{2,4}-[0-9é]$"}, {"type": "string", "maxLength": 0}])
        | st.lists(_constants, min_size=1, max_size=4).map(lambda values: {"enum": values})
        | _constants.map(lambda value: {"const": value})
    )
    return st.recursive(
        leaves,
        lambda inner: (
            _arrays(inner) | _objects(inner) | st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s})
        ),
        max_leaves=6,
    )
