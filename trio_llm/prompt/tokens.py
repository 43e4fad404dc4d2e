"""What a tokenizer does, for those who ask for nothing else: text to token ids and back.

Long texts take seconds: call these in a worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trio_llm.prompt.chat_template import Conversation, render_text


def tokenize(tokenizer: Any, prompt: str | Conversation, *, add_special_tokens: bool) -> list[int]:
    """The token ids of a text, or of a conversation as the model's chat template writes it.

    Raises:
        InvalidRequest: the chat template refuses the conversation.
    """
    text = prompt if isinstance(prompt, str) else render_text(tokenizer, prompt)
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def token_strings(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Each token as the vocabulary spells it, or what it says where the tokenizer shows no vocabulary."""
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        return [detokenize(tokenizer, [token_id]) for token_id in token_ids]
    return [str(token) for token in tokenizer.convert_ids_to_tokens(list(token_ids))]


def detokenize(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of token ids, special tokens included."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


def special_tokens(tokenizer: Any) -> dict[str, str | None]:
    """The tokens that begin, end and fill texts, by the names that transformers has for them."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    tokens = {name: getattr(tokenizer, name, None) for name in names}
    return {name: None if token is None else str(token) for name, token in tokens.items()}
