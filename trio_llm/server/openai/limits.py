"""How large the parts of a request may be: what is checked before anything is made of them."""

from __future__ import annotations

from typing import Any

import orjson

from trio_llm.errors import InvalidRequest

MAX_ENTRIES = 4096
"""Of any array in a request, but a prompt's token ids."""
MAX_PROMPTS = 1024
"""Of one request for completions."""
MAX_TOOLS = 128
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_IDENTIFIER = 512
"""Characters of `user` and the like."""
MAX_DEPTH = 64
"""Levels of objects and arrays in a part of free form, such as a schema."""
MAX_FREE_FORM = 256 * 1024
"""Bytes of JSON of such a part."""

_NAMES = {str: "a string", bool: "a boolean", dict: "an object", list: "an array"}
_MAX_SHOWN = 60


def show(value: Any) -> str:
    """A value as JSON, cut short: errors go into logs, and prompts do not."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = orjson.dumps(value, default=str).decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def wrong_type(path: str, expected: str, value: Any) -> InvalidRequest:
    """The error for a field that holds another kind of value than it should."""
    return InvalidRequest(f"{path} must be {expected}, got {show(value)}", field=path, code="invalid_type")


def check_kind(value: Any, path: str, kind: type) -> None:
    """Refuse what is not of a kind.

    Raises:
        InvalidRequest: it is not.
    """
    if not isinstance(value, kind):
        raise wrong_type(path, _NAMES[kind], value)


def check_boolean(value: Any, path: str) -> None:
    """Refuse what is neither true nor false.

    Raises:
        InvalidRequest: it is not.
    """
    check_kind(value, path, bool)


def check_text(value: Any, path: str) -> None:
    """Refuse what is no string.

    Raises:
        InvalidRequest: it is not.
    """
    check_kind(value, path, str)


def check_object(value: Any, path: str) -> None:
    """Refuse what is no object.

    Raises:
        InvalidRequest: it is not.
    """
    check_kind(value, path, dict)


def check_count(value: Any, path: str) -> None:
    """Refuse what is no positive number of things.

    Raises:
        InvalidRequest: it is not.
    """
    if type(value) is not int or value < 1:
        raise wrong_type(path, "a positive integer", value)


def check_index(value: Any, path: str) -> None:
    """Refuse what is no small number.

    Raises:
        InvalidRequest: it is not.
    """
    if type(value) is not int or not 0 <= value <= MAX_ENTRIES:
        raise wrong_type(path, "the place of an entry", value)


def check_identifier(value: Any, path: str) -> None:
    """Refuse what is no short string.

    Raises:
        InvalidRequest: it is not.
    """
    check_kind(value, path, str)
    if len(value) > MAX_IDENTIFIER:
        raise InvalidRequest(f"{path} takes at most {MAX_IDENTIFIER} characters, got {len(value)}", field=path)


def check_metadata(value: Any, path: str) -> None:
    """Refuse what is no small mapping of strings.

    Raises:
        InvalidRequest: it is not.
    """
    check_kind(value, path, dict)
    if len(value) > MAX_METADATA:
        raise InvalidRequest(f"{path} takes at most {MAX_METADATA} keys, got {len(value)}", field=path)
    for name, text in value.items():
        if len(name) > MAX_METADATA_KEY:
            raise InvalidRequest(f"a key of {path} takes at most {MAX_METADATA_KEY} characters", field=path)
        where = f"{path}.{name}"
        check_kind(text, where, str)
        if len(text) > MAX_METADATA_VALUE:
            raise InvalidRequest(f"{where} takes at most {MAX_METADATA_VALUE} characters", field=where)


def check_free_form(value: Any, path: str) -> None:
    """Refuse a part of free form that is nested too deeply or is too large.

    Raises:
        InvalidRequest: it is.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            break
    else:
        raise InvalidRequest(f"{path} is nested more than {MAX_DEPTH} levels deep", field=path)
    size = len(orjson.dumps(value))
    if size > MAX_FREE_FORM:
        raise InvalidRequest(f"{path} is larger than {MAX_FREE_FORM} bytes: {size}", field=path)
