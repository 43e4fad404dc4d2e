"""Anthropic's Messages API: another spelling of the same turns, and streamed or not the same."""

from __future__ import annotations

import json
import re

import pytest

from tests.server.conftest import INFO
from tests.server.scripted import CALLING, THINKING, random_model, saying
from tests.server.test_fields import TEMPLATE
from trio_llm.core.executor import FakeExecutor

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
WEATHER = {
    "name": "weather",
    "description": "it",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Rom"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TIME = {"name": "time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 3}}\n</tool_call>'
TIME_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
MODEL = {"type": "direct"}
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


def events_of(answer):
    """The events of a stream, each under its name."""
    assert answer.status == 200, answer.json
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in answer.body.decode().split("\n\n")[:-1]:
        first, second = part.split("\n")
        events.append(json.loads(second.removeprefix("data: ")))
        assert first == f"event: {events[-1]['type']}"
    return events


def join(events):
    """The message that events add up to, and that they come in order."""
    start, *events, delta, stop = events
    message = start["message"]
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    is_open = False
    for event in events:
        if event["type"] == "ping":
            continue
        assert event["index"] == len(message["content"]) - is_open
        if event["type"] == "content_block_start":
            block, pieces, is_open, signed = dict(event["content_block"]), [], True, False
            assert block in (
                {"type": "text", "text": "", "citations": None},
                {"type": "thinking", "thinking": "", "signature": ""},
                {**block, "type": "tool_use", "input": {}, "caller": MODEL},
            )
            message["content"].append(block)
        elif event["type"] == "content_block_stop":
            assert is_open and signed == (block["type"] == "thinking")
            is_open, text = False, "".join(pieces)
            if block["type"] == "tool_use":
                block["input"] = json.loads(text)
            else:
                block[block["type"]] = text
        elif event["delta"]["type"] == "signature_delta":
            signed = True
        else:
            kind, piece = event["delta"].values()
            assert is_open and not signed and piece
            assert kind == DELTAS[block["type"]]
            pieces.append(piece)
    assert not is_open
    return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}


async def ask(server, **fields):
    """A whole answer, after a look at whether a stream says the same."""
    whole = await server.ask("POST", MESSAGES, {**HI, **fields})
    assert whole.status == 200, whole.json
    streamed = join(events_of(await server.ask("POST", MESSAGES, {**HI, **fields, "stream": True})))
    body = dict(whole.json)
    assert body["id"].startswith("msg_") and streamed["id"].startswith("msg_")
    for each in (body, streamed):
        usage = each["usage"]
        # what is cached depends on who came before
        each["read"] = usage["input_tokens"] + usage.pop("cache_read_input_tokens")
        usage["input_tokens"] = None
        each["id"] = None
        for block in each["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id")
    assert body == streamed
    return body


async def test_text(serving):
    executor, model, ids = saying("byte-level", "the quick fox")
    async with serving(executor=executor, model=model) as server:
        body = await ask(server)
        assert body == {
            "id": None,
            "type": "message",
            "role": "assistant",
            "model": "fake",
            "content": [{"type": "text", "text": "the quick fox", "citations": None}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": {
                "input_tokens": None,
                "cache_creation_input_tokens": 0,
                "output_tokens": len(ids) + 1,
                "output_tokens_details": {"thinking_tokens": 0},
                "server_tool_use": None,
                "cache_creation": None,
                "inference_geo": None,
                "service_tier": "standard",
            },
            "read": len(model.tokenizer.encode("hi")),
        }
        await server.assert_all_free()


async def test_why_it_ended(serving):
    executor, model, _ = saying("byte-level", "the quick fox")
    async with serving(executor=executor, model=model) as server:
        cut = await ask(server, max_tokens=1)
        assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 1)
        stopped = await ask(server, stop_sequences=["never", "ck f"])
        assert stopped["content"] == [{"type": "text", "text": "the qui", "citations": None}]
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "ck f")
        nothing = await ask(server, stop_sequences=["the"])
        assert (nothing["content"], nothing["stop_sequence"]) == ([], "the")


async def test_events_in_their_order(serving):
    executor, model, _ = saying("byte-level", "hm")
    async with serving(executor=executor, model=model) as server:
        kinds = [event["type"] for event in events_of(await server.ask("POST", MESSAGES, {**HI, "stream": True}))]
        assert kinds[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_thinking(serving):
    executor, model, _ = saying("byte-level", "<think>\nhmm, so\n</think>\n\nthe fox", template=THINKING)
    async with serving(executor=executor, model=model) as server:
        body = await ask(server, thinking={"type": "enabled", "budget_tokens": 1024})
        assert body["content"] == [
            {"type": "thinking", "thinking": "hmm, so", "signature": ""},
            {"type": "text", "text": "the fox", "citations": None},
        ]
        thinking = body["usage"]["output_tokens_details"]["thinking_tokens"]
        assert 0 < thinking < body["usage"]["output_tokens"]


async def test_tool_use(serving):
    executor, model, _ = saying("byte-level", "Let me see. " + CALL + "\n" + TIME_CALL, template=CALLING)
    async with serving(executor=executor, model=model) as server:
        body = await ask(server, tools=[WEATHER, TIME])
        text, *calls = body["content"]
        assert (text["type"], text["text"].strip()) == ("text", "Let me see.")
        assert calls == [
            {"type": "tool_use", "name": "weather", "input": {"city": "Bern", "days": 3}, "caller": MODEL},
            {"type": "tool_use", "name": "time", "input": {}, "caller": MODEL},
        ]
        assert body["stop_reason"] == "tool_use"
        one = await ask(server, tools=[WEATHER, TIME], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert one["content"] == body["content"][:2]
        none = await ask(server, tools=[WEATHER], tool_choice={"type": "none"})
        assert [block["type"] for block in none["content"]] == ["text"]
        assert none["stop_reason"] == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_call_that_must_come(serving, choice):
    executor, model = random_model(template=CALLING)
    async with serving(executor=executor, model=model) as server:
        body = await ask(server, tools=[WEATHER], tool_choice=choice, temperature=0, max_tokens=300)
        (call,) = (block for block in body["content"] if block["type"] == "tool_use")
        assert call["name"] == "weather"
        assert call["input"]["city"] in ("Bern", "Rom") and call["input"]["days"] in (1, 2, 3)
        assert body["stop_reason"] == "tool_use"


async def test_an_input_that_is_cut_off(serving):
    executor, model = random_model(template=CALLING)
    async with serving(executor=executor, model=model) as server:
        wanted = {**HI, "tools": [WEATHER], "tool_choice": {"type": "any"}, "temperature": 0}
        whole = (await server.ask("POST", MESSAGES, wanted)).json
        for max_tokens in range(1, whole["usage"]["output_tokens"]):
            cut = await server.ask("POST", MESSAGES, {**wanted, "max_tokens": max_tokens})
            assert cut.json["stop_reason"] == "max_tokens"
            inputs = [block["input"] for block in cut.json["content"] if block["type"] == "tool_use"]
            assert inputs in ([], [{}], [whole["content"][-1]["input"]])


async def test_output_format(serving):
    executor, model = random_model()
    schema = WEATHER["input_schema"]
    async with serving(executor=executor, model=model) as server:
        body = await ask(server, output_config={"format": {"type": "json_schema", "schema": schema}}, temperature=0)
        (block,) = body["content"]
        assert json.loads(block["text"]).keys() == {"city", "days"}
        refused = {"format": {"type": "json_schema", "schema": {"type": "not-a-type"}}}
        answer = await server.ask("POST", MESSAGES, {**HI, "output_config": refused})
        assert answer.status == 400 and "output_config.format.schema" in answer.json["error"]["message"]


async def test_prompt_cache(serving):
    async with serving() as server:
        body = {**HI, "messages": [{"role": "user", "content": "the same long beginning " * 4}], "max_tokens": 2}
        first, second = [(await server.ask("POST", MESSAGES, body)).json["usage"] for _ in range(2)]
        assert first["cache_read_input_tokens"] == 0
        assert second["cache_read_input_tokens"] > first["input_tokens"] - 10
        assert second["cache_read_input_tokens"] + second["input_tokens"] == first["input_tokens"]
        start, *_ = events_of(await server.ask("POST", MESSAGES, {**body, "stream": True}))
        assert start["message"]["usage"]["cache_read_input_tokens"] == second["cache_read_input_tokens"]


# --- what the model reads ---


class Reader:
    """Keeps the prompts that it is given."""

    def __init__(self, template):
        self.prompts = []
        executor, self.model, _ = saying("byte-level", "yes", template=template)

        def next_token(context, index):
            if index == 0:
                self.prompts.append(self.model.tokenizer.decode(context))
            return executor.next_token(context, index)

        self.executor = FakeExecutor(executor.info, next_token=next_token)


CALLED = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bern"}}
READ = [
    ({"system": "be kind"}, "system: be kind\nuser: hi\nassistant: "),
    (
        {"system": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind", "cache_control": {}}]},
        "system: be\nkind\nuser: hi\nassistant: ",
    ),
    (
        {"messages": [("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]},
        "user: a\nb\nassistant: ",
    ),
    ({"messages": [("user", "a"), ("user", "b"), ("system", "c")]}, "user: a\nb\nsystem: c\nassistant: "),
    ({"messages": [("user", "a"), ("assistant", "The")]}, "user: a\nassistant: The"),
    (
        {
            "messages": [
                ("user", "a"),
                (
                    "assistant",
                    [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "redacted_thinking", "data": "?"},
                        {"type": "text", "text": "look"},
                        CALLED,
                    ],
                ),
                (
                    "user",
                    [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}, {"type": "text", "text": "so?"}],
                ),
            ]
        },
        'user: a\nassistant: hmlookc1 function weather {"city": "Bern"}\ntool: rainc1\nuser: so?\nassistant: ',
    ),
    (
        {
            "messages": [
                ("assistant", [CALLED, {**CALLED, "id": "c2"}]),
                (
                    "user",
                    [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c1",
                            "is_error": True,
                            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "net"}],
                        },
                        {"type": "tool_result", "tool_use_id": "c2"},
                    ],
                ),
            ]
        },
        (
            'assistant: c1 function weather {"city": "Bern"}c2 function weather {"city": "Bern"}\n'
            "tool: Error: no\nnetc1\ntool: c2\nassistant: "
        ),
    ),
    (
        {"messages": [("assistant", [{"type": "redacted_thinking", "data": "?"}]), ("user", "a")]},
        "assistant: \nuser: a\nassistant: ",
    ),
    ({"output_config": {"effort": "low"}}, "lowuser: hi\nassistant: "),
]


@pytest.mark.parametrize(("fields", "prompt"), READ)
async def test_what_the_model_reads(serving, fields, prompt):
    reader = Reader(TEMPLATE)
    turns = [{"role": role, "content": content} for role, content in fields.get("messages", [("user", "hi")])]
    fields = {"model": "fake", **fields, "messages": turns}
    async with serving(executor=reader.executor, model=reader.model) as server:
        answer = await server.ask("POST", MESSAGES, {**fields, "max_tokens": 9})
        assert answer.status == 200, answer.json
        assert reader.prompts == [prompt]
        counted = await server.ask("POST", COUNT, fields)
        assert counted.json == {"input_tokens": answer.json["usage"]["input_tokens"]}
        assert reader.prompts == [prompt]


SWITCH = "{{ enable_thinking if enable_thinking is defined else 'unset' }}{{ tools | length if tools }}" + THINKING


@pytest.mark.parametrize(
    ("fields", "head"),
    [
        ({}, "unset"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048, "display": "summarized"}}, "True"),
        ({"thinking": {"type": "adaptive"}}, "True"),
        ({"thinking": {"type": "disabled"}}, "False"),
        ({"tools": [WEATHER, TIME]}, "unset2"),
        ({"tools": [WEATHER], "tool_choice": {"type": "none"}}, "unsetuser"),
    ],
)
async def test_switches(serving, fields, head):
    reader = Reader(SWITCH)
    async with serving(executor=reader.executor, model=reader.model) as server:
        answer = await server.ask("POST", MESSAGES, {**HI, **fields})
        (prompt,) = reader.prompts
        assert prompt.startswith(head)
        counted = await server.ask("POST", COUNT, {"model": "fake", "messages": HI["messages"], **fields})
        assert counted.json == {"input_tokens": answer.json["usage"]["input_tokens"]}


# --- what is refused ---


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


REFUSED = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"messages": None}, "messages is missing"),
    ({"messages": []}, "messages must have at least one entry"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be one of user, assistant, system"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be"),
    (user(), "messages[0].content must have at least one block"),
    (user({"type": "text"}), "messages[0].content[0].text is missing"),
    (user({"type": "image"}), "content blocks of type image are not supported"),
    (user({"type": "image", "source": {"type": "base64"}}), "messages[0].content[0].source is not supported here"),
    (user({"type": "thinking", "thinking": "x"}), "messages[0].content[0].type must be one of text, tool_result"),
    (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id is missing"),
    (
        user({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text"}, {"type": "image"}]}),
        "messages[0].content[0].content[0].text is missing",
    ),
    (
        user({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}),
        "content blocks of type image are not supported in a tool_result",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
        "messages must not end with a tool_use",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "input": {}}]}]},
        "messages[0].content[0].name is missing",
    ),
    ({"temperature": 1.5}, "temperature must be at least 0 and at most 1"),
    ({"top_p": 0}, "top_p must be above 0"),
    ({"stop_sequences": ["a"] * 5}, "stop_sequences takes at most 4 strings"),
    ({"stop_sequences": "a"}, "stop_sequences must be an array"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens must be a positive integer"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type must be one of enabled, adaptive, disabled"),
    ({"tools": [{**WEATHER, "type": "web_search_20250305"}]}, "tools[0].type must be one of custom"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
    ({"tools": [WEATHER, {"name": "a b", "input_schema": {}}]}, "tools[1].name must be of 1 to 64 letters"),
    ({"tools": [WEATHER] * 129}, "tools takes at most 128 entries"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ({"tool_choice": {"type": "any"}}, "tool"),
    ({"container": "x"}, "container is not supported here"),
    ({"mood": 1}, "unknown parameter: mood"),
]


async def test_refused(serving):
    executor, model, _ = saying("byte-level", "yes", template=CALLING)
    async with serving(executor=executor, model=model) as server:
        client = await server.connect()
        for change, words in REFUSED:
            await client.send("POST", MESSAGES, {**HI, **change, "stream": True})
            answer = await client.receive()
            assert answer.status == 400, change
            message = answer.json["error"]["message"]
            assert answer.json == {
                "type": "error",
                "error": {"type": "invalid_request_error", "message": message},
                "request_id": answer.headers["request-id"],
            }
            assert words in message
            await client.send("POST", MESSAGES, {**HI, "tools": [WEATHER]})
            assert (await client.receive()).status == 200
        await server.assert_all_free()


async def test_lenient(serving):
    async with serving(compat="lenient") as server:
        answer = await server.ask("POST", MESSAGES, {**HI, "max_tokens": 2, "container": "x", "mood": 1})
        assert answer.status == 200


async def test_every_failure_has_the_envelope(serving):
    async with serving(api_key=("sesame",), max_request_bytes=2000) as server:

        async def fails(status, kind, method="POST", path=MESSAGES, body=HI, **headers):
            answer = await server.ask(method, path, body, **{"x_api_key": "sesame", **headers})
            assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (status, "error", kind)
            assert answer.json["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
            assert "openai-version" not in answer.headers

        for path in (MESSAGES, COUNT):
            await fails(401, "authentication_error", path=path, x_api_key="wrong")
            await fails(405, "invalid_request_error", "GET", path, None)
            await fails(413, "request_too_large", path=path, body={**HI, "system": "x" * 2000})
            await fails(415, "invalid_request_error", path=path, content_type="text/plain")
            await fails(400, "invalid_request_error", path=path, body=b"{")
        await fails(404, "not_found_error", path=MESSAGES + "/batches")
        await fails(404, "not_found_error", body={**HI, "model": "gpt"}, x_request_id="mine")
        server.engine.drain()
        await fails(503, "overloaded_error")
        # and elsewhere it is OpenAI's
        other = await server.ask("POST", "/v1/messagesque", HI, x_api_key="sesame")
        assert other.json["error"].keys() == {"message", "type", "param", "code"}
        assert "request-id" not in other.headers and "openai-version" in other.headers


async def test_a_stream_that_fails(serving):
    def next_token(context, index):
        if index == 5:
            raise RuntimeError("broken")
        return ord("a")

    async with serving(executor=FakeExecutor(INFO, next_token=next_token)) as server:
        answer = await server.ask("POST", MESSAGES, {**HI, "stream": True})
        *events, last = events_of(answer)
        assert "content_block_delta" in [event["type"] for event in events]
        assert last["error"]["type"] == "api_error"
        assert last["request_id"] == answer.headers["request-id"]
        await server.assert_all_free()


async def test_abort(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server:
        client = await server.connect()
        await client.send("POST", MESSAGES, {**HI, "max_tokens": 900, "stream": True})
        await server.admitted(1)
        gate.let(3)
        head = await client.until(b"content_block_delta")
        name = re.search(rb'"id":"(msg_\w+)"', head)[1].decode()
        assert (await server.ask("POST", f"/v1/requests/{name}/abort")).status == 200
        assert b'"stop_reason":"abort"' in await client.until(b"message_stop")
        gate.open()
        await server.assert_all_free()


async def test_a_client_that_leaves(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server:
        client = await server.connect()
        await client.send("POST", MESSAGES, {**HI, "max_tokens": 900, "stream": True})
        await server.admitted(1)
        gate.let(3)
        await client.until(b"content_block_delta")
        await client.stream.aclose()
        gate.open()
        await server.assert_all_free()
        assert server.engine.statistics().finished["abort"] == 1
