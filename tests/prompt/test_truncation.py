"""Prompts that are too long, made to fit: as little is dropped as will do, and never what must stay."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.engine.simulation import ByteTokenizer
from trio_llm.errors import ContextLengthExceeded, InvalidRequest
from trio_llm.prompt.chat_template import Conversation, render_chat
from trio_llm.prompt.truncation import (
    Dropped,
    Room,
    Truncation,
    drop_turns,
    droppable_turns,
    room_for,
    tokenize_to_fit,
)

OLDEST, LAST = Truncation("oldest_turns"), Truncation("last_tokens")


class Counting(ByteTokenizer):
    """Counts what it is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_renders = 0
        self.longest = 0

    def encode(self, text: str, **options: Any) -> list[int]:
        self.longest = max(self.longest, len(text))
        return ([0] if options.get("add_special_tokens", True) else []) + super().encode(text)

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        self.num_renders += 1
        return super().apply_chat_template(*args, **options)


def said(role: str, text: str = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def asked(*ids: str) -> dict[str, Any]:
    return said("assistant", tool_calls=[{"id": each, "function": {"name": "f"}} for each in ids])


def result(of: str) -> dict[str, Any]:
    return said("tool", tool_call_id=of)


def room(tokens: int, if_cut: int | None = None, characters: int = 10**6) -> Room:
    return Room(tokens, tokens if if_cut is None else if_cut, characters)


def fit(conversation: list[dict[str, Any]], tokens: int, if_cut: int | None = None) -> tuple[str, Dropped | None]:
    token_ids, dropped = tokenize_to_fit(Counting(), Conversation(conversation), OLDEST, room(tokens, if_cut))
    assert len(token_ids) <= tokens
    return bytes(token_ids).decode(), dropped


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        ("u", []),
        ("su", []),
        ("suau", [[1, 2]]),
        ("uauau", [[0, 1], [2, 3]]),
        ("auasu", [[0], [1, 2]]),
        ("uau" + "a", [[0, 1]]),  # to be gone on with
        ("uatatu", [[0, 1, 2, 3, 4]]),
        ("uau" + "atatt", [[0, 1], [3, 4]]),  # the last step is to be answered
        ("uuu", [[0], [1]]),
        ("aa", [[0]]),
        ("s", []),
        ("", []),
    ],
)
def test_what_may_be_dropped(roles: str, turns: list[list[int]]) -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    assert droppable_turns([said(names[role]) for role in roles]) == turns


def test_the_oldest_turns_go_and_no_more_than_must() -> None:
    messages = [said("system", "be kind"), *(said(role, str(n)) for n in range(5) for role in ("user", "assistant"))]
    messages.append(said("user", "last"))
    whole = bytes(render_chat(ByteTokenizer(), messages)).decode()  # type: ignore[arg-type]
    assert fit(messages, len(whole)) == (whole, None)
    lines = whole.splitlines(keepends=True)
    turn = len(lines[1] + lines[2])
    for number in range(1, 6):
        expected = "".join([lines[0], *lines[1 + 2 * number :]])
        dropped = Dropped(2 * number, number * turn)
        assert fit(messages, len(expected)) == (expected, dropped)
        assert fit(messages, len(expected) + turn - 1) == (expected, dropped)
        # once it has to be cut, room is made for the answer too
        assert fit(messages, len(whole) - 1, len(expected)) == (expected, dropped)
    with pytest.raises(ContextLengthExceeded) as caught:
        fit(messages, len(expected) - 1)
    assert caught.value.details == {"limit": len(expected) - 1, "prompt_tokens": len(expected)}
    assert str(len(expected)) in caught.value.message
    # with everything dropped, less room for the answer is better than none
    assert fit(messages, len(expected), 3) == (expected, dropped)


def test_it_takes_few_renders() -> None:
    messages = [said(role, str(n)) for n in range(500) for role in ("user", "assistant")] + [said("user")]
    tokenizer = Counting()
    tokenize_to_fit(tokenizer, Conversation(messages), OLDEST, room(5000))  # type: ignore[arg-type]
    assert tokenizer.num_renders <= 4 + math.ceil(math.log2(500)) + 2  # two more try the template out


def test_what_has_too_many_characters_is_not_tokenised() -> None:
    messages = [said("user", "a" * 5000), said("assistant"), said("user", "b")]
    tokenizer = Counting()
    token_ids, dropped = tokenize_to_fit(tokenizer, Conversation(messages), OLDEST, room(100, characters=1000))  # type: ignore[arg-type]
    assert bytes(token_ids) == b"user: b\nassistant: "
    assert dropped == Dropped(2, None)
    with pytest.raises(ContextLengthExceeded, match="too many characters"):
        tokenize_to_fit(tokenizer, Conversation(messages[:1]), OLDEST, room(100, characters=1000))  # type: ignore[arg-type]
    for prompt in ("c" * 5000, Conversation(messages)):
        token_ids, dropped = tokenize_to_fit(tokenizer, prompt, LAST, room(100, characters=1000))  # type: ignore[arg-type]
        assert len(token_ids) == 100
        assert dropped == Dropped(0, None)
    assert tokenizer.longest <= 1000


def test_a_result_goes_with_its_call() -> None:
    messages = [said("user"), asked("1", "2"), said("user"), result("1"), result("2"), result("3"), said("user")]
    assert drop_turns(messages, [[0, 1]]) == [messages[2], messages[5], messages[6]]


ROLES = st.lists(st.sampled_from(["user", "assistant", "system", "developer", "call"]), min_size=1, max_size=12)


@given(roles=ROLES, tokens=st.integers(1, 400), data=st.data())
def test_any_conversation(roles: list[str], tokens: int, data: st.DataObject) -> None:
    messages: list[dict[str, Any]] = []
    for number, role in enumerate(roles):
        text = data.draw(st.text("ab", max_size=20))
        if role == "call":
            messages += [asked(str(number)), result(str(number))]
        else:
            messages.append(said(role, text))
    tokenizer = Counting()
    try:
        token_ids, dropped = tokenize_to_fit(tokenizer, Conversation(messages), OLDEST, room(tokens))  # type: ignore[arg-type]
    except ContextLengthExceeded:
        left = drop_turns(messages, droppable_turns(messages))
        assert len(render_chat(ByteTokenizer(), left)) > tokens  # type: ignore[arg-type]
        return
    turns = droppable_turns(messages)
    whole = render_chat(ByteTokenizer(), messages)  # type: ignore[arg-type]
    assert (dropped is None) is (len(whole) <= tokens)
    if dropped is None:
        assert token_ids == whole
        return
    assert dropped.tokens == len(whole) - len(token_ids)
    count = next(
        n for n in range(len(turns) + 1) if len(drop_turns(messages, turns[:n])) == len(messages) - dropped.messages
    )
    left = drop_turns(messages, turns[:count])
    assert token_ids == render_chat(ByteTokenizer(), left)  # type: ignore[arg-type]
    # one turn less would not have done
    assert len(render_chat(ByteTokenizer(), drop_turns(messages, turns[: count - 1]))) > tokens  # type: ignore[arg-type]
    assert [m for m in messages if m["role"] in ("system", "developer")] == [
        m for m in left if m["role"] in ("system", "developer")
    ]
    assert left[-1] is messages[-1]
    if any(message["role"] == "user" for message in messages):
        last_user = [message for message in messages if message["role"] == "user"][-1]
        assert any(message is last_user for message in left)
    called = {call["id"] for message in left for call in message.get("tool_calls", ())}
    assert all(message["tool_call_id"] in called for message in left if message["role"] == "tool")


def test_the_last_tokens() -> None:
    def cut(prompt: Any, tokens: int, if_cut: int | None = None) -> Any:
        return tokenize_to_fit(Counting(), prompt, LAST, room(tokens, if_cut))  # type: ignore[arg-type]

    assert cut([1, 2, 3, 4], 4) == ([1, 2, 3, 4], None)
    assert cut([1, 2, 3, 4], 3) == ([2, 3, 4], Dropped(0, 1))
    assert cut([1, 2, 3, 4], 3, 2) == ([3, 4], Dropped(0, 2))
    assert cut("abc", 4) == ([0, *b"abc"], None)
    assert cut("abc", 3) == ([*b"abc"], Dropped(0, 1))
    assert cut(Conversation([said("user", "hi")]), 13) == ([*b"i\nassistant: "], Dropped(0, 7))


def test_prompts_without_turns_must_fit() -> None:
    for prompt in ([1, 2, 3], "ab"):
        assert tokenize_to_fit(Counting(), prompt, OLDEST, room(3))[1] is None  # type: ignore[arg-type]
        with pytest.raises(ContextLengthExceeded):
            tokenize_to_fit(Counting(), prompt, OLDEST, room(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("most", "max_tokens", "expected"),
    [
        (None, None, (99, 75)),
        (None, 30, (70, 70)),
        (None, 0, (100, 100)),
        (50, None, (50, 50)),
        (50, 70, (30, 30)),
        (200, None, (99, 99)),
    ],
)
def test_the_room_there_is(most: int | None, max_tokens: int | None, expected: tuple[int, int]) -> None:
    truncation = Truncation(max_prompt_tokens=most)
    found = room_for(truncation, max_model_len=100, max_tokens=max_tokens, max_characters=7)
    assert found == Room(*expected, 7)


def test_no_room() -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        room_for(OLDEST, max_model_len=100, max_tokens=100, max_characters=7)
    assert caught.value.field == "max_tokens"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"policy": "auto"}, "truncation"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
        ({"max_prompt_tokens": True}, "max_prompt_tokens"),
        ({"max_prompt_tokens": 1.0}, "max_prompt_tokens"),
    ],
)
def test_values_that_are_none(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Truncation(**values)
    assert caught.value.field == field
