"""Errors of the engine in the words of the API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trio_llm.errors import TrioLLMError

_WORDS = frozenset({"prompt", "messages"})
"""Fields whose names are words too, of ours and of a template's."""


@contextmanager
def fields_called(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name fields as the client called them, not as the engine does.

    Args:
        names: the client's names by the engine's.
    """
    try:
        yield
    except TrioLLMError as error:
        rename(error, names)
        raise


def rename(error: TrioLLMError, *names: Mapping[str, str]) -> None:
    """Let an error name its field as the client called it.

    Args:
        names: the client's names by the engine's; of several, each by those before it.
    """
    for renaming in names:
        ours = error.field or ""
        theirs = renaming.get(ours)
        if theirs is not None:
            error.field = theirs
            if ours not in _WORDS:
                error.message = re.sub(rf"\b{re.escape(ours)}\b", theirs, error.message)


def names_of_tools(count: int) -> dict[str, str]:
    """Names for `fields_called` where a tool is no object with a `function` in it, but the function itself."""
    names = {f"tools[{place}].function.name": f"tools[{place}].name" for place in range(count)}
    return {"tool_choice.function.name": "tool_choice.name", **names}
