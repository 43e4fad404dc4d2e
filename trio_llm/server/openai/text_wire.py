"""The objects of the endpoints that generate nothing, embeddings and the tokenizer, as they travel."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trio_llm.server.openai.wire import Message, Tool


@attrs.frozen(kw_only=True)
class EmbeddingRequest:
    model: str
    input: str | list[int] | list[str] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


@attrs.frozen(kw_only=True)
class Embedding:
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Or, as base64, the bytes of 32-bit floats, the lowest first."""


@attrs.frozen(kw_only=True)
class EmbeddingUsage:
    prompt_tokens: int
    total_tokens: int


@attrs.frozen(kw_only=True)
class EmbeddingList:
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@attrs.frozen(kw_only=True)
class TokenizeRequest:
    model: str | None = None
    """None is the model that is listed first."""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    """None adds those of the tokenizer to a prompt, and none to messages, whose template writes its own."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


@attrs.frozen(kw_only=True)
class TokenizeAnswer:
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


@attrs.frozen(kw_only=True)
class DetokenizeRequest:
    model: str | None = None
    """None is the model that is listed first."""
    tokens: tuple[int, ...]


@attrs.frozen(kw_only=True)
class DetokenizeAnswer:
    prompt: str


@attrs.frozen(kw_only=True)
class TokenizerInfo:
    model: str
    tokenizer_class: str
    vocab_size: int
    """Token ids of the model are below it."""
    max_model_len: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    cls_token: str | None
    sep_token: str | None
    mask_token: str | None
    chat_template: str | None
