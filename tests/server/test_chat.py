"""POST /v1/chat/completions and /v1/completions, as clients see them."""

from __future__ import annotations

import orjson
import pytest
import trio

from trio_llm.engine.choice import Delta

HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


async def test_unary(serving):
    async with serving() as server:
        answer = await server.ask("POST", "/v1/chat/completions", {**HI, "max_tokens": 5, "n": 2, "seed": 1})
        body = answer.json
        assert answer.status == 200
        assert body["object"] == "chat.completion"
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        for choice in body["choices"]:
            assert choice["finish_reason"] == "length"
            assert choice["logprobs"] is None
            assert choice["message"].keys() == {"role", "content", "refusal"}
        assert body["usage"]["completion_tokens"] == 10
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 10
        assert body["id"] == "chatcmpl-" + answer.headers["x-request-id"]
        await server.assert_all_free()


async def test_as_many_choices_as_may_be_asked_for(serving):
    async with serving() as server:
        answer = await server.ask("POST", "/v1/chat/completions", {**HI, "max_tokens": 2, "n": 128, "seed": 1})
        assert [choice["index"] for choice in answer.json["choices"]] == list(range(128))
        assert answer.json["usage"]["completion_tokens"] == 2 * 128
        await server.assert_all_free()


@pytest.mark.parametrize("n", [1, 3])
async def test_stream(serving, n):
    async with serving() as server:
        fields = {**HI, "max_tokens": 20, "n": n}
        whole = (await server.ask("POST", "/v1/chat/completions", fields)).json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await server.ask("POST", "/v1/chat/completions", {**fields, **options})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = answer.events
        assert done == "DONE"
        assert usage["choices"] == []
        counted = usage["usage"]
        # the second time the prompt's full blocks are found in the cache
        assert counted.pop("prompt_tokens_details")["cached_tokens"] > 0
        assert whole["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}
        assert counted == whole["usage"]
        assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
        assert all(chunk["usage"] is None for chunk in chunks)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        for index in range(n):
            assert choices[index] == {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "finish_reason": None,
                "logprobs": None,
            }
        for index in range(n):
            mine = [choice for choice in choices[n:] if choice["index"] == index]
            assert (
                "".join(choice["delta"].get("content", "") for choice in mine)
                == (whole["choices"][index]["message"]["content"])
            )
            assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]
            assert mine[-1]["delta"] == {}
            assert all(choice["delta"].keys() == {"content"} for choice in mine[:-1])


async def test_stream_without_usage_has_no_usage_key(serving):
    async with serving() as server:
        answer = await server.ask("POST", "/v1/chat/completions", {**HI, "max_tokens": 3, "stream": True})
        assert all("usage" not in chunk for chunk in answer.events[:-1])


async def test_completions(serving):
    async with serving() as server:
        fields = {"model": "fake", "prompt": "abc", "max_tokens": 6}
        whole = (await server.ask("POST", "/v1/completions", fields)).json
        assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-")
        assert whole["choices"][0].keys() == {"index", "text", "finish_reason", "logprobs"}
        answer = await server.ask("POST", "/v1/completions", {**fields, "stream": True})
        *chunks, done = answer.events
        assert done == "DONE"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
        for prompt in (list(b"abc"), ["abc"], [list(b"abc")]):
            other = (await server.ask("POST", "/v1/completions", {**fields, "prompt": prompt})).json
            assert other["choices"] == whole["choices"]


async def test_stop_string_and_max_completion_tokens(serving, gated):
    async with serving() as server:
        server.executor.next_token = lambda context, index: b"abcdefgh"[index % 8]
        fields = {**HI, "max_completion_tokens": 7, "stop": ["DE", "de"]}
        body = (await server.ask("POST", "/v1/chat/completions", fields)).json
        assert body["choices"][0]["message"]["content"] == "abc"
        assert body["choices"][0]["finish_reason"] == "stop"
        body = (await server.ask("POST", "/v1/chat/completions", {**fields, "stop": None})).json
        assert body["choices"][0]["message"]["content"] == "abcdefg"


@pytest.mark.parametrize(("setting", "expected"), [(None, 1024 - 20), (9, 9)])
async def test_absent_max_tokens(serving, setting, expected):
    async with serving(default_max_tokens=setting) as server:
        body = (await server.ask("POST", "/v1/chat/completions", {**HI, "max_tokens": None})).json
        assert body["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")
        assert body["usage"]["completion_tokens"] == expected


async def test_roles_and_parts(serving):
    async with serving() as server:
        seen = []
        tokenizer = server.engine.tokenizer
        render = tokenizer.apply_chat_template

        class Spy(type(tokenizer)):
            def apply_chat_template(self, conversation, **options):
                seen.append(list(conversation))
                return render(conversation, **options)

        server.engine.tokenizer = Spy()
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Jo"},
            {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "tool_calls": None},
            {"role": "user", "content": ""},
        ]
        answer = await server.ask("POST", "/v1/chat/completions", {**HI, "messages": messages, "max_tokens": 1})
        assert answer.status == 200
        assert seen[-1] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a\nb", "name": "Jo"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": ""},
        ]


async def test_headers_wait_for_the_first_result(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server:
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", {**HI, "stream": True, "max_tokens": 2})
        await server.admitted(1)
        await server.ask("GET", "/health")
        assert client.buffer == b""
        gate.open()
        assert (await client.receive()).events[-1] == "DONE"


async def test_failure_in_prefill_has_a_status(serving):
    async with serving() as server:

        def fail(plan):
            raise RuntimeError("no")

        server.executor.on_launch = fail
        server.executor.next_token = None
        answer = await server.ask("POST", "/v1/chat/completions", {**HI, "stream": True})
        assert answer.status == 500
        assert answer.json["error"]["code"] == "request_failed"
        assert answer.json["error"]["type"] == "server_error"


async def test_failure_half_way_is_a_status_for_unary_requests(serving):
    async with serving() as server:
        server.executor.next_token = lambda context, index: ord("a") if index < 3 else 1 // 0
        for _ in range(5):
            answer = await server.ask("POST", "/v1/chat/completions", {**HI, "max_tokens": 50, "n": 2})
            assert (answer.status, answer.json["error"]["code"]) == (500, "request_failed")
        await server.assert_all_free()


async def test_patience_ends_then_keep_alives_then_failure_is_a_frame(serving, gated):
    executor, gate = gated
    async with serving(executor=executor, first_result_timeout=0.01, sse_keep_alive_interval=0.01) as server:
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", {**HI, "stream": True})
        head = await client.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await client.until(b'"role":"assistant"')
        await client.until(b": keep-alive\n\n")
        await client.until(b": keep-alive\n\n")
        executor.next_token = lambda context, index: 1 // 0
        gate.open()
        await client.until(b'"code":"request_failed"}}\n\n')
        await client.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await server.assert_all_free()


async def test_hot_chunk_is_the_full_chunk(serving):
    from trio_llm.server.openai.chat_answers import ChatChunks
    from trio_llm.server.openai.chunks import Identity
    from trio_llm.server.openai.completions import TextChunks
    from trio_llm.server.openai.parsing import parse_chat, parse_completion
    from trio_llm.server.openai.wire import encode

    identity = Identity(id="chatcmpl-1", model='strange □ "name"', created=7)
    for with_usage in (True, False):
        options = {"stream": True, "stream_options": {"include_usage": with_usage}}
        chat = ChatChunks(identity, None, parse_chat({**HI, **options}, lenient=False))
        body = parse_completion({"model": "fake", "prompt": "x", **options}, lenient=False)
        text = TextChunks(identity, [], body, [])
        for piece in ('quote " and \\', "□", "\n\u2028é\U0001f600\x00", "x"):
            for index in (0, 7):
                for chunks in (chat, text):
                    plain = orjson.loads(encode(chunks.chunk([chunks.text_choice(index, piece)])))
                    if not with_usage:
                        del plain["usage"]
                    event = chunks.content(0, index, [Delta(0, piece)])
                    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
                    assert orjson.loads(event[6:]) == plain


async def test_deltas_that_arrived_are_joined(serving, gated):
    executor, gate = gated
    executor.next_token = lambda context, index: ord("a")
    async with serving(executor=executor) as server:
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", {**HI, "stream": True, "max_tokens": 200})
        gate.let(1)
        await client.until(b'"content":"a"')
        gate.open()
        await client.until(b'"finish_reason":"length"')


async def test_abort_by_id(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server:
        client = await server.connect()
        await client.send("POST", "/v1/chat/completions", {**HI, "stream": True, "max_tokens": 900})
        gate.let(3)
        await client.until(b'"id":"')
        request_id = (await client.until(b'"'))[:-1].decode()
        for wanted in ("nonsense", request_id + "x"):
            answer = await server.ask("POST", f"/v1/requests/{wanted}/abort")
            assert (answer.status, answer.json["error"]["code"]) == (404, "request_not_found")
        answer = await server.ask("POST", f"/v1/requests/{request_id}/abort")
        assert answer.json == {"id": request_id, "aborted": True}
        await client.until(b'"finish_reason":"abort"')
        await client.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        gate.open()
        await server.assert_all_free()
        answer = await server.ask("POST", f"/v1/requests/{request_id.removeprefix('chatcmpl-')}/abort")
        assert answer.status == 404


async def test_abort_of_a_unary_request_gives_what_there_was(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server, trio.open_nursery() as nursery:
        answers = []

        async def ask():
            answers.append(await server.ask("POST", "/v1/chat/completions", {**HI, "max_tokens": 900}))

        nursery.start_soon(ask)
        await server.admitted(1)
        gate.let(2)
        await server.until(lambda: server.engine.statistics().generation_tokens == 2)
        (exchange,) = [exchange for exchange in server.app.exchanges if exchange.generations]
        assert (await server.ask("POST", f"/v1/requests/{exchange.request_id}/abort")).status == 200
        await server.until(lambda: bool(answers))
        assert answers[0].json["choices"][0]["finish_reason"] == "abort"
        assert answers[0].json["usage"]["completion_tokens"] == 2
        gate.open()


async def test_a_salt_keeps_prefixes_apart(serving):
    async with serving() as server:

        async def cached(**fields):
            answer = await server.ask("POST", "/v1/chat/completions", {**HI, "max_tokens": 2, **fields})
            return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await cached(cache_salt="mine") == 0
        assert await cached(cache_salt="mine") > 0
        assert await cached(cache_salt="yours") == 0
        assert await cached() == 0
        assert await cached() > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_priority(serving, gated, path):
    """Of those that wait, the lowest goes first."""
    executor, gate = gated
    body = HI if path.startswith("/v1/chat") else {"model": "fake", "prompt": "hi"}
    async with serving(executor=executor, engine={"max_num_seqs": 1}) as server, trio.open_nursery() as nursery:
        order = []

        async def ask(priority):
            answer = await server.ask("POST", path, {**body, "max_tokens": 2, "priority": priority})
            assert answer.status == 200
            order.append(priority)

        for count, priority in enumerate((0, 5, -5), start=1):
            nursery.start_soon(ask, priority)
            await server.admitted(count)
        gate.let(4)
        await server.until(lambda: len(order) == 2)
        assert sorted(order) == [-5, 0]
        gate.open()
