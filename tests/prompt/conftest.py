"""What tests of parsers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trio_llm.prompt.events import Event, joined


def parse(make: Callable[[], Any], pieces: Sequence[str]) -> list[Event]:
    """The events of a text in pieces, with neighbours joined."""
    parser = make()
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


@pytest.fixture
def check_every_cut() -> Callable[[Callable[[], Any], str], list[Event]]:
    """check_every_cut(make, text): cut into single characters and into two, a text gives what it gives whole; that."""

    def check(make: Callable[[], Any], text: str) -> list[Event]:
        whole = parse(make, [text])
        assert parse(make, list(text)) == whole
        for cut in range(len(text)):
            assert parse(make, [text[:cut], text[cut:]]) == whole
        return whole

    return check
