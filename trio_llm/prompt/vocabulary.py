"""What a tokenizer's vocabulary says about single tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """The special tokens: those that decoding leaves out where it is asked to.

    More than the tokenizer's `all_special_ids`, which are only those that have a role.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(getattr(tokenizer, "all_special_ids", ())) | {token for token, how in added.items() if how.special}


def marker_tokens(tokenizer: Any, markers: Collection[str]) -> dict[str, int]:
    """Those of the markers that the tokenizer has as one token each, special or not."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(how.content): token for token, how in added.items() if how.content in markers}
