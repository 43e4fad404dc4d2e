"""The bytes of tokens, joined, are the bytes of their text, whatever the tokenizer and wherever they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.engine.test_detokenizer import KINDS, pieces, texts, trained
from trio_llm.engine.detokenizer import TokenDecoder
from trio_llm.engine.simulation import ByteTokenizer
from trio_llm.engine.token_bytes import TokenBytes, TokenText


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)  # the first call trains the tokenizer
@given(text=texts)
def test_joined_they_are_the_text(kind: str, text: str) -> None:
    tokenizer = trained(kind)
    decoder = TokenDecoder(tokenizer)
    lookup = TokenBytes(tokenizer, decoder)
    prompt, output = tokenizer.encode("fox"), tokenizer.encode(text)
    joined = b"".join(lookup[token].bytes or b"" for token in output)
    assert joined.decode() == "".join(pieces(decoder, prompt, output))


def test_half_an_emoji() -> None:
    for kind in ("byte-level", "llama", "gemma"):
        tokenizer = trained(kind)
        lookup = TokenBytes(tokenizer, TokenDecoder(tokenizer))
        tokens = tokenizer.encode("\U0001fae0")[-4:]
        assert [lookup[token] for token in tokens] == [
            TokenText(f"bytes:\\x{byte:02x}", bytes([byte])) for byte in "\U0001fae0".encode()
        ]


def test_special_tokens_are_no_text_unless_they_are_kept() -> None:
    for kind in KINDS:
        tokenizer = trained(kind)
        assert TokenBytes(tokenizer, TokenDecoder(tokenizer))[1] == TokenText("</s>", None)
        kept = TokenBytes(tokenizer, TokenDecoder(tokenizer, skip_special_tokens=False))[1]
        assert (kept.bytes or b"").strip() == b"</s>"


def test_every_token_of_a_byte_level_vocabulary() -> None:
    tokenizer = trained("byte-level")
    lookup = TokenBytes(tokenizer, TokenDecoder(tokenizer))
    for token in range(3, len(tokenizer)):
        data = lookup[token].bytes
        assert data is not None
        assert data.decode(errors="replace") == tokenizer.decode([token])


def test_tokens_that_are_byte_strings() -> None:
    class Tiktoken(ByteTokenizer):
        def convert_ids_to_tokens(self, token_id: int) -> bytes:
            return bytes([token_id])

    lookup = TokenBytes(Tiktoken(), TokenDecoder(Tiktoken()))
    assert lookup[0x9F] == TokenText("bytes:\\x9f", b"\x9f")
    assert lookup[0x41] == TokenText("A", b"A")


def test_a_tokenizer_that_only_decodes() -> None:
    lookup = TokenBytes(ByteTokenizer(), TokenDecoder(ByteTokenizer()))
    assert lookup[0x41] == TokenText("A", b"A")
