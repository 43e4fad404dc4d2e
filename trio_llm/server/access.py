"""API keys: who may use the server, and how much of it at a time."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from quart import Request

from trio_llm.config import ServerSettings, check_api_keys
from trio_llm.errors import ConfigurationError, TrioLLMError
from trio_llm.server.exchange import Exchange

OPEN_BLUEPRINTS = frozenset({"health"})
"""Whose routes need no key, so that whatever watches the process can use them."""


CHALLENGES = ("Bearer", 'Basic realm="trio_llm"')
"""What a request without a key is told to send: programs the first, browsers the second."""
_ENDING = frozenset({"aborts.abort", "responses.cancel_response"})
"""Endpoints that end requests: whoever has too many must be able to."""


class InvalidAPIKey(TrioLLMError):
    """A request without a key, or with one that is not known."""

    kind = "invalid_api_key"


class TooManyRequests(TrioLLMError):
    """A key has as many requests in flight as it may have."""

    kind = "too_many_requests"


class Access:
    """The keys of one application, of which only digests are kept.

    Args:
        keys: those that are let in; none lets everybody in.
        max_requests: that one key may have in flight; None is no limit.
    """

    def __init__(self, keys: Collection[str] = (), max_requests: int | None = None) -> None:
        self._digests = [_digest(key) for key in keys]
        self._max_requests = max_requests
        self._in_flight: Counter[bytes] = Counter()

    @property
    def required(self) -> bool:
        """Whether there are keys at all."""
        return bool(self._digests)

    def allows(self, key: str) -> bool:
        """Whether a key is among ours.

        All are compared, and each in constant time: how long it takes says nothing about them.
        """
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def let_in(self, request: Request, exchange: Exchange) -> None:
        """Refuse a request, unless it shows a key that may have one more.  Its body is not looked at.

        A key comes as `Authorization: Bearer KEY`; as Anthropic's clients send it, in `x-api-key`; or
        as browsers do, as the password of `Authorization: Basic`.

        Args:
            exchange: of the request, which counts for its key until this ends.

        Raises:
            InvalidAPIKey: it shows none, or a wrong one.
            TooManyRequests: its key has as many in flight as it may.
        """
        if not self.required or request.blueprint in OPEN_BLUEPRINTS:
            return
        shown = _shown(request)
        if not shown:
            raise InvalidAPIKey("this server wants an API key: send it as `Authorization: Bearer KEY`")
        key = next((key for key in shown if self.allows(key)), None)
        if key is None:
            raise InvalidAPIKey("the API key is not known to this server")
        if self._max_requests is not None and request.method == "POST" and request.endpoint not in _ENDING:
            self._count(_digest(key), self._max_requests, exchange)

    def _count(self, digest: bytes, limit: int, exchange: Exchange) -> None:
        if self._in_flight[digest] >= limit:
            text = f"this API key has {limit} requests in flight, as many as it may: wait until one has ended"
            raise TooManyRequests(text, limit=limit)
        self._in_flight[digest] += 1
        exchange.at_end(lambda: self._in_flight.subtract((digest,)))


def access_of(settings: ServerSettings) -> Access:
    """The keys that the settings name, in `api_key` and in the file of `api_key_file`.

    Raises:
        ConfigurationError: the file cannot be read or holds no key.
    """
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        try:
            lines = Path(settings.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigurationError(
                f"cannot read api_key_file {settings.api_key_file}: {reason}", field="api_key_file"
            ) from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            # to start without keys would be to let everybody in
            raise ConfigurationError(f"api_key_file {settings.api_key_file} holds no key", field="api_key_file")
        check_api_keys(found, field="api_key_file")
        keys += found
    return Access(keys, settings.max_requests_per_key)


def _shown(request: Request) -> list[str]:
    """The keys that a request shows."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    shown = request.headers.getlist("x-api-key")
    match scheme.lower():
        case "bearer":
            shown.insert(0, credentials.strip())
        case "basic":
            with contextlib.suppress(ValueError):  # what is no base64 shows none
                shown.insert(0, base64.b64decode(credentials, validate=True).decode("latin1").partition(":")[2])
    return shown


def _digest(key: str) -> bytes:
    # headers are decoded as latin-1, settings as UTF-8: keys are ASCII, which is checked where they are set
    return hashlib.sha256(key.encode()).digest()
