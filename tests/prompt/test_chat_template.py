"""Messages to token ids: as the template says, and in its own words when it refuses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trio_llm.errors import InvalidRequest
from trio_llm.prompt.chat_template import encode_prompt, render_chat

STRINGS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + '</s>' }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}</s>{% endfor %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<A>{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A token for each character that is put in."""
    characters = sorted({*(chr(code) for code in range(32, 127)), "\n", "ä"})
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        add_bos_token=True,
        chat_template=template,
    )


def written(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    made = tokenizer(template)
    return "".join(made.convert_ids_to_tokens(render_chat(made, messages, **options)))


def test_a_bos_of_the_template_is_not_doubled() -> None:
    assert written(STRICT, HI) == "<s>hi<A>"


def test_where_the_template_writes_no_bos_there_is_none() -> None:
    assert written(STRINGS, HI) == "<user>hi</s>"


def test_it_is_what_transformers_makes_of_it() -> None:
    for template in (STRINGS, STRICT):
        made = tokenizer(template)
        theirs = made.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
        assert render_chat(made, HI) == theirs


def test_the_header_of_the_answer_can_be_left_out() -> None:
    assert written(STRICT, HI, add_generation_prompt=False) == "<s>hi"


def test_a_plain_prompt_has_the_special_tokens_of_the_tokenizer() -> None:
    made = tokenizer(None)
    assert made.convert_ids_to_tokens(encode_prompt(made, "hi")) == ["<s>", "h", "i"]


@pytest.mark.parametrize("template", [STRINGS, PARTS])
def test_contents_take_the_form_that_the_template_writes(template: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "ä"}]
    joined = "a\nä" if template is STRINGS else "aä"
    assert written(template, [{"role": "user", "content": parts}]) == f"<user>{joined}</s>"
    assert written(template, HI) == "<user>hi</s>"


def test_a_changed_template_is_looked_at_again() -> None:
    made = tokenizer(STRINGS)
    render_chat(made, HI)
    made.chat_template = PARTS
    assert "".join(made.convert_ids_to_tokens(render_chat(made, HI))) == "<user>hi</s>"


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text"}, {"type": "text", "text": 1}, "a"]
)
def test_parts_that_are_no_text_are_refused_by_place(part: Any) -> None:
    messages = [*HI, {"role": "user", "content": [part]}]
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content: only text parts") as caught:
        written(STRINGS, messages)
    assert caught.value.field == "messages"


def refused(template: str | None, messages: list[dict[str, Any]]) -> str:
    made = tokenizer(template)
    with pytest.raises(InvalidRequest) as caught:
        render_chat(made, messages)
    assert caught.value.field == "messages"
    return caught.value.message


def test_a_refusal_has_the_words_of_the_template() -> None:
    message = refused(STRICT, [*HI, *HI])
    assert message == (
        "the model's chat template does not accept these messages: Conversation roles must alternate user/assistant/..."
    )


def test_a_model_without_a_template_says_so() -> None:
    assert refused(None, HI).startswith("this model has no chat template")


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (STRINGS, [{"role": "user"}], "has no attribute 'content'"),
        (STRINGS, [{"role": "user", "content": None}], "has no attribute 'content'"),
        (STRINGS, [{"role": "user", "content": 3}], "unsupported operand"),
        (STRINGS, [], "empty conversation"),
        ("{% for %}", HI, "Expected an expression"),
        ("{{ messages[0]['content'].__class__.__mro__ }}", HI, "unsafe"),
        ("{{ 1 // 0 }}", HI, "ZeroDivisionError"),
    ],
)
def test_whatever_stops_a_template_is_an_invalid_request(
    template: str, messages: list[dict[str, Any]], words: str
) -> None:
    assert words in refused(template, messages)


def test_threads_share_a_tokenizer() -> None:
    made = tokenizer(STRICT)
    long = [{"role": "user", "content": "a b c " * 200}]
    expected = render_chat(made, long), encode_prompt(made, "abc")
    found: list[Any] = []

    def run() -> None:
        found.extend((render_chat(made, long), encode_prompt(made, "abc")) for _ in range(50))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    assert all(pair == expected for pair in found)
