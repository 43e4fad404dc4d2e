"""Faults that servers of this kind have had, each tried over HTTP.

The numbers are those of the list that the project keeps of such reports; what concerns the engine alone
is tried in tests/core and tests/engine, and signals in test_serve.py and test_programs.py.
"""

from __future__ import annotations

import json

import pytest
import trio

from tests.server.scripted import CALLING, THINKING, random_model, saying
from trio_llm.core.executor import ExecutorInfo, FakeExecutor

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
LONG = {**HI, "max_tokens": 900, "ignore_eos": True}
ASK = {"model": "fake", "prompt": "hi"}


def error_of(answer, status=400):
    assert answer.status == status, answer.body
    assert answer.json.keys() == {"error"}
    assert answer.json["error"].keys() == {"message", "type", "param", "code"}
    return answer.json["error"]


def text_of(events, index=0):
    """The text of a choice of a stream, and its finish reasons."""
    pieces = [choice for chunk in events[:-1] for choice in chunk["choices"] if choice["index"] == index]
    texts = [piece["delta"].get("content", "") if "delta" in piece else piece["text"] for piece in pieces]
    return "".join(texts), [piece["finish_reason"] for piece in pieces if piece["finish_reason"] is not None]


# --- 1, 2, 3: clients that go away ---


@pytest.mark.parametrize("stream", [True, False])
async def test_1_a_client_that_goes_away_takes_its_request_with_it(serving, gated, stream):
    """Queued, in prefill and in decode."""
    executor, gate = gated
    async with serving(executor=executor, engine={"max_num_seqs": 1, "max_num_batched_tokens": 4}) as server:
        clients = [await server.connect() for _ in range(3)]
        for count, client in enumerate(clients, start=1):
            await client.send("POST", CHAT, {**LONG, "stream": stream})
            await server.admitted(count)
        gate.let(2)  # the first is in prefill, the others wait
        for left, client in ((2, clients[2]), (1, clients[0]), (0, clients[1])):
            await client.stream.aclose()
            await server.until(lambda left=left: server.engine.statistics().num_requests == left)
        gate.open()
        await server.assert_all_free()


async def test_3_two_hundred_disconnects_leak_nothing(serving):
    async with serving() as server:

        async def leave(count):
            client = await server.connect()
            await client.send("POST", CHAT, {**LONG, "stream": count % 2 == 0, "n": 1 + count % 3})
            for _ in range(count % 7):
                await trio.lowlevel.checkpoint()
            if count % 2 == 0 and count % 3:
                await client.until(b'"delta"')
            await client.stream.aclose()

        async with trio.open_nursery() as nursery:
            for count in range(200):
                nursery.start_soon(leave, count)
        await server.assert_all_free()
        assert (await server.ask("POST", CHAT, {**HI, "max_tokens": 2})).status == 200


# --- 4, 19, 20, 21: what can be served ---


async def test_4_a_prompt_that_the_memory_can_never_hold_is_refused(serving):
    info = ExecutorInfo(num_blocks=64, block_size=4, vocab_size=256, max_model_len=1024)
    async with serving(executor=FakeExecutor(info)) as server:
        answer = await server.ask("POST", COMPLETIONS, {**ASK, "prompt": "x" * (65 * 4)})
        assert error_of(answer)["code"] == "context_length_exceeded"
        assert (await server.ask("POST", COMPLETIONS, {**ASK, "max_tokens": 2})).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_19_max_tokens(serving, stream):
    async with serving() as server:
        client = await server.connect()

        async def ask(path, body, **fields):
            await client.send("POST", path, {**body, "stream": stream, **fields})
            return await client.receive()

        for wrong in (-1, 2**31, "5", 1.5, True):
            for path, body in ((CHAT, HI), (COMPLETIONS, ASK)):
                assert error_of(await ask(path, body, max_tokens=wrong))["param"] == "max_tokens"
        assert error_of(await ask(CHAT, HI, max_tokens=0))["param"] == "max_tokens"
        assert (await ask(COMPLETIONS, ASK, max_tokens=0)).status == 200
        assert (await ask(COMPLETIONS, {**ASK, "prompt": "x" * 1020}, max_tokens=None)).status == 200
        assert (await ask(COMPLETIONS, {**ASK, "prompt": "x" * 1023})).status == 200
        error = error_of(await ask(COMPLETIONS, {**ASK, "prompt": "x" * 1024}))
        assert "1024" in error["message"] and "-" not in error["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("length", [1025, 20_000])
async def test_20_a_prompt_that_is_too_long(serving, stream, length):
    async with serving() as server:
        for path, body, param in (
            (CHAT, {**HI, "messages": [{"role": "user", "content": "x" * length}]}, "messages"),
            (COMPLETIONS, {**ASK, "prompt": "x" * length}, "prompt"),
            (COMPLETIONS, {**ASK, "prompt": ["fine", "x" * length]}, "prompt"),
        ):
            error = error_of(await server.ask("POST", path, {**body, "stream": stream}))
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert error["code"] == "context_length_exceeded"
            assert "1024" in error["message"]


async def test_21_empty_prompts(serving):
    async with serving() as server:
        client = await server.connect()
        for prompt in ("", [""], [[]], [], ["x", ""], [[1], []]):
            await client.send("POST", COMPLETIONS, {**ASK, "prompt": prompt})
            assert error_of(await client.receive())["param"] == "prompt"
        for messages in ([], None, [{}], [{"role": "user", "content": None}], [{"role": "user", "content": []}]):
            await client.send("POST", CHAT, {**HI, "messages": messages})
            assert error_of(await client.receive())["param"].startswith("messages")
        await client.send("POST", CHAT, {**HI, "messages": [{"role": "user", "content": ""}], "max_tokens": 1})
        assert (await client.receive()).status == 200


# --- 10, 11, 12, 16: text and tokens ---


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_10_stop_strings(serving, path):
    """Across tokens; one that is never complete; and what may become one is not held back any longer."""
    body = HI if path == CHAT else ASK
    async with serving() as server:
        server.executor.next_token = lambda context, index: b"ABCDEFGHIJ"[index % 10]
        for stop, expected, reason in (
            (["DEFGHIJ"], "ABC", "stop"),
            (["DEFGHIX"], "ABCDEFGHIJAB", "length"),
            (["JAC", "BA"], "ABCDEFGHIJAB", "length"),
            (["IJA", "J"], "ABCDEFGHI", "stop"),
        ):
            fields = {**body, "stop": stop, "max_tokens": 12}
            choice = (await server.ask("POST", path, fields)).json["choices"][0]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert (text, choice["finish_reason"]) == (expected, reason)
            events = (await server.ask("POST", path, {**fields, "stream": True})).events
            assert text_of(events) == (expected, [reason])


async def test_11_the_text_ends_exactly_before_the_stop(serving):
    executor, model, _ = saying("byte-level", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10")
    async with serving(executor=executor, model=model) as server:
        fields = {**HI, "stop": ["7"]}
        choice = (await server.ask("POST", CHAT, fields)).json["choices"][0]
        assert choice["message"]["content"] == "1, 2, 3, 4, 5, 6, "
        # and without one the last token before the end is there
        choice = (await server.ask("POST", CHAT, HI)).json["choices"][0]
        assert (choice["message"]["content"][-2:], choice["finish_reason"]) == ("10", "stop")


@pytest.mark.parametrize("text", ["\U0001fae0", "龜", "한국어 텍스트", "a\U0001f469‍\U0001f680b"])
async def test_12_characters_of_several_tokens(serving, text):
    executor, model, ids = saying("byte-level", text)
    async with serving(executor=executor, model=model) as server:
        events = (await server.ask("POST", CHAT, {**HI, "stream": True})).events
        assert text_of(events) == (text, ["stop"])
        for cut in range(1, len(ids)):
            fields = {**HI, "max_tokens": cut}
            whole = (await server.ask("POST", CHAT, fields)).json["choices"][0]["message"]["content"]
            assert whole.rstrip("\ufffd") == text[: len(whole.rstrip("\ufffd"))]
            assert text_of((await server.ask("POST", CHAT, {**fields, "stream": True})).events)[0] == whole


@pytest.mark.parametrize("stream", [True, False])
async def test_16_logprobs_beside_a_stop_string(serving, stream):
    executor, model, _ = saying("byte-level", "well, ha ha ha ha")
    async with serving(executor=executor, model=model) as server:
        fields = {**HI, "logprobs": True, "top_logprobs": 2, "stop": [" ha ha ha"], "stream": stream}
        answer = await server.ask(
            "POST", CHAT, {**fields, **({"stream_options": {"include_usage": True}} if stream else {})}
        )
        if stream:
            *chunks, last, _ = answer.events
            pieces = [chunk["choices"][0] for chunk in chunks]
            content = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
            text, usage = text_of(answer.events)[0], last["usage"]
        else:
            (choice,) = answer.json["choices"]
            content, text, usage = choice["logprobs"]["content"], choice["message"]["content"], answer.json["usage"]
        assert text == "well,"
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "well, ha ha ha"
        assert len(content) == usage["completion_tokens"]


# --- 14, 15, 37: the shape of a stream ---


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 3])
async def test_14_15_37_usage_indices_and_ends(serving, path, n):
    body = {**(HI if path == CHAT else ASK), "n": n, "max_tokens": 20, "seed": 5}
    async with serving() as server:
        whole = (await server.ask("POST", path, body)).json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, done = (await server.ask("POST", path, {**body, **options})).events
        assert done == "DONE"
        assert last["choices"] == []
        assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][name] == whole["usage"][name]
        assert last["usage"]["completion_tokens"] == 20 * n
        for index in range(n):
            assert text_of([*chunks, done], index)[1] == ["length"]
        assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == set(range(n))
        assert all(choice["finish_reason"] != "" for chunk in chunks for choice in chunk["choices"])


async def test_37_a_stream_ends_with_a_finish_or_an_error(serving):
    async with serving() as server:
        server.executor.next_token = lambda context, index: ord("a") if index < 3 else 1 // 0
        answer = await server.ask("POST", CHAT, {**HI, "stream": True, "max_tokens": 9})
        assert answer.status == 500 or "error" in answer.events[-2]


# --- 23: sizes ---


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["a"] * 500_000}, "stop"),
        ({"n": 129}, "n"),
        ({"n": 10**6}, "n"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(10_000)]}, "tools"),
        (
            {"chat_template": "{% for a in range(999) %}{% for b in range(999) %}x{% endfor %}{% endfor %}"},
            "chat_template",
        ),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"messages": [HI["messages"][0]] * 10_000}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_000}]}, "messages[0].content"),
        ({"logit_bias": {str(n): 1 for n in range(100_000)}}, "logit_bias"),
        ({"bad_words": ["a"] * 2000}, "bad_words"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": list(range(200_000))}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_23_limits_at_parse(serving, change, param):
    async with serving() as server:
        with trio.fail_after(40):  # what it cost elsewhere was more
            answer = await server.ask("POST", CHAT, {**HI, **change})
        assert error_of(answer)["param"] == param
        assert len(answer.body) < 1000
        assert (await server.ask("POST", CHAT, {**HI, "max_tokens": 1})).status == 200


@pytest.mark.parametrize("depth", [100, 1000, 10_000])
async def test_23_nesting(serving, depth):
    nested = '{"a":' * depth + "1" + "}" * depth
    async with serving() as server:
        for field in ("metadata", "chat_template_kwargs", "logit_bias", "messages", "tool_choice", "wibble"):
            body = json.dumps({**HI, "max_tokens": 1})[:-1] + f', "{field}": {nested}}}'
            error_of(await server.ask("POST", CHAT, body.encode()))
        assert (await server.ask("POST", CHAT, {**HI, "max_tokens": 1})).status == 200


# --- 25, 27, 31: grammars, tools, templates ---


async def test_25_bad_grammars(serving):
    executor, model = random_model()
    async with serving(executor=executor, model=model) as server:
        client = await server.connect()
        tuple_array = {"type": "array", "items": [{"type": "string"}], "additionalItems": False}
        for bad in (
            {"structured_outputs": {"json": {"type": "not-a-type"}}},
            {"structured_outputs": {"json": {"$ref": "#"}}},
            {"structured_outputs": {"json": {"$ref": "#/$defs/none"}}},
            {"structured_outputs": {"regex": "("}},
            {"structured_outputs": {"regex": "(?=a)"}},
            {"structured_outputs": {"grammar": "start: other"}},
            {"structured_outputs": {"choice": [""]}},
        ):
            await client.send("POST", CHAT, {**HI, "max_tokens": 4, **bad})
            error = error_of(await client.receive())
            assert error["message"] and error["param"].startswith("structured_outputs")
        # an array after an older draft: refused in words, or served
        await client.send("POST", CHAT, {**HI, "max_tokens": 4, "structured_outputs": {"json": tuple_array}})
        assert (await client.receive()).status in (200, 400)
        await client.send("POST", CHAT, {**HI, "max_tokens": 4})
        assert (await client.receive()).status == 200
        await server.assert_all_free()


ARGUMENTS = [
    {},
    {"n": 1, "flag": True, "nothing": None, "nested": {"list": [1, {"a": "b"}], "empty": {}}},
    {"text": "a </tool_call> b"},
    {"text": 'quote " brace } {a,b'},
    {"text": "한\U0001fae0\n"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("thinks", [True, False])
async def test_27_streamed_arguments(serving, arguments, thinks):
    said = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
    template = THINKING if thinks else CALLING
    executor, model, _ = saying("byte-level", ("<think>\nso\n</think>\n" if thinks else "") + said, template=template)
    async with serving(executor=executor, model=model) as server:
        fields = {**HI, "tools": [{"type": "function", "function": {"name": "f"}}], "stop": ["never said"]}
        (choice,) = (await server.ask("POST", CHAT, fields)).json["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == arguments
        events = (await server.ask("POST", CHAT, {**fields, "stream": True})).events
        deltas = [d for c in events[:-1] for d in c["choices"][0]["delta"].get("tool_calls", ())]
        assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
        assert all(None not in delta.values() for delta in deltas)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "user", "content": "x"}],
        [{"role": "tool", "tool_call_id": "1", "content": "x"}],
        [{"role": "developer", "content": "x"}, {"role": "user", "content": "x"}],
    ],
)
async def test_31_a_template_that_refuses(serving, messages):
    strict = (
        "{% for m in messages %}{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
        "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    executor, model, _ = saying("byte-level", "x", template=strict)
    async with serving(executor=executor, model=model) as server:
        for stream in (True, False):
            error = error_of(await server.ask("POST", CHAT, {**HI, "messages": messages, "stream": stream}))
            assert error["param"] == "messages"
            assert "Roles must alternate" in error["message"]
        answer = await server.ask("POST", CHAT, {**HI, "messages": [{"role": "robot", "content": "x"}]})
        assert error_of(answer)["param"] == "messages[0].role"


# --- 9, 30: what depends on others ---


async def test_9_a_salt_keeps_prefixes_apart(serving):
    async with serving() as server:

        async def cached(salt):
            answer = await server.ask("POST", CHAT, {**HI, "max_tokens": 1, "cache_salt": salt})
            return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await cached("mine") == 0
        assert await cached("mine") > 0
        assert await cached("theirs") == 0


async def test_30_a_seed_gives_the_same_text_among_others(serving):
    executor, model = random_model()
    async with serving(executor=executor, model=model) as server:
        fields = {**HI, "temperature": 1, "seed": 42, "max_tokens": 20}
        alone = (await server.ask("POST", CHAT, fields)).json["choices"][0]["message"]["content"]
        texts = {}

        async def ask(seed):
            answer = await server.ask("POST", CHAT, {**fields, "seed": seed})
            texts[seed] = answer.json["choices"][0]["message"]["content"]

        async with trio.open_nursery() as nursery:
            for seed in range(36, 44):
                nursery.start_soon(ask, seed)
        assert texts[42] == alone
        assert len(set(texts.values())) > 1


async def test_29_drafts_change_neither_forms_nor_log_probabilities(serving):
    schema = {
        "type": "object",
        "properties": {"list": {"type": "array", "items": {"enum": ["aaaa", "bbbb"]}, "minItems": 8, "maxItems": 8}},
        "required": ["list"],
        "additionalProperties": False,
    }
    answers = []
    for method in ("off", "ngram"):
        executor, model = random_model()
        async with serving(executor=executor, model=model, engine={"speculative_method": method}) as server:
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            fields = {**HI, "temperature": 0, "logprobs": True, "max_tokens": 200}
            formed = (await server.ask("POST", CHAT, {**fields, "response_format": form})).json["choices"][0]
            free = (await server.ask("POST", CHAT, {**fields, "max_tokens": 60})).json["choices"][0]
            assert len(json.loads(formed["message"]["content"])["list"]) == 8
            for choice in (formed, free):
                content = choice["logprobs"]["content"]
                spelled = bytes(byte for entry in content for byte in entry["bytes"] or ())
                assert spelled.decode(errors="replace") == choice["message"]["content"]
            answers.append((formed["message"], free["message"], len(free["logprobs"]["content"])))
            await server.assert_all_free()
    assert answers[0] == answers[1]
