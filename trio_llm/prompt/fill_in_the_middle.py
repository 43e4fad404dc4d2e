"""Prompts for a gap between two texts, for models that were trained to fill one.

There is no template for it: what the model knows is told by the special tokens of its vocabulary.
"""

from __future__ import annotations

from typing import Any

from trio_llm.errors import UnsupportedParameter

_PATTERNS = {
    # StarCoder, Granite, SantaCoder's successors
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"): "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    # Qwen's coders, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"): (
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
    ),
    # DeepSeek's coders
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"): (
        "<\uff5cfim\u2581begin\uff5c>{prefix}<\uff5cfim\u2581hole\uff5c>{suffix}<\uff5cfim\u2581end\uff5c>"
    ),
    # Codestral
    ("[SUFFIX]", "[PREFIX]"): "[SUFFIX]{suffix}[PREFIX]{prefix}",
}
"""How a gap is written, by the tokens that a vocabulary must have."""


def fill_in_the_middle(tokenizer: Any, prefix: str, suffix: str) -> str:
    """The prompt whose continuation fills the gap between two texts.

    Raises:
        UnsupportedParameter: the model's vocabulary has no tokens for it; `field` is "suffix".
    """
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    for tokens, pattern in _PATTERNS.items():
        if all(token in added for token in tokens):
            return pattern.format(prefix=prefix, suffix=suffix)
    text = "suffix is only for models with tokens for filling in the middle, which this one does not have"
    raise UnsupportedParameter(text, field="suffix")
