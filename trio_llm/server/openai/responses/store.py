"""Responses that can be asked for again, and continued: the last few, in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import orjson

from trio_llm.errors import TrioLLMError
from trio_llm.server.openai.responses.wire import Response, Status
from trio_llm.server.openai.wire import Message

MAX_STORED_BYTES = 256 * 2**20
"""Of all responses together, about."""


class ResponseNotFound(TrioLLMError):
    """No response of that id is stored: it never was, or others have taken its place."""

    kind = "response_not_found"


class InFlight(Protocol):
    """A response that is being made."""

    def response(self, status: Status | None = None) -> Response:
        """As it stands, or as if it had a status."""


@attrs.frozen
class StoredResponse:
    """What is kept of one."""

    id: str
    body: bytes
    """The answer, as JSON."""
    history: Sequence[Message]
    """All messages that led to it, and its own, without instructions."""
    input_items: Sequence[dict[str, Any]]

    size: int = attrs.field(init=False)
    """Bytes, about: history repeats what is in bodies before, but those may be gone."""

    @size.default
    def _count(self) -> int:
        return len(self.body) + len(orjson.dumps(self.input_items)) + sum(map(_size, self.history))


def _size(message: Message) -> int:
    calls = sum(len(call.function.arguments) for call in message.tool_calls or ())
    return len(str(message.content)) + len(message.reasoning_content or "") + calls


class ResponseStore:
    """The last responses of an application.

    Args:
        capacity: how many; 0 stores none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_flight: dict[str, InFlight] = {}
        """Those that are being made, by id, stored or not."""
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size = 0

    def add(self, response: StoredResponse) -> None:
        """Keep a response, in place of those that were not used for longest."""
        self._responses[response.id] = response
        self._size += response.size
        while len(self._responses) > self.capacity or self._size > MAX_STORED_BYTES:
            _, oldest = self._responses.popitem(last=False)
            self._size -= oldest.size

    def get(self, response_id: str, *, field: str = "response_id") -> StoredResponse:
        """A response.

        Args:
            field: that names it, for the error.

        Raises:
            ResponseNotFound: it is not stored.
        """
        found = self._responses.get(response_id)
        if found is None:
            raise ResponseNotFound(f"there is no stored response {response_id[:80]!r}", field=field)
        self._responses.move_to_end(response_id)
        return found

    def delete(self, response_id: str) -> None:
        """Forget a response.

        Raises:
            ResponseNotFound: it is not stored.
        """
        self._size -= self.get(response_id).size
        del self._responses[response_id]
