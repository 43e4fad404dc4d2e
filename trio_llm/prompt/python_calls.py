"""Calls in the syntax of Python: `[weather(city="Bern", days=2), time()]`.

Read by hand and not with Python's own parser: that one warns about odd strings, has limits
of its own, and takes far more than literals.
"""

from __future__ import annotations

import re
from typing import Any

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_KEYWORD = re.compile(r"[^\W\d]\w*")
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_STRING = re.compile(r"\"(?:[^\"\\\x00-\x1f]|\\.)*\"|'(?:[^'\\\x00-\x1f]|\\.)*'")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_MAX_DEPTH = 64


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a list: names, and arguments by keyword.

    Values are literals of Python; JSON's names for them do too.

    Raises:
        ValueError: it is something else.
    """
    reader = _Reader(text)
    calls = reader.items("[", "]", reader.call)
    if reader.rest():
        raise ValueError("more than a list")
    return calls


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def call(self) -> tuple[str, dict[str, Any]]:
        name = self.take(_NAME)
        arguments = self.items("(", ")", self.argument)
        return name, _unique(arguments)

    def argument(self) -> tuple[str, Any]:
        keyword = self.take(_KEYWORD)
        self.expect("=")
        return keyword, self.value()

    def value(self) -> Any:
        rest = self.rest()
        if rest[:1] == "[":
            return self.items("[", "]", self.value)
        if rest[:1] == "{":
            return _unique(self.items("{", "}", self.member))
        if rest[:1] and rest[0] in "\"'":
            return self.string()
        if rest[:1].isalpha():
            name = self.take(_KEYWORD)
            if name not in _CONSTANTS:
                raise ValueError("a name that is no constant")
            return _CONSTANTS[name]
        number = self.take(_NUMBER)
        try:
            return int(number)
        except ValueError:
            return float(number)

    def member(self) -> tuple[str, Any]:
        key = self.string()
        self.expect(":")
        return key, self.value()

    def string(self) -> str:
        parts = [self.take(_STRING)]
        while self.rest()[:1] in ("'", '"'):  # neighbours are one string
            parts.append(self.take(_STRING))
        text = "".join(_ESCAPE.sub(_unescape, part[1:-1]) for part in parts)
        # halves of a surrogate pair become one character; UnicodeError, a ValueError, where one is alone
        return text.encode("utf-16", "surrogatepass").decode("utf-16")

    def items(self, opening: str, closing: str, read: Any) -> list[Any]:
        """What stands in brackets, with commas between and perhaps after it."""
        self.expect(opening)
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        found: list[Any] = []
        while self.rest()[:1] != closing:
            if found:
                self.expect(",")
                if self.rest()[:1] == closing:
                    break
            found.append(read())
        self.expect(closing)
        self.depth -= 1
        return found

    def rest(self) -> str:
        """The next few characters that are no space."""
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return self.text[self.at : self.at + 1]

    def take(self, pattern: re.Pattern[str]) -> str:
        self.rest()
        found = pattern.match(self.text, self.at)
        if not found:
            raise ValueError("something else was expected")
        self.at = found.end()
        return found.group()

    def expect(self, character: str) -> None:
        if self.rest() != character:
            raise ValueError(f"{character} was expected")
        self.at += 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def _unescape(found: re.Match[str]) -> str:
    escape = found.group(1)
    if escape[0] in "uUx" and len(escape) > 1:
        return chr(int(escape[1:], 16))  # ValueError above U+10FFFF
    return _ESCAPES.get(escape, "\\" + escape)  # as Python leaves those that it does not know
