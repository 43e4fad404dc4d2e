"""From plain JSON to wire objects: strict, and every complaint has the path of its field.

cattrs would turn 1 into "1" and "no" into True, so each plain type has a strict hook.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar, get_args, get_origin

import attrs
import cattrs
from cattrs.cols import list_structure_factory
from cattrs.errors import (
    AttributeValidationNote,
    ClassValidationError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn

from trio_llm.core.sampling_params import MAX_LOGIT_BIAS
from trio_llm.errors import InvalidRequest
from trio_llm.server.openai.limits import MAX_ENTRIES, show, wrong_type

T = TypeVar("T")

_NAMES = {str: "a string", bool: "a boolean", int: "an integer", float: "a number"}


def structure(document: dict[str, Any], kind: type[T], path: str = "") -> T:
    """A wire object from its fields, those of them that are not null.

    Args:
        path: where the object stands in the body; "" is the body itself.

    Raises:
        InvalidRequest: one is missing or wrong; `field` is its path.
    """
    try:
        return _converter.structure(document, kind)
    except (ClassValidationError, IterableValidationError) as group:
        raise _explain(group, path) from None


class _WrongValue(ValueError):
    """Carries what was expected and what came, until the path is known.

    Args:
        where: the rest of the path.
        code: of the error.
    """

    def __init__(self, expected: str, value: Any, where: str = "", *, code: str = "invalid_type") -> None:
        super().__init__(expected)
        self.expected = expected
        self.value = value
        self.where = where
        self.code = code


def _strict(kind: type) -> Any:
    def hook(value: Any, _: Any) -> Any:
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        if kind is int and type(value) is float and abs(value) >= 2**63:
            # the JSON parser knows integers of 64 bits, and reads longer ones as floats
            raise _WrongValue("an integer of at most 64 bits", value)
        raise _WrongValue(_NAMES[kind], value)

    return hook


def _literal(value: Any, annotation: Any) -> Any:
    choices = get_args(annotation)
    if value in choices:
        return value
    code = "invalid_value" if isinstance(value, str) else "invalid_type"
    raise _WrongValue(f"one of {', '.join(choices)}", value, code=code)


def _strings(value: Any, _: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _WrongValue("a string or an array of strings", value)
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise _WrongValue("a string", text, f"[{index}]")
    return value


def _text_or_objects(value: Any, annotation: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        (objects,) = (part for part in get_args(annotation) if _origin(part) is list)
        return _converter.structure(value, objects)
    raise _WrongValue("a string or an array of objects", value)


def _is_text_or_objects(annotation: Any) -> bool:
    """A string, or a list of objects of one class."""
    parts = get_args(annotation)
    return str in parts and any(_origin(part) is list and attrs.has(get_args(part)[0]) for part in parts)


def _text_or_items(value: Any, _: Any) -> Any:
    if not isinstance(value, str | list):
        raise _WrongValue("a string or an array", value)
    return value


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


def _token_ids(value: Any, _: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise _WrongValue("an array of token ids", value)
    return tuple(value)


def _biases(value: Any, _: Any) -> dict[int, float]:
    """JSON has only strings for keys."""
    if not isinstance(value, dict):
        raise _WrongValue("an object", value)
    if len(value) > MAX_LOGIT_BIAS:
        raise _WrongValue(f"an object of at most {MAX_LOGIT_BIAS} tokens", value, code="invalid_value")
    biases = {}
    for name, bias in value.items():
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise _WrongValue("an object whose keys are token ids", name)
        if type(bias) not in (int, float):
            raise _WrongValue("a number", bias, f".{name}")
        biases[int(name)] = bias
    return biases


def _any_object(value: Any, _: Any) -> Any:
    if not isinstance(value, dict):
        raise _WrongValue("an object", value)
    return value


def _object_or_text(value: Any, _: Any) -> Any:
    if not isinstance(value, dict | str):
        raise _WrongValue("an object or a string", value)
    return value


def _checked(kind: Any, expected: str, make: Any) -> Any:
    """A hook factory: what `make` would structure, if it is of the right JSON kind at all."""

    def factory(annotation: Any) -> Any:
        make_structure: Any = make(annotation, _converter)

        def hook(value: Any, _: Any) -> Any:
            if not isinstance(value, kind):
                raise _WrongValue(expected, value)
            if kind is list and len(value) > MAX_ENTRIES:
                raise _WrongValue(f"an array of at most {MAX_ENTRIES} entries", value, code="invalid_value")
            return make_structure(value, annotation)

        return hook

    return factory


def _origin(annotation: Any) -> Any:
    return get_origin(annotation)


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
        path += error.where
        if error.code == "invalid_type":
            return wrong_type(path, error.expected, error.value)
        return InvalidRequest(f"{path} must be {error.expected}, got {show(error.value)}", field=path, code=error.code)
    if isinstance(error, KeyError):
        # the note on it names the object's field already
        return InvalidRequest(f"{path} is missing", field=path, code="missing_required_parameter")
    if isinstance(error, InvalidRequest):
        return error  # of a validator of the body's own
    return InvalidRequest(f"{path} is not valid: {error}", field=path)


_EXACT = {
    str | list[str]: _strings,
    str | list[dict[str, Any]]: _text_or_items,
    str | list[int] | list[str] | list[list[int]]: _prompt,
    tuple[int, ...]: _token_ids,
    dict[int, float]: _biases,
    dict[str, Any]: _any_object,
    str | dict[str, Any]: _object_or_text,
}
"""Hooks by annotation; a field that may be absent has the same with None."""


def _exactly(annotation: Any) -> bool:
    return any(annotation in (exact, exact | None) for exact in _EXACT)


def _hook_for(annotation: Any) -> Any:
    return next(hook for exact, hook in _EXACT.items() if annotation in (exact, exact | None))


_converter = cattrs.Converter(detailed_validation=True)
for _kind in (str, bool, int, float):
    _converter.register_structure_hook(_kind, _strict(_kind))
_converter.register_structure_hook_factory(
    lambda annotation: _origin(annotation) is list, _checked(list, "an array", list_structure_factory)
)
_converter.register_structure_hook_factory(attrs.has, _checked(dict, "an object", make_dict_structure_fn))
_converter.register_structure_hook_func(lambda annotation: _origin(annotation) is Literal, _literal)
_converter.register_structure_hook_func(_is_text_or_objects, _text_or_objects)
_converter.register_structure_hook_factory(_exactly, _hook_for)
