"""The bytes that single tokens stand for, and how a token is shown.

A text's tokens may be cut inside a character, so a token alone has bytes and not always a
text.  The bytes of an output's tokens, joined, are the bytes of its text.
"""

from __future__ import annotations

from typing import Any

import attrs

from trio_llm.engine.byte_level import bytes_of
from trio_llm.engine.detokenizer import REPLACEMENT, TokenDecoder


@attrs.frozen
class TokenText:
    """One token as clients see it."""

    text: str
    """Its text; `bytes:\\xf0\\x9f` if its bytes are no text by themselves."""
    bytes: bytes | None
    """None if it is no part of the text: a special token that is left out of it."""


class TokenBytes:
    """Looks up tokens; each is worked out once.

    Three kinds of tokenizer tell what is in half a character: byte-level ones, which spell every
    byte as a letter of their own; those with byte-fallback tokens; and those whose tokens are byte
    strings.  Of all others only the text of a token is known.

    Args:
        tokenizer: anything with `decode`.
        decoder: of this tokenizer; says which tokens are no text.
    """

    def __init__(self, tokenizer: Any, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._convert = getattr(tokenizer, "convert_ids_to_tokens", None)
        self._is_byte_level = _is_byte_level(tokenizer)
        self._anchor = self._find_anchor(tokenizer)
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token_id: int) -> TokenText:
        """A token of the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> TokenText:
        token = None if self._convert is None else self._convert(token_id)
        if token_id in self._decoder.vanishing_ids:
            return TokenText(str(token or ""), None)
        data = self._bytes(token_id, token)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return TokenText(text, data)

    def _bytes(self, token_id: int, token: str | bytes | None) -> bytes:
        if isinstance(token, bytes):
            return token
        if token is not None and self._is_byte_level:
            return bytes_of(token)
        if token is not None and token_id in self._decoder.byte_ids:
            return bytes([int(token[3:5], 16)])
        # in the middle of a text, where a leading space is one
        before, text = self._decoder.decode(self._anchor), self._decoder.decode([*self._anchor, token_id])
        return text.removeprefix(before).encode()

    def _find_anchor(self, tokenizer: Any) -> list[int]:
        """Tokens that a text may begin with, of which nothing changes whatever follows."""
        if not hasattr(tokenizer, "encode"):
            return []
        try:
            anchor = list(tokenizer.encode("a", add_special_tokens=False))
        except TypeError:
            return []
        return [] if REPLACEMENT in self._decoder.decode(anchor) else anchor


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
