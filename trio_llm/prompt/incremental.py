"""Parsers that take their text in pieces, wherever it is cut.

A parser is written as one generator that reads from front to back, as if all of the text
were there: where it needs more it yields, and goes on when the next piece has come.  So
there is one implementation for streams and for whole texts.  It reads ahead in the
buffer by positions, and only then decides to drop a part or to say it as text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TypeVar

from trio_llm.prompt.events import Event, TextPiece, joined

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser: yields where it needs more text, and returns what it has found."""

_SPACE = re.compile(r"\s*")


class IncrementalParser(ABC):
    """Text in, events out; what is no more than text comes out as text, in order."""

    def __init__(self) -> None:
        self._buffer = ""
        """Text that was neither said nor dropped yet."""
        self._ended = False
        self._events: list[Event] = []
        self._steps = self._run()
        next(self._steps)

    def push(self, text: str) -> list[Event]:
        """Take the next piece; gives what is certain now."""
        if self._ended:
            raise RuntimeError("the parser has been finished")
        if text:
            self._buffer += text
            next(self._steps)
        return self._take_events()

    def finish(self) -> list[Event]:
        """Nothing follows: what was held back is decided as it stands."""
        if not self._ended:
            self._ended = True
            next(self._steps, None)
        return self._take_events()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """The parser; what it leaves of the text is text."""

    def _say(self, text: str) -> None:
        """Give text out."""
        self._events.append(TextPiece(text))

    # --- for parsers ---

    def _more(self) -> Steps[bool]:
        """Wait for more text; False if there will be none."""
        if self._ended:
            return False
        yield
        return True

    def _drop(self, end: int) -> None:
        """Consume the buffer up to `end`."""
        self._buffer = self._buffer[end:]

    def _take_text(self, end: int) -> None:
        """Say the buffer up to `end`."""
        text = self._buffer[:end]
        self._drop(end)
        if text:
            self._say(text)

    def _until(self, *markers: str) -> Steps[str]:
        """Say what comes before the first of the markers, and leave that at the front of the
        buffer; "" if there is none before the end."""
        pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
        while True:
            found = pattern.search(self._buffer)
            if found:
                self._take_text(found.start())
                return found.group()
            self._take_text(len(self._buffer) - _overlap(self._buffer, markers))
            if not (yield from self._more()):
                self._take_text(len(self._buffer))
                return ""

    def _after(self, at: int, skipped: re.Pattern[str] = _SPACE) -> Steps[int]:
        """Where what may be skipped (by default, white space) from `at` on has ended."""
        while True:
            found = skipped.match(self._buffer, at)
            end = found.end() if found else at
            if end < len(self._buffer) or not (yield from self._more()):
                return end

    def _starts(self, at: int, *texts: str) -> Steps[str]:
        """Which of the texts stands at `at`; "" if none does.  None of them begins another."""
        longest = max(map(len, texts), default=0)
        while True:
            rest = self._buffer[at : at + longest]
            whole = next((text for text in texts if rest.startswith(text)), "")
            if whole or not any(text.startswith(rest) for text in texts) or not (yield from self._more()):
                return whole

    def _find(self, text: str, at: int) -> Steps[int]:
        """Where a text stands, from `at` on; -1 if it does not."""
        while True:
            found = self._buffer.find(text, at)
            at = max(at, len(self._buffer) - len(text) + 1)
            if found >= 0 or not (yield from self._more()):
                return found

    def _value_end(self, value: BracketedValue) -> Steps[int]:
        """Where a value ends, or 0 if it is none or does not end."""
        while value.is_open and value.read(self._buffer):
            if not (yield from self._more()):
                return 0
        return value.end

    # ---

    def _run(self) -> Steps[None]:
        yield  # nothing has come yet
        yield from self._parse()
        while True:
            self._take_text(len(self._buffer))
            if not (yield from self._more()):
                return

    def _take_events(self) -> list[Event]:
        if not self._events:
            return []
        events, self._events = joined(self._events), []
        return events


def _overlap(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of a text that a marker could begin with."""
    longest = min(max(map(len, markers)) - 1, len(text))
    if not any(marker[0] in text[-longest:] for marker in markers):
        return 0  # nearly always
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0


class BracketedValue:
    """How far a value in brackets reaches, read once and in pieces.

    Brackets are counted, those in strings are not.  Whether the value is well formed is for
    others to say, but a string with a control character in it is none.

    Args:
        start: where its opening bracket stands.
        quotes: characters that begin and end strings.
    """

    def __init__(self, start: int, quotes: str = '"') -> None:
        self.end = 0
        """Where it ends, once it has."""
        self.broken_at = 0
        """Where it was found out that it is none."""
        self._at = start
        self._depth = 0
        self._quote = ""
        self._outside = re.compile(rf"[\[\](){{}}{quotes}]")

    @property
    def is_open(self) -> bool:
        """Whether it has not ended yet."""
        return not self.end and not self.broken_at

    def read(self, buffer: str) -> bool:
        """Go on in a buffer that has grown; True if the value still has not ended."""
        while self.is_open:
            pattern = _IN_STRING[self._quote] if self._quote else self._outside
            found = pattern.search(buffer, self._at)
            if not found:
                self._at = len(buffer)
                return True
            at, character = found.start(), found.group()
            if character == "\\":
                if at + 1 == len(buffer):
                    self._at = at
                    return True
                self._at = at + 2
                continue
            self._at = at + 1
            if character < " ":
                self.broken_at = at
            elif character in "\"'":
                self._quote = "" if self._quote else character
            else:
                self._depth += 1 if character in "[({" else -1
                if self._depth == 0:
                    self.end = self._at
        return False


_IN_STRING = {quote: re.compile(rf"[\x00-\x1f\\{quote}]") for quote in "\"'"}
