"""The Responses API, whole and streamed, through raw HTTP and through openai's package."""

from __future__ import annotations

import json
import re

import openai
import pytest

from tests.server.scripted import CALLING, INFO, THINKING, saying
from trio_llm.core.executor import FakeExecutor
from trio_llm.engine.simulation import FakeModel
from trio_llm.server.exchange import Exchange
from trio_llm.server.openai import compatibility
from trio_llm.server.openai.responses.endpoints import store_of
from trio_llm.server.openai.responses.store import ResponseStore, StoredResponse
from trio_llm.server.openai.wire import FunctionCall, Message, ToolCall

PATH = "/v1/responses"
HI = {"model": "fake", "input": "hi"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "it",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def join(events):
    """The response that the events of a stream add up to, after a look at their order."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items = []
    for event in events[2:-1]:
        kind, place = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert place == len(items)
            items.append(event["item"])
            assert event["item"]["status"] == "in_progress"
            continue
        assert place == len(items) - 1
        item = items[place]
        if kind == "output_item.done":
            assert event["item"]["id"] == item["id"]
            if item["type"] == "function_call":
                assert event["item"]["arguments"] == item["arguments"]
            else:
                assert [part["text"] for part in event["item"]["content"]] == [p["text"] for p in item["content"]]
            items[place] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        match kind:
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == item["content"][event["content_index"]]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == item["arguments"]
            case "content_part.done":
                assert event["part"]["text"] == item["content"][event["content_index"]]["text"]
            case _:
                pytest.fail(kind)
    last = events[-1]["response"]
    assert last["output"] == items
    return last, events[-1]["type"]


def comparable(response):
    """Without what differs from one request to the next."""
    text = json.dumps(response)
    for old, new in [(response["id"].removeprefix("resp_"), "ID"), (str(response["created_at"]), "0")]:
        text = text.replace(old, new)
    body = json.loads(text)
    for item in body["output"]:
        if item["type"] == "function_call":
            item["call_id"] = "CALL"
    body["completed_at"] = body["completed_at"] is not None
    body["usage"]["input_tokens_details"]["cached_tokens"] = 0
    return body


async def ask(server, **fields):
    """The answer, after a look at whether a stream says the same."""
    whole = await server.ask("POST", PATH, {**HI, **fields})
    assert whole.status == 200, whole.json
    streamed = await server.ask("POST", PATH, {**HI, **fields, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    names = [line[7:] for line in streamed.body.decode().splitlines() if line.startswith("event: ")]
    parts = [line[6:] for line in streamed.body.decode().splitlines() if line.startswith("data: ")]
    events = [json.loads(part) for part in parts]
    assert names == [event["type"] for event in events]
    last, kind = join(events)
    assert kind == ("response.completed" if last["status"] == "completed" else "response.incomplete")
    assert comparable(last) == comparable(whole.json)
    return whole.json


def texts(response):
    return [(item["type"], item.get("arguments") or item["content"][0]["text"]) for item in response["output"]]


async def test_a_text(serving):
    executor, model, ids = saying("byte-level", "Aare, Rhine, Rhone")
    async with serving(executor=executor, model=model) as server:
        body = await ask(server, metadata={"a": "b"}, instructions="Be short.", temperature=0.5)
    assert texts(body) == [("message", "Aare, Rhine, Rhone")]
    assert body["status"] == "completed"
    assert body["object"] == "response"
    assert body["metadata"] == {"a": "b"}
    assert body["instructions"] == "Be short."
    assert body["temperature"] == 0.5
    assert body["usage"]["output_tokens"] == len(ids) + 1
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + len(ids) + 1
    assert body["error"] is None
    assert body["incomplete_details"] is None


async def test_a_text_that_is_cut(serving):
    executor, model, _ = saying("byte-level", "one two three four")
    async with serving(executor=executor, model=model) as server:
        body = await ask(server, max_output_tokens=2)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"


async def test_reasoning_text_and_calls(serving):
    text = f"<think>\nhm, well\n</think>\n\nLet me look.\n{CALL}"
    executor, model, _ = saying("byte-level", text, template=THINKING)
    async with serving(executor=executor, model=model) as server:
        body = await ask(server, tools=[WEATHER])
    assert texts(body) == [
        ("reasoning", "hm, well"),
        ("message", "Let me look.\n"),
        ("function_call", '{"city": "Bern"}'),
    ]
    assert body["output"][2]["name"] == "weather"
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_log_probabilities(serving):
    executor, model, ids = saying("byte-level", "Aare")
    async with serving(executor=executor, model=model) as server:
        body = await ask(server, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = body["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs) == "Aare"
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    assert len(logprobs) == len(ids)


async def test_log_probabilities_are_those_of_the_text_alone(serving):
    text = f"<think>\nhm, well\n</think>\n\nLet me look.\n{CALL}"
    executor, model, ids = saying("byte-level", text, template=THINKING)
    async with serving(executor=executor, model=model) as server:
        body = await ask(server, tools=[WEATHER], include=["message.output_text.logprobs"])
        logprobs = body["output"][1]["content"][0]["logprobs"]
        spelled = b"".join(bytes(entry["bytes"]) for entry in logprobs)
        # the last token may have more in it than text
        assert spelled.startswith(b"Let me look.\n") and len(logprobs) < len(ids) / 2


async def test_log_probabilities_of_half_a_character(serving):
    executor, model, _ = saying("byte-level", "a\U0001fae0")
    async with serving(executor=executor, model=model) as server:
        body = await ask(server, include=["message.output_text.logprobs"], max_output_tokens=3)
        assert texts(body) == [("message", "a\ufffd")]
        assert len(body["output"][0]["content"][0]["logprobs"]) == 3


async def test_what_a_stream_has_joined_is_told_apart_again(serving, monkeypatch):
    """All tokens arrive at once: their log-probabilities are those that they would have one by one."""
    receive = Exchange.receive

    async def receive_all(exchange):
        deltas = await receive(exchange)
        while deltas[-1][1].finish_reason is None:
            deltas += await receive(exchange)
        return deltas

    monkeypatch.setattr(Exchange, "receive", receive_all)
    executor, model, _ = saying("byte-level", "<think>\nhm, well\n</think>\n\nLet me look.", template=THINKING)
    async with serving(executor=executor, model=model) as server:
        body = await ask(server, include=["message.output_text.logprobs"])
        logprobs = body["output"][1]["content"][0]["logprobs"]
        assert b"".join(bytes(entry["bytes"]) for entry in logprobs) == b"Let me look."


async def conversation(server, *bodies):
    """The prompts' texts, as the template wrote them."""
    for body in bodies:
        answer = await server.ask("POST", PATH, body)
        assert answer.status == 200, answer.json
    return answer.json


def telling():
    """An executor that keeps the prompts that it is given, and a model of it."""
    executor, model, _ = saying("byte-level", "yes", template=CALLING)
    prompts = []
    admit = FakeExecutor.admit

    class Telling(FakeExecutor):
        def admit(self, sequence_id, task):
            prompts.append(model.tokenizer.decode(list(task.prompt_token_ids)))
            admit(self, sequence_id, task)

    return Telling(INFO, next_token=executor.next_token), model, prompts


async def test_a_response_is_continued(serving):
    executor, model, prompts = telling()
    async with serving(executor=executor, model=model) as server:
        first = (await server.ask("POST", PATH, {**HI, "instructions": "once"})).json
        second = (await server.ask("POST", PATH, {**HI, "input": "more", "previous_response_id": first["id"]})).json
        third = await server.ask("POST", PATH, {**HI, "input": "and", "previous_response_id": second["id"]})
    assert third.json["previous_response_id"] == second["id"]
    assert prompts == [
        "system: once\nuser: hi\nassistant: ",
        "user: hi\nassistant: yes\nuser: more\nassistant: ",
        "user: hi\nassistant: yes\nuser: more\nassistant: yes\nuser: and\nassistant: ",
    ]


async def test_items_of_every_type_become_messages(serving):
    executor, model, prompts = telling()
    items = [
        {"role": "developer", "content": "be good"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "look:", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"role": "user", "content": "thanks"},
    ]
    async with serving(executor=executor, model=model) as server:
        await conversation(server, {**HI, "input": items})
    (prompt,) = prompts
    lines = prompt.splitlines()
    assert lines[0] == "system: be good"
    assert lines[1] == "user: weather?"
    assert lines[2] == "assistant: look:<tool_call>"
    assert json.loads(lines[3]) == {"name": "weather", "arguments": {"city": "Bern"}}
    assert lines[5:] == ["tool: sun", "user: thanks", "assistant: "]


async def test_responses_are_kept_listed_and_deleted(serving):
    executor, model, _ = saying("byte-level", "yes")
    async with serving(executor=executor, model=model, max_stored_responses=2) as server:
        made = [(await server.ask("POST", PATH, HI)).json for _ in range(3)]
        first, second, third = (body["id"] for body in made)
        assert (await server.ask("GET", f"{PATH}/{first}")).status == 404
        kept = await server.ask("GET", f"{PATH}/{second}")
        assert kept.status == 200
        assert kept.json == made[1]
        listed = (await server.ask("GET", f"{PATH}/{third}/input_items")).json
        assert [item["content"] for item in listed["data"]] == [[{"type": "input_text", "text": "hi"}]]
        assert listed["first_id"] == listed["last_id"] == listed["data"][0]["id"]
        deleted = await server.ask("DELETE", f"{PATH}/{second}")
        assert deleted.json == {"id": second, "object": "response", "deleted": True}
        for method, path in [("GET", second), ("DELETE", second), ("POST", f"{second}/cancel")]:
            answer = await server.ask(method, f"{PATH}/{path}")
            assert (answer.status, answer.json["error"]["code"]) == (404, "response_not_found")
        answer = await server.ask("POST", PATH, {**HI, "previous_response_id": second})
        assert (answer.status, answer.json["error"]["param"]) == (404, "previous_response_id")
        unstored = (await server.ask("POST", PATH, {**HI, "store": False})).json
        assert unstored["store"] is False
        assert (await server.ask("GET", f"{PATH}/{unstored['id']}")).status == 404
        ended = await server.ask("POST", f"{PATH}/{third}/cancel")
        assert (ended.status, ended.json["error"]["param"]) == (400, "response_id")


async def test_nothing_is_kept_where_nothing_may_be(serving):
    executor, model, _ = saying("byte-level", "yes")
    async with serving(executor=executor, model=model, max_stored_responses=0) as server:
        made = (await server.ask("POST", PATH, HI)).json
        assert made["store"] is False
        assert (await server.ask("GET", f"{PATH}/{made['id']}")).status == 404
        answer = await server.ask("POST", PATH, {**HI, "store": True})
        assert (answer.status, answer.json["error"]["param"]) == (400, "store")


async def test_a_response_that_is_being_made_can_be_cancelled(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server:
        client, other = await server.connect(), await server.connect()
        await client.send("POST", PATH, {**HI, "stream": True, "max_output_tokens": 500})
        gate.let(3)
        created = json.loads((await client.until(b"\n\n")).decode().rpartition("data: ")[2])
        response_id = created["response"]["id"]
        await other.send("GET", f"{PATH}/{response_id}")
        assert (await other.receive()).json["status"] == "in_progress"
        await other.send("POST", PATH, {**HI, "previous_response_id": response_id})
        assert (await other.receive()).json["error"]["param"] == "previous_response_id"
        await other.send("POST", f"{PATH}/{response_id}/cancel")
        assert (await other.receive()).json["status"] == "cancelled"
        gate.open()
        rest = await client.until(b"0\r\n\r\n")
        last = json.loads(rest.decode().rpartition("data: ")[2].split("\n")[0])
        assert last["response"]["status"] == "cancelled"
        await server.assert_all_free()


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_leaves_nothing_behind(serving, gated, stream):
    executor, gate = gated
    async with serving(executor=executor) as server:
        client = await server.connect()
        await client.send("POST", PATH, {**HI, "stream": stream, "max_output_tokens": 500})
        await server.admitted(1)
        store = store_of(server.app)
        await server.until(lambda: len(store.in_flight) == 1)
        await client.stream.aclose()
        gate.open()
        await server.until(lambda: not store.in_flight)
        await server.assert_all_free()
        assert not store._responses


async def test_a_response_can_be_aborted_by_its_id(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server:
        client = await server.connect()
        await client.send("POST", PATH, {**HI, "stream": True, "max_output_tokens": 500})
        gate.let(3)
        created = json.loads((await client.until(b"\n\n")).decode().rpartition("data: ")[2])
        gone = await server.ask("POST", f"/v1/requests/{created['response']['id']}/abort")
        assert gone.json == {"id": created["response"]["id"], "aborted": True}
        gate.open()
        assert b"response.incomplete" in await client.until(b"0\r\n\r\n")
        await server.assert_all_free()


async def test_items_of_the_input_come_in_pages(serving):
    executor, model, _ = saying("byte-level", "yes")
    items = [{"type": None, "id": None, "role": "user", "content": str(number)} for number in range(25)]
    items[3]["id"] = "mine"
    async with serving(executor=executor, model=model) as server:
        made = (await server.ask("POST", PATH, {**HI, "input": items})).json

        async def page(query=""):
            return (await server.ask("GET", f"{PATH}/{made['id']}/input_items{query}")).json

        first = await page()
        assert [item["content"] for item in first["data"]] == [str(number) for number in range(24, 4, -1)]
        assert first["has_more"] and first["first_id"] == first["data"][0]["id"]
        rest = await page(f"?after={first['last_id']}")
        assert [item["content"] for item in rest["data"]] == ["4", "3", "2", "1", "0"]
        assert not rest["has_more"]
        assert rest["data"][1]["id"] == "mine"
        ids = [item["id"] for item in (await page("?order=asc&limit=100"))["data"]]
        assert len(set(ids)) == 25
        assert (await page(f"?order=asc&after={ids[-1]}"))["data"] == []
        for query, param in [("order=up", "order"), ("limit=0", "limit"), ("limit=x", "limit"), ("after=x", "after")]:
            assert (await page(f"?{query}"))["error"]["param"] == param
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            listed = [item async for item in client.responses.input_items.list(made["id"], limit=4)]
            assert len(listed) == 25


WRONG = [
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text.format.schema"),
    ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
    ({"background": True}, "background"),
    ({"conversation": "x"}, "conversation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"temperature": 9}, "temperature"),
    ({"frequency": 1}, "frequency"),
    ({"stream_options": 3}, "stream_options"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "input[0].content[0].refusal"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": []}]}, "input[0].output"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]}, "input[0].arguments"),
    ({"input": [{"type": "reasoning", "content": []}]}, "input"),
    ({"input": "x" * 2000}, "input"),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": 3}}, "tool_choice.name"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_what_is_wrong_is_named(serving, fields, param):
    executor, model, _ = saying("byte-level", "yes")
    async with serving(executor=executor, model=model) as server:
        answer = await server.ask("POST", PATH, {**HI, **fields})
        assert answer.status == 400, answer.json
        if param is not None:
            assert answer.json["error"]["param"] == param
        assert not re.search(r"messages|max_tokens|max_completion|function\.name", answer.json["error"]["message"])
        assert (await server.ask("POST", PATH, HI)).status == 200


async def test_refused_fields_are_named_and_ignored_where_leniency_is_wanted(serving):
    executor, model, _ = saying("byte-level", "yes")
    rows = [name for name, field in compatibility.RESPONSE_TABLES["POST /v1/responses"][1].items()]
    refused = [
        name for name in rows if compatibility.RESPONSE_TABLES["POST /v1/responses"][1][name].treatment == "refused"
    ]
    assert refused
    async with serving(executor=executor, model=model) as strict, serving(compat="lenient") as lenient:
        for name in refused:
            answer = await strict.ask("POST", PATH, {**HI, name: {"asks": "for something"}})
            assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported_parameter"), name
            assert answer.json["error"]["param"] == name
            body = {**HI, "max_output_tokens": 1, name: {"asks": "for something"}}
            assert (await lenient.ask("POST", PATH, body)).status == 200


async def test_what_fails_in_mid_stream_is_told(serving):
    executor, model, _ = saying("byte-level", "one two three four five six")
    calm = executor.next_token

    def next_token(context, index):
        if index == 3:
            raise RuntimeError("broken")
        return calm(context, index)

    executor.next_token = next_token
    async with serving(executor=executor, model=model, first_result_timeout=60) as server:
        answer = await server.ask("POST", PATH, {**HI, "stream": True})
        last = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: ")][-1]
        event = json.loads(last)
        assert event["type"] == "response.failed"
        assert event["response"]["status"] == "failed"
        assert event["response"]["error"]["code"] == "request_failed"
        await server.assert_all_free()


async def test_openais_own_package(serving):
    text = f"Let me look.\n{CALL}"
    executor, model, _ = saying("byte-level", text, template=CALLING)
    async with serving(executor=executor, model=model) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            made = await client.responses.create(model="fake", input="hi", tools=[WEATHER])
            assert made.output_text == "Let me look.\n"
            async with client.responses.stream(model="fake", input="hi", tools=[WEATHER]) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            assert final.output_text == "Let me look.\n"
            assert json.loads(final.output[1].arguments) == {"city": "Bern"}
            again = await client.responses.retrieve(made.id)
            assert again.output_text == made.output_text
            items = await client.responses.input_items.list(made.id)
            assert len(items.data) == 1
            await client.responses.delete(made.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made.id)


def test_a_store_is_bounded_in_bytes_too(monkeypatch):
    monkeypatch.setattr("trio_llm.server.openai.responses.store.MAX_STORED_BYTES", 1000)
    store = ResponseStore(100)
    for number in range(10):
        store.add(StoredResponse(str(number), b"x" * 100, [Message(role="user", content="y" * 200)], []))
    assert [str(number) in store._responses for number in range(10)] == [False] * 7 + [True] * 3
    store.delete("9")
    assert store._size == 2 * 302


def test_all_that_a_response_keeps_counts():
    call = ToolCall(id="c", function=FunctionCall(name="f", arguments="x" * 1000))
    message = Message(role="assistant", tool_calls=[call], reasoning_content="y" * 1000)
    assert StoredResponse("1", b"", [message], [{"id": "z" * 1000}]).size > 3000


def test_the_tables_are_in_the_document():
    assert "POST /v1/responses" in compatibility.render()


async def test_what_the_specification_asks_for_is_there(serving):
    async with serving(model=FakeModel(eos_token_ids=[0])) as server:
        server.executor.next_token = lambda context, index: 97
        fields = {"model": "fake", "input": "hi", "safety_identifier": "me", "prompt_cache_key": "mine"}
        body = (await server.ask("POST", "/v1/responses", {**fields, "max_output_tokens": 3})).json
        assert (body["status"], body["completed_at"]) == ("incomplete", None)
        assert (body["safety_identifier"], body["prompt_cache_key"]) == ("me", "mine")
        assert (body["presence_penalty"], body["frequency_penalty"]) == (0, 0)
        server.executor.next_token = lambda context, index: 0
        body = (await server.ask("POST", "/v1/responses", {"model": "fake", "input": "hi"})).json
        assert body["status"] == "completed" and body["completed_at"] >= body["created_at"]


async def test_other_endpoints_of_theirs_are_not_here(serving):
    async with serving() as server:
        answer = await server.ask("POST", "/v1/responses/compact", {"model": "fake", "input": "hi"})
        assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")
