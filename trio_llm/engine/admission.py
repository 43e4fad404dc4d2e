"""What stands between a prompt and the engine: token ids, and whether they can be served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from trio_llm.core.sampling_params import SamplingParams, StructuredOutput
from trio_llm.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from trio_llm.prompt.chat_template import Conversation, encode_prompt, render_chat
from trio_llm.prompt.truncation import Dropped, Room, Truncation, tokenize_to_fit

if TYPE_CHECKING:
    from trio_llm.core.grammar import Grammar, GrammarCompiler

COMPILE_TIMEOUT = 10.0
"""Seconds that a structured output may take to compile, waiting for others included."""

T = TypeVar("T")

_UNKNOWN_LENGTH = 1 << 20

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]] | Conversation
"""A text to continue, token ids, chat messages, or messages with tools and other wishes."""


def longest_token(tokenizer: Any) -> int:
    """Characters that one token can stand for, at most; very many if the tokenizer shows no vocabulary."""
    if not hasattr(tokenizer, "get_vocab"):
        return _UNKNOWN_LENGTH
    return max(map(len, tokenizer.get_vocab()), default=_UNKNOWN_LENGTH)


def check_length(prompt: Prompt, max_characters: int, *, max_model_len: int) -> None:
    """Refuse at once what is too long however it is tokenised: tokenising it would take seconds.

    Raises:
        ContextLengthExceeded: it is.
    """
    items = prompt.messages if isinstance(prompt, Conversation) else prompt
    texts = [items] if isinstance(items, str) else [_text(item) for item in items if isinstance(item, Mapping)]
    length = sum(map(len, texts))
    if length > max_characters:
        raise ContextLengthExceeded(
            f"the prompt has {length} characters, more than the context of {max_model_len} tokens can hold",
            field="prompt",
            limit=max_model_len,
        )


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


async def tokenize(tokenizer: Any, prompt: Prompt, limiter: trio.CapacityLimiter) -> list[int]:
    """The token ids of a prompt; text and messages are rendered in a worker thread.

    Args:
        limiter: of the threads; who is cancelled while waiting for one starts no work.

    Raises:
        InvalidRequest: the prompt is none of these, or the chat template refuses it.
    """
    prompt = _as_prompt(prompt)
    if isinstance(prompt, str):
        return await _in_thread(encode_prompt, tokenizer, prompt, limiter)
    if isinstance(prompt, Conversation):
        return await _in_thread(render_chat, tokenizer, prompt, limiter)
    return prompt


async def tokenize_truncated(
    tokenizer: Any, prompt: Prompt, truncation: Truncation, room: Room, limiter: trio.CapacityLimiter
) -> tuple[list[int], Dropped | None]:
    """`tokenize`, cutting what is too long.

    Raises:
        ContextLengthExceeded: what must stay of it is too long.
    """
    cut = partial(tokenize_to_fit, tokenizer, _as_prompt(prompt), truncation, room)
    return await trio.to_thread.run_sync(cut, abandon_on_cancel=True, limiter=limiter)


def _as_prompt(prompt: Prompt) -> str | list[int] | Conversation:
    if isinstance(prompt, str | Conversation):
        return prompt
    items: list[Any] = list(prompt)
    if items and isinstance(items[0], Mapping):
        return Conversation(items)
    if not all(type(token) is int for token in items):
        raise InvalidRequest("a prompt is a text, token ids, or messages", field="prompt")
    return items


async def tokenize_bad_words(
    tokenizer: Any, words: Sequence[str], limiter: trio.CapacityLimiter
) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell words: at the beginning of a text, and after a space."""
    return tuple(await _in_thread(_encode_words, tokenizer, words, limiter)) if words else ()


def _encode_words(tokenizer: Any, words: Iterable[str]) -> list[tuple[int, ...]]:
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, f" {bare}") if bare else (word,):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    found.pop((), None)
    return list(found)


async def compile_grammar(
    compiler: GrammarCompiler, structure: StructuredOutput | None, limiter: trio.CapacityLimiter
) -> Grammar | None:
    """What a structured output becomes; compiled in a worker thread unless it was lately.

    A caller that is cancelled, or has waited for too long, leaves the thread to end alone, and what
    it makes to the next who asks for it.

    Args:
        limiter: of the threads.

    Raises:
        InvalidRequest: it cannot be compiled, or takes too long.
        QueueFull: others did not leave the time to begin with it.
    """
    if structure is None:
        return None
    known = compiler.find(structure)
    if known is not None:
        return known
    began = False

    def compile_() -> Grammar:
        nonlocal began
        began = True
        return compiler.compile(structure)

    with trio.move_on_after(COMPILE_TIMEOUT):
        return await trio.to_thread.run_sync(compile_, abandon_on_cancel=True, limiter=limiter)
    limit = COMPILE_TIMEOUT
    if began:
        message = f"structured_output is too complex: to compile it takes more than {limit:g} seconds"
        raise InvalidRequest(message, field="structured_output", limit=limit)
    raise QueueFull(f"structured outputs of other requests took more than {limit:g} seconds to compile", limit=limit)


async def _in_thread(
    tokenize: Callable[[Any, Any], Iterable[T]], tokenizer: Any, text: Any, limiter: trio.CapacityLimiter
) -> list[T]:
    """Templates and long texts take their time; a caller that is cancelled leaves them to end alone."""
    return list(await trio.to_thread.run_sync(tokenize, tokenizer, text, abandon_on_cancel=True, limiter=limiter))


def check_prompt(prompt_token_ids: list[int], max_tokens: int | None, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse what the engine could never serve.

    Raises:
        InvalidRequest: no token, or one that the model does not know.
        ContextLengthExceeded: prompt and wanted tokens are more than the context holds.
    """
    if not prompt_token_ids:
        raise InvalidRequest("the prompt is empty", field="prompt")
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab_size:
        message = f"the prompt has a token id that is not in the vocabulary (0 to {vocab_size - 1})"
        raise InvalidRequest(message, field="prompt", limit=vocab_size)
    prompt_tokens = len(prompt_token_ids)
    if prompt_tokens + (1 if max_tokens is None else max_tokens) > max_model_len:
        field = "prompt" if prompt_tokens >= max_model_len else "max_tokens"
        wanted = "at least 1" if max_tokens is None else str(max_tokens)
        more = f"{wanted} more are to come" if field == "prompt" else f"max_tokens asks for {wanted} more"
        raise ContextLengthExceeded(
            f"the context holds at most {max_model_len} tokens, but the prompt has {prompt_tokens} and {more}",
            field=field,
            limit=max_model_len,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
        )


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name tokens which the model does not have.

    Raises:
        InvalidRequest: `field` names the parameter.
    """
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for field, token_ids in named.items():
        if max(token_ids, default=0) >= vocab_size:
            message = (
                f"{field} names token {max(token_ids)}, but the vocabulary has {vocab_size} (0 to {vocab_size - 1})"
            )
            raise InvalidRequest(message, field=field, limit=vocab_size)
