"""API keys: who may use the server."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from pathlib import Path

from quart import request

from trio_llm.config import ServerSettings, check_api_keys
from trio_llm.errors import ConfigurationError, TrioLLMError

OPEN_BLUEPRINTS = frozenset({"health"})
"""Whose routes need no key, so that whatever watches the process can use them."""


class InvalidAPIKey(TrioLLMError):
    """A request without a key, or with one that is not known."""

    kind = "invalid_api_key"


class Access:
    """The keys of one application, of which only digests are kept.

    Args:
        keys: those that are let in; none lets everybody in.
    """

    def __init__(self, keys: Collection[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

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

    def check(self) -> None:
        """Refuse the request that is being handled, unless it shows a key.  Its body is not looked at.

        A key comes as `Authorization: Bearer KEY`, or as Anthropic's clients send it, in `x-api-key`.

        Raises:
            InvalidAPIKey: it shows none, or a wrong one.
        """
        if not self.required or request.blueprint in OPEN_BLUEPRINTS:
            return
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        shown = [bearer.strip()] if scheme.lower() == "bearer" else []
        shown += request.headers.getlist("x-api-key")
        if not shown:
            raise InvalidAPIKey("this server wants an API key: send it as `Authorization: Bearer KEY`")
        if not any(self.allows(key) for key in shown):
            raise InvalidAPIKey("the API key is not known to this server")


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
    return Access(keys)


def _digest(key: str) -> bytes:
    # headers are decoded as latin-1, settings as UTF-8: keys are ASCII, which is checked where they are set
    return hashlib.sha256(key.encode()).digest()
