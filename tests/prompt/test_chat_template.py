"""Messages to token ids: as the template says, and in its own words when it refuses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trio_llm.errors import InvalidRequest
from trio_llm.prompt.chat_template import Conversation, encode_prompt, render_chat, template_of

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
    return "".join(made.convert_ids_to_tokens(render_chat(made, Conversation(messages, **options))))


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


def refused(template: str | None, messages: list[dict[str, Any]], **options: Any) -> str:
    made = tokenizer(template)
    with pytest.raises(InvalidRequest) as caught:
        render_chat(made, Conversation(messages, **options))
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


# --- tools and other wishes ---

TOOLS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{% if m.name %}={{ m.name }}{% endif %}>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content + '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"
)
TEXT_ARGUMENTS = TOOLS.replace("c.function.arguments | tojson", "'' + c.function.arguments")
REPR_ARGUMENTS = TOOLS.replace("c.function.arguments | tojson", "c.function.arguments")
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}|{{ reasoning_effort }}|{{ colour }}|"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def call(arguments: Any) -> dict[str, Any]:
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize("template", [TOOLS, TEXT_ARGUMENTS, REPR_ARGUMENTS])
def test_a_conversation_with_tools(template: str) -> None:
    messages = [
        {"role": "user", "content": "1+2?", "name": "Ann"},
        {**call('{"a": 1, "b": [2, null, true]}'), "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
    ]
    expected = '[add]<user=Ann>1+2?<assistant>(hm)c1:add{"a": 1, "b": [2, null, true]}<tool>3#c1'
    assert written(template, messages, tools=[TOOL]) == expected
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b": [2, null, true]}'  # type: ignore[index]


@pytest.mark.parametrize("arguments", ["", " ", "{}", {}, None])
def test_a_call_without_arguments(arguments: Any) -> None:
    assert written(TOOLS, [*HI, call(arguments)]).endswith("c1:add{}")


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", '"x"', "null", 3, [1], "[" * 100_000])
def test_arguments_that_are_no_object_are_named(arguments: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        written(TOOLS, [*HI, call("{}"), call(arguments)])
    assert caught.value.field == "messages[2].tool_calls[0].function.arguments"
    assert caught.value.field in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("broken", [{}, {"function": {}}, {"function": "add"}, "add", None])
def test_calls_without_a_function_are_named(broken: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.tool_calls\[1\] must have a function"):
        written(TOOLS, [{**call("{}"), "tool_calls": [*call("{}")["tool_calls"], broken]}])


def test_a_template_without_tools_takes_none() -> None:
    with pytest.raises(InvalidRequest, match="takes no tools") as caught:
        written(STRINGS, HI, tools=[TOOL])
    assert caught.value.field == "tools"
    assert written(STRINGS, HI, tools=[]) == "<user>hi</s>"


def test_how_a_template_writes_a_call_is_known() -> None:
    assert 'probe{"key": "chat-template-probe"}' in template_of(tokenizer(TOOLS)).written_call
    assert template_of(tokenizer(TEXT_ARGUMENTS)).arguments == "text"
    assert template_of(tokenizer(STRINGS)).written_call == ""


def test_the_developer_is_the_system_unless_the_template_speaks_of_it() -> None:
    told = [{"role": "developer", "content": "be kind"}]
    assert written(STRINGS, told) == "<system>be kind</s>"
    assert written(STRINGS + "{# developer #}", told) == "<developer>be kind</s>"


@pytest.mark.parametrize("template", [STRINGS, PARTS, STRICT])
def test_a_last_message_can_be_left_open(template: str) -> None:
    messages = [*HI, {"role": "assistant", "content": "It is "}]
    text = written(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("It is ")
    made = tokenizer(template)
    if template is not PARTS:
        theirs = made.apply_chat_template(messages, continue_final_message=True, return_dict=False)
        assert made.convert_ids_to_tokens(theirs) == list(made.tokenize(text))


def test_a_last_message_cannot_be_open_and_followed_by_a_header() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Conversation(HI, continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_a_template_that_swallows_the_open_message_is_refused_without_quoting_it() -> None:
    template = "{% for m in messages[:-1] %}{{ m['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "a secret"}, {"role": "assistant", "content": "another secret"}]
    message = refused(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert "does not appear" in message
    assert "secret" not in message


def test_variables_of_the_template() -> None:
    assert written(THINKS, HI) == "<user>hi|||"
    assert written(THINKS, HI, template_kwargs={"colour": "blue"}) == "<user>hi||blue|"
    assert written(THINKS, HI, reasoning_effort="high") == "<user>hi|high||True"
    assert written(THINKS, HI, reasoning_effort="none") == "<user>hi|none||False"
    asked = {"reasoning_effort": "high", "template_kwargs": {"enable_thinking": False}}
    assert written(THINKS, HI, **asked) == "<user>hi|high||False"
    assert written(STRINGS, HI, reasoning_effort="none") == "<user>hi</s>"


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "tokenize", "continue_final_message", "self"])
def test_variables_that_are_none(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"must not set '{name}'") as caught:
        Conversation(HI, template_kwargs={"colour": 1, name: "x"})
    assert caught.value.field == "chat_template_kwargs"


def test_messages_that_are_none() -> None:
    assert "messages[1] is no message but a str" in refused(STRINGS, [*HI, "hi"])  # type: ignore[list-item]
