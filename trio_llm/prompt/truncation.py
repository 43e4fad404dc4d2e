"""Making a prompt fit that is too long: drop the oldest turns, or keep the last tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from trio_llm.errors import ContextLengthExceeded, InvalidRequest
from trio_llm.prompt.chat_template import Conversation, render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Policy = Literal["oldest_turns", "last_tokens"]


@attrs.frozen
class Truncation:
    """How a prompt that is too long is made to fit; one that fits is left as it is.

    Args:
        policy: "oldest_turns" drops the oldest messages of a conversation, a user's together
            with the answers to it, but never a system message or the last of the user; if
            that is not enough, then also the oldest tool calls since, with their results.
            Other prompts have no turns, so they must fit.  "last_tokens" keeps the end of any prompt.
        max_prompt_tokens: what the prompt may have; by default as many as the context holds
            beside `max_tokens`.  Where `max_tokens` is not given either, a prompt that has to be
            cut leaves a quarter of the context to the answer.

    Raises:
        InvalidRequest: a value is none of these; `field` names it.
    """

    policy: Policy = "oldest_turns"
    max_prompt_tokens: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.policy not in ("oldest_turns", "last_tokens"):
            message = f'truncation is "oldest_turns" or "last_tokens", got {self.policy!r}'
            raise InvalidRequest(message, field="truncation")
        limit = self.max_prompt_tokens
        if limit is not None and (type(limit) is not int or limit < 1):
            message = f"max_prompt_tokens must be an integer of at least 1, got {limit!r}"
            raise InvalidRequest(message, field="max_prompt_tokens")


@attrs.frozen
class Dropped:
    """What a prompt was cut by."""

    messages: int
    tokens: int | None
    """None where the whole was too long to be worth tokenising."""


@attrs.frozen
class Room:
    """What a prompt may have."""

    tokens: int
    """More do not fit."""
    tokens_if_cut: int
    """More it should not have if it has to be cut."""
    characters: int
    """More are more tokens than fit, however they are tokenised."""


def room_for(truncation: Truncation, *, max_model_len: int, max_tokens: int | None, max_characters: int) -> Room:
    """The room for a prompt beside the tokens that the request wants.

    Raises:
        ContextLengthExceeded: they leave none.
    """
    tokens = max_model_len - (1 if max_tokens is None else max_tokens)
    if tokens < 1:
        raise ContextLengthExceeded(
            f"the context holds at most {max_model_len} tokens, and max_tokens asks for {max_tokens}",
            field="max_tokens",
            limit=max_model_len,
            max_tokens=max_tokens,
        )
    if_cut = tokens if max_tokens is not None else max_model_len - max(1, max_model_len // 4)
    limit = truncation.max_prompt_tokens
    if limit is not None:
        tokens = if_cut = min(tokens, limit)
    return Room(tokens, if_cut, max_characters)


def tokenize_to_fit(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int] | Conversation, truncation: Truncation, room: Room
) -> tuple[list[int], Dropped | None]:
    """The token ids of a prompt, cut as the policy says if need be, and what was dropped.

    Raises:
        InvalidRequest: the chat template refuses the messages, or what is left of them.
        ContextLengthExceeded: what the policy never drops does not fit.
    """
    if truncation.policy == "last_tokens":
        return _last_tokens(tokenizer, prompt, room)
    if isinstance(prompt, Conversation):
        return _newest_turns(tokenizer, prompt, room)
    token_ids = _encode(tokenizer, prompt, room)
    if token_ids is None or len(token_ids) > room.tokens:
        raise _too_long(room, token_ids)
    return token_ids, None


def _last_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int] | Conversation, room: Room
) -> tuple[list[int], Dropped | None]:
    is_cut = False
    if isinstance(prompt, str | Conversation):
        is_chat = isinstance(prompt, Conversation)
        text = prompt if isinstance(prompt, str) else render_text(tokenizer, prompt)
        is_cut = len(text) > room.characters
        token_ids = list(tokenizer.encode(text[-room.characters :], add_special_tokens=not is_chat))
    else:
        token_ids = list(prompt)
    if len(token_ids) <= room.tokens and not is_cut:
        return token_ids, None
    kept = token_ids[-room.tokens_if_cut :]
    return kept, Dropped(0, None if is_cut else len(token_ids) - len(kept))


def _newest_turns(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, room: Room
) -> tuple[list[int], Dropped | None]:
    whole = _encode(tokenizer, conversation, room)
    if whole is not None and len(whole) <= room.tokens:
        return whole, None
    turns = droppable_turns(conversation.messages)

    def without(num_turns: int) -> tuple[int, list[int] | None]:
        left = drop_turns(conversation.messages, turns[:num_turns])
        shorter = attrs.evolve(conversation, messages=left)
        return len(conversation.messages) - len(left), _encode(tokenizer, shorter, room)

    low, high = 0, len(turns)
    dropped, token_ids = without(high)
    if token_ids is None or len(token_ids) > room.tokens:
        raise _too_long(room, token_ids)
    # the fewest turns without which it fits, or all of them; each step renders once
    while low + 1 < high:
        middle = (low + high) // 2
        fewer, candidate = without(middle)
        if candidate is not None and len(candidate) <= room.tokens_if_cut:
            high, dropped, token_ids = middle, fewer, candidate
        else:
            low = middle
    return token_ids, Dropped(dropped, None if whole is None else len(whole) - len(token_ids))


def droppable_turns(messages: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Which messages may be dropped, as positions, in groups that go together; the oldest first."""
    roles = [message.get("role") for message in messages]
    positions = [at for at, role in enumerate(roles) if role not in ("system", "developer")]
    last_user = max((at for at in positions if roles[at] == "user"), default=-1)
    turns: list[list[int]] = []
    steps: list[list[int]] = []
    for at in positions:
        groups, first = (turns, "user") if at < last_user else (steps, "assistant")
        if at != last_user:
            if roles[at] == first or not groups:
                groups.append([])
            groups[-1].append(at)
    # the newest step is what is to be answered, or gone on with
    return turns + steps[:-1]


def drop_turns(messages: Sequence[Mapping[str, Any]], turns: Sequence[Sequence[int]]) -> list[Mapping[str, Any]]:
    """The messages without some of them; a result goes with the call that it answers."""
    gone = {at for turn in turns for at in turn}
    calls = {call["id"] for at in gone for call in messages[at].get("tool_calls") or () if call.get("id")}
    return [
        message
        for at, message in enumerate(messages)
        if at not in gone and not (message.get("role") == "tool" and message.get("tool_call_id") in calls)
    ]


def _encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int] | Conversation, room: Room
) -> list[int] | None:
    """The token ids; None where there are too many characters to try."""
    if not isinstance(prompt, str | Conversation):
        return list(prompt)
    text = prompt if isinstance(prompt, str) else render_text(tokenizer, prompt)
    if len(text) > room.characters:
        return None
    return list(tokenizer.encode(text, add_special_tokens=isinstance(prompt, str)))


def _too_long(room: Room, token_ids: Sequence[int] | None) -> ContextLengthExceeded:
    size = "too many characters" if token_ids is None else f"{len(token_ids)} tokens"
    return ContextLengthExceeded(
        f"what truncation must not drop of the prompt has {size}, and there is room for {room.tokens} tokens",
        field="prompt",
        limit=room.tokens,
        prompt_tokens=None if token_ids is None else len(token_ids),
    )
