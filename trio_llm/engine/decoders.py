"""Decoders: of one tokenizer, for whatever special tokens a text is to show."""

from __future__ import annotations

from typing import Any

from trio_llm.core.sampling_params import SamplingParams
from trio_llm.engine.detokenizer import TokenDecoder
from trio_llm.engine.token_bytes import TokenBytes

_Shown = tuple[bool, frozenset[int]]
"""Which special tokens the text has: whether they are left out, and those that are not."""


class Decoders:
    """Makes each decoder once: it looks at the whole vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decoders: dict[_Shown, TokenDecoder] = {}
        self._token_bytes: dict[_Shown, TokenBytes] = {}
        self.decoder(SamplingParams())  # most want this one, and the first of them should not wait for it

    def decoder(self, params: SamplingParams) -> TokenDecoder:
        """Makes text of tokens as `params` wants it."""
        shown = _shown(params)
        known = self._decoders.get(shown)
        if known is None:
            skip, keep = shown
            known = self._decoders[shown] = TokenDecoder(self._tokenizer, skip_special_tokens=skip, keep=keep)
        return known

    def token_bytes(self, params: SamplingParams) -> TokenBytes:
        """Tells what single tokens stand for in such a text."""
        shown = _shown(params)
        known = self._token_bytes.get(shown)
        if known is None:
            known = self._token_bytes[shown] = TokenBytes(self._tokenizer, self.decoder(params))
        return known


def _shown(params: SamplingParams) -> _Shown:
    return params.skip_special_tokens, frozenset(params.keep_special_tokens if params.skip_special_tokens else ())
