"""What stands between the texts of an embedding request and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trio_llm.engine.admission import longest_token
from trio_llm.errors import ContextLengthExceeded, InvalidRequest

Text = str | Sequence[int]
"""A text, or its token ids."""


class TextReader:
    """Makes token ids of texts, or says why they cannot be computed.

    Args:
        max_model_len: tokens that a text may have.
        vocab_size: token ids are below it.
    """

    def __init__(self, tokenizer: Any, max_model_len: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_characters = max_model_len * longest_token(tokenizer)
        self._vocab_size = vocab_size

    def token_ids(self, texts: Sequence[Text]) -> list[list[int]]:
        """The token ids of each text, with special tokens where it was no token ids already.
        It may take long: call it in a worker thread.

        Raises:
            InvalidRequest: a text is empty, or has tokens that the model does not know; `field` is "input".
            ContextLengthExceeded: a text is too long.
        """
        several = len(texts) > 1
        return [self._read(text, f"input[{index}]" if several else "input") for index, text in enumerate(texts)]

    def _read(self, text: Text, where: str) -> list[int]:
        if not len(text):
            raise InvalidRequest(f"{where} is empty", field="input")
        token_ids = self._encode(text, where) if isinstance(text, str) else list(text)
        if len(token_ids) > self._max_model_len:
            raise self._too_long(where, f"{len(token_ids)} tokens", prompt_tokens=len(token_ids))
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            message = f"{where} has a token id that is not in the vocabulary (0 to {self._vocab_size - 1})"
            raise InvalidRequest(message, field="input", limit=self._vocab_size)
        return token_ids

    def _encode(self, text: str, where: str) -> list[int]:
        # tokenisers of embedding models drop spaces, so these say nothing about the length
        characters = len("".join(text.split()))
        if characters > self._max_characters:
            raise self._too_long(where, f"{characters} characters")
        return list(self._tokenizer.encode(text))

    def _too_long(self, where: str, length: str, **details: int) -> ContextLengthExceeded:
        message = f"{where} has {length}, but the model takes at most {self._max_model_len} tokens"
        return ContextLengthExceeded(message, field="input", limit=self._max_model_len, **details)
