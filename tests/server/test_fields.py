"""Every row of the field tables, sent to a small real model: what is supported does something."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from tests.core.tiny_models import build, paged
from tests.engine.test_detokenizer import trained
from tests.server.rows import agree, differ
from trio_llm.core.torch_executor import TorchExecutor
from trio_llm.engine.simulation import FakeModel
from trio_llm.server.openai import compatibility

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DOCUMENT = Path(__file__).parents[2] / "docs" / "openai_compatibility.md"
TEMPLATE = (
    "{{ reasoning_effort if reasoning_effort is defined }}{{ mood if mood is defined }}"
    "{% for m in messages %}{{ m.role }}{{ ' ' + m.name if m.name is defined }}: "
    "{{ m.reasoning_content if m.reasoning_content is defined }}{{ m.content }}"
    "{{ m.tool_call_id if m.tool_call_id is defined }}"
    "{% for call in m.tool_calls or () %}{{ call.id if call.id is defined }} {{ call.type }} {{ call.function.name }}"
    " {{ call.function.arguments }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
EOS = 2
PROMPT = "the quick brown fox jumps over the lazy dog"


def tokenizer():
    """The words of the small tokenizer, and a chat template."""
    made = trained("byte-level")
    made.chat_template = TEMPLATE
    return made


@attrs.define
class Asking:
    """Asks one endpoint for the greedy continuation of one prompt, in ten tokens."""

    client: object
    path: str

    async def __call__(self, **extra):
        body = {"model": "fake", "temperature": 0, "max_tokens": 10}
        if self.path == CHAT:
            body["messages"] = [{"role": "user", "content": PROMPT}]
        else:
            body["prompt"] = PROMPT
        await self.client.send("POST", self.path, {**body, **extra})
        answer = await self.client.receive()
        assert answer.status == 200, (extra, answer.json)
        return answer if extra.get("stream") else answer.json

    def text(self, choice):
        return choice["message"]["content"] if self.path == CHAT else choice["text"]

    async def say(self, **extra):
        return self.text((await self(**extra))["choices"][0])


RANDOM = {"temperature": 2, "seed": 1}


def gives(extra, good):
    """A row: the answer is as it should be."""

    async def check(ask):
        body = await ask(**extra)
        assert good(body, body["choices"][0]), body

    return check


def reads(extra, text):
    """A row: the model is given this text, among others."""

    async def check(ask):
        body = await ask(**extra, return_token_ids=True)
        prompt = tokenizer().decode(body["prompt_token_ids"])
        assert text in prompt, prompt

    return check


async def stops(ask):
    text = await ask.say()
    assert await ask.say(stop=text[3:5]) == text[: text.index(text[3:5])]
    included = await ask.say(stop=["never", text[3:5]], include_stop_str_in_output=True)
    assert included == text[: text.index(text[3:5]) + 2]


async def ends(ask):
    first = (await ask(return_token_ids=True))["choices"][0]["token_ids"][0]
    body = await ask(stop_token_ids=[first])
    assert (ask.text(body["choices"][0]), body["usage"]["completion_tokens"]) == ("", 1)
    assert (await ask(stop_token_ids=[first], min_tokens=3))["usage"]["completion_tokens"] >= 3


async def never_says(ask):
    made = tokenizer()
    word = next(word for word in ("the", "fox", "dog", "lazy") if len(made.encode(f" {word}")) == 1)
    biased = {"logit_bias": {str(made.encode(f" {word}")[0]): 100}}
    assert word in await ask.say(**biased)
    assert word not in await ask.say(**biased, bad_words=[word])


async def only_says(ask):
    ids = (await ask(return_token_ids=True, allowed_token_ids=[50, 60]))["choices"][0]["token_ids"]
    assert set(ids) <= {50, 60}


async def shares_by_salt(ask):
    async def cached(salt):
        return (await ask(cache_salt=salt))["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [await cached("one"), await cached("one") > 0, await cached("two")] == [0, True, 0]


async def streams(ask):
    answer = await ask(stream=True)
    *chunks, done = answer.events
    assert done == "DONE"
    pieces = [chunk["choices"][0] for chunk in chunks]
    parts = [piece["delta"].get("content", "") if ask.path == CHAT else piece["text"] for piece in pieces]
    assert "".join(parts) == await ask.say()


async def tells_usage(ask):
    options = {"include_usage": True}
    *chunks, last, _ = (await ask(stream=True, stream_options=options)).events
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 10)
    options["continuous_usage_stats"] = True
    *chunks, last, _ = (await ask(stream=True, stream_options=options)).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 10


async def is_cut(ask):
    if ask.path == CHAT:
        turns = [{"role": role, "content": f"{PROMPT} {n}"} for n in range(12) for role in ("user", "assistant")]
        turns.append({"role": "user", "content": "the fox"})
        long, policy = {"messages": [{"role": "system", "content": "be quick"}, *turns]}, "oldest_turns"
    else:
        long, policy = {"prompt": PROMPT * 30}, "last_tokens"
    body = await ask(**long, truncation=policy, return_token_ids=True)
    assert body["truncated"]["tokens"] > 0
    assert (body["truncated"]["messages"] > 10) == (ask.path == CHAT)
    if ask.path == CHAT:
        prompt = tokenizer().decode(body["prompt_token_ids"])
        assert prompt.startswith("system: be quick") and prompt.endswith("user: the fox\nassistant: ")
    events = (await ask(**long, truncation=policy, stream=True)).events
    assert [chunk["truncated"] for chunk in events[:-1] if "truncated" in chunk] == [body["truncated"]]
    for limit in (5, -1):
        body = await ask(**long, truncate_prompt_tokens=limit)
        assert body["usage"]["prompt_tokens"] == 5 if limit == 5 else body["usage"]["prompt_tokens"] > 100
        assert body["truncated"]["messages"] == 0
    assert "truncated" not in await ask(truncation="auto")


async def times(ask):
    timings = (await ask(return_timings=True))["timings"]
    assert timings.keys() == {"queue_ms", "prefill_ms", "decode_ms"}
    assert all(value >= 0 for value in timings.values())
    assert timings["decode_ms"] > 0
    *_, last, _ = (await ask(stream=True, return_timings=True, n=2)).events
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["decode_ms"] > 0
    assert "timings" not in await ask()


def has_prompt_logprobs(body, choice):
    scored = (body if "prompt_logprobs" in body else choice)["prompt_logprobs"]
    return scored[0] is None and all(2 <= len(entry) <= 3 and "decoded_token" in str(entry) for entry in scored[1:])


SAMPLING = {
    "model": gives({}, lambda body, choice: body["model"] == "fake"),
    "n": gives({"n": 3}, lambda body, choice: [c["index"] for c in body["choices"]] == [0, 1, 2]),
    "max_tokens": gives({"max_tokens": 3}, lambda body, choice: body["usage"]["completion_tokens"] == 3),
    "min_tokens": ends,
    "stop": stops,
    "stop_token_ids": ends,
    "ignore_eos": gives(
        {"logit_bias": {str(EOS): 100}, "ignore_eos": True}, lambda body, choice: choice["finish_reason"] == "length"
    ),
    "include_stop_str_in_output": stops,
    "skip_special_tokens": gives(
        {"logit_bias": {"0": 100}, "skip_special_tokens": False}, lambda body, choice: "<s><s>" in str(choice)
    ),
    "seed": differ(RANDOM, {**RANDOM, "seed": 2}),
    "temperature": differ({}, RANDOM),
    "top_p": agree({}, {**RANDOM, "top_p": 1e-6}),
    "top_k": agree({}, {**RANDOM, "top_k": 1}),
    "min_p": agree({}, {**RANDOM, "min_p": 1}),
    "typical_p": differ(RANDOM, {**RANDOM, "typical_p": 0.05}),
    "repetition_penalty": differ({"max_tokens": 40}, {"max_tokens": 40, "repetition_penalty": 10}),
    "presence_penalty": differ({"max_tokens": 60}, {"max_tokens": 60, "presence_penalty": 2}),
    "frequency_penalty": differ({"max_tokens": 60}, {"max_tokens": 60, "frequency_penalty": 2}),
    "logit_bias": gives(
        {"logit_bias": {str(EOS): 100}},
        lambda body, choice: (choice["finish_reason"], body["usage"]["completion_tokens"]) == ("stop", 1),
    ),
    "allowed_token_ids": only_says,
    "bad_words": never_says,
    "prompt_logprobs": gives({"prompt_logprobs": 2}, has_prompt_logprobs),
    "truncation": is_cut,
    "truncate_prompt_tokens": is_cut,
    "cache_salt": shares_by_salt,
    "return_token_ids": gives(
        {"return_token_ids": True},
        lambda body, choice: len(choice["token_ids"]) == 10 and "'prompt_token_ids': [" in str(body),
    ),
    "return_timings": times,
    "stream": streams,
    "stream_options": tells_usage,
    "stream_options.include_usage": tells_usage,
    "stream_options.continuous_usage_stats": tells_usage,
}


async def has_chat_logprobs(ask):
    content = (await ask(logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    content = (await ask(logprobs=True))["choices"][0]["logprobs"]["content"]
    assert len(content) == 10
    assert all(entry["top_logprobs"] == [] for entry in content)


def with_message(**fields):
    return {"messages": [{"role": "user", "content": PROMPT, **fields}]}


ASSISTANT = {"role": "assistant", "content": [{"type": "text", "text": "no"}]}
CALLING = {
    "messages": [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "call1", "content": "2"},
    ]
}
CALLING_AS_BEFORE = {
    "messages": [
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "2"},
    ]
}
OPEN = {"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]}
REFUSING = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
CHAT_ROWS = {
    "messages": differ({}, with_message(content="over the lazy dog")),
    "max_completion_tokens": gives(
        {"max_completion_tokens": 2}, lambda body, choice: body["usage"]["completion_tokens"] == 2
    ),
    "logprobs": has_chat_logprobs,
    "top_logprobs": has_chat_logprobs,
    "reasoning_effort": reads({"reasoning_effort": "high"}, "high"),
    "chat_template_kwargs": reads({"chat_template_kwargs": {"mood": "cheerful"}}, "cheerful"),
    "add_generation_prompt": differ({}, {"add_generation_prompt": False}),
    "continue_final_message": differ(OPEN, {**OPEN, "continue_final_message": True}),
    "messages[].role": reads(with_message(role="developer"), "system: the"),
    "messages[].content": reads(with_message(content="over it"), "user: over it\nassistant: "),
    "messages[].name": reads(with_message(name="Jo"), "user Jo: "),
    "messages[].tool_calls": reads(CALLING, 'assistant: call1 function f {"x": 1}\ntool: 2call1'),
    "messages[].tool_calls[].id": reads(CALLING, "call1 function"),
    "messages[].tool_calls[].type": reads(CALLING, "call1 function"),
    "messages[].tool_calls[].function": reads(CALLING, 'f {"x": 1}'),
    "messages[].tool_call_id": reads(CALLING, "tool: 2call1"),
    "messages[].function_call": reads(CALLING_AS_BEFORE, 'assistant:  function f {"x": 1}\ntool f: 2'),
    "messages[].function_call.name": reads(CALLING_AS_BEFORE, 'f {"x": 1}'),
    "messages[].function_call.arguments": reads(CALLING_AS_BEFORE, '{"x": 1}'),
    "messages[].reasoning_content": reads(
        {"messages": [{"role": "assistant", "content": "so", "reasoning_content": "hmm "}]}, "assistant: hmm so"
    ),
    "messages[].refusal": agree(
        {"messages": [ASSISTANT]}, {"messages": [{"role": "assistant", "content": None, "refusal": "no"}]}
    ),
    "messages[].content[].type": agree({"messages": [ASSISTANT]}, {"messages": [REFUSING]}),
    "messages[].content[].text": agree({}, with_message(content=[{"type": "text", "text": PROMPT}])),
    "messages[].content[].refusal": agree({"messages": [ASSISTANT]}, {"messages": [REFUSING]}),
}


async def continues_all(ask):
    prompts = ["the quick", "the lazy dog"]
    body = await ask(prompt=prompts, n=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    alone = [await ask.say(prompt=prompt) for prompt in prompts]
    assert [choice["text"] for choice in body["choices"]] == [text for text in alone for _ in range(2)]


async def echoes(ask):
    assert await ask.say(echo=True) == PROMPT + await ask.say()
    ids = tokenizer().encode(PROMPT)
    assert await ask.say(prompt=ids, echo=True) == PROMPT + await ask.say()


COMPLETION_ROWS = {
    "prompt": continues_all,
    "echo": echoes,
    "logprobs": gives({"logprobs": 2}, lambda body, choice: len(choice["logprobs"]["top_logprobs"]) == 10),
}
ELSEWHERE = {
    "suffix",  # test_completions.py, with a tokenizer that has it
    "priority",  # test_chat.py, with a queue
    "tools",  # test_tools.py
    "tool_choice",
    "parallel_tool_calls",
    "response_format",  # test_structured_output.py
    "structured_outputs",
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_supported(serving, path):
    rows = SAMPLING | (CHAT_ROWS if path == CHAT else COMPLETION_ROWS)
    executor = TorchExecutor(paged(build("llama", vocab_size=330), block_size=4), num_blocks=64, max_model_len=256)
    model = FakeModel(tokenizer=tokenizer(), eos_token_ids=[EOS])
    async with serving(executor=executor, model=model) as server:
        ask = Asking(await server.connect(), path)
        for name, check in rows.items():
            try:
                await check(ask)
            except BaseException as error:
                error.add_note(f"in the row {name}")
                raise
        await server.assert_all_free()


def supported_paths():
    for prefix, table in compatibility.TABLES.values():
        for name, field in table.items():
            if field.treatment == "supported":
                yield prefix + name


def test_every_supported_row_is_tried():
    rows = {*SAMPLING, *CHAT_ROWS, *COMPLETION_ROWS, *ELSEWHERE}
    assert {path for path in supported_paths() if re.split(r"[.\[]", path)[0] not in ELSEWHERE} == rows - ELSEWHERE


NESTED = {
    "messages[].": lambda entry: {"messages": [{"role": "user", "content": "hi", **entry}]},
    "messages[].content[].": lambda entry: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **entry}]}]
    },
    "messages[].tool_calls[].": lambda entry: {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f"}, **entry}],
            }
        ]
    },
    "stream_options.": lambda entry: {"stream": True, "stream_options": entry},
    "response_format.": lambda entry: {"response_format": {"type": "text", **entry}},
    "response_format.json_schema.": lambda entry: {
        "response_format": {"type": "text", "json_schema": {"name": "x", **entry}}
    },
    "structured_outputs.": lambda entry: {"structured_outputs": entry},
}
WANTING = {"asks": ["for", "something"]}


def bodies(treatment):
    """For each field so treated: its path, the endpoint, and how to make a body with a value of it."""
    for prefix, table in compatibility.TABLES.values():
        endpoint = COMPLETIONS if table is compatibility.TABLES["POST /v1/completions"][1] else CHAT
        for name, field in table.items():
            if field.treatment == treatment:
                put = NESTED.get(prefix, dict)
                yield prefix + name, endpoint, field, lambda value, put=put, name=name: put({name: value})


def whole(endpoint, extra):
    base = {"messages": [{"role": "user", "content": "hi"}]} if endpoint == CHAT else {"prompt": "hi"}
    return {"model": "fake", "max_tokens": 1, **base, **extra}


async def test_rejected(serving, capsys):
    async with serving() as strict, serving(compat="lenient") as lenient:
        client, easy = await strict.connect(), await lenient.connect()
        for path, endpoint, field, make in bodies("refused"):
            body = whole(endpoint, make(WANTING))
            await client.send("POST", endpoint, body)
            answer = await client.receive()
            assert answer.status == 400, path
            error = answer.json["error"]
            assert error["code"] == "unsupported_parameter"
            assert error["param"] == path.replace("[]", "[0]")
            capsys.readouterr()
            await easy.send("POST", endpoint, body)
            assert (await easy.receive()).status == 200, path
            assert capsys.readouterr().out.count(path.replace("[]", "[0]")) == 1
            for value in (None, *field.neutral):
                await client.send("POST", endpoint, whole(endpoint, make(value)))
                assert (await client.receive()).status == 200, (path, value)


async def test_accepted(serving):
    right = {
        "metadata": {"key": "value"},
        "stream_options.include_obfuscation": True,
        "messages[].tool_calls[].index": 0,
    }
    async with serving() as server:
        client = await server.connect()
        for path, endpoint, _, make in bodies("accepted"):
            for value in (None, right.get(path, "x")):
                await client.send("POST", endpoint, whole(endpoint, make(value)))
                assert (await client.receive()).status == 200, path
            for value in (-5, ["x"], "x" * 513, {str(n): "x" for n in range(17)}, {"x": 1}, {"x": "y" * 513}):
                await client.send("POST", endpoint, whole(endpoint, make(value)))
                answer = await client.receive()
                assert answer.status == 400, (path, value)
                assert answer.json["error"]["param"].startswith(path.replace("[]", "[0]"))


def test_the_document_is_what_the_tables_say():
    assert DOCUMENT.read_text(encoding="utf-8") == compatibility.render()
