"""Byte-level vocabularies: each letter of a token stands for a byte, so that tokens are read without the tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import orjson


class ByteLevel(dict[int, bytes]):
    """The bytes of tokens, each worked out when it is first asked for.

    Args:
        spell: the letters of a token; None if there is no such token.
    """

    def __init__(self, spell: Callable[[int], str | None]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = data = bytes_of(self._spell(token_id) or "")
        return data


def byte_level(tokenizer: Any) -> ByteLevel | None:
    """What a tokenizer decodes with, if that is all it does: UTF-8 of the bytes, wrong ones replaced."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if backend is None or decoder is None or orjson.loads(decoder.__getstate__()).get("type") != "ByteLevel":
        return None
    return ByteLevel(backend.id_to_token)


def bytes_of(token: str) -> bytes:
    """The bytes that a token's letters stand for."""
    letters = byte_letters()
    spelled = [letters.get(letter) for letter in token]
    # what has other letters was added to the vocabulary as it is
    return token.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)


@functools.cache
def byte_letters() -> dict[str, int]:
    """The alphabet of byte-level vocabularies: printable bytes stand for themselves, the others,
    in order, for the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
