"""Every failure has the envelope, the status and the code that clients build on."""

from __future__ import annotations

import json

import pytest
import trio
from structlog.testing import capture_logs

from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.server.openai import fields

HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
CHAT = "/v1/chat/completions"


def check(answer, status, code, param=None):
    error = answer.json["error"]
    assert answer.headers["content-type"] == "application/json"
    assert error.keys() == {"message", "type", "param", "code"}
    assert (answer.status, error["code"], error["param"]) == (status, code, param), error
    assert isinstance(error["message"], str) and error["message"]


BAD_FIELDS = [
    ({"model": None}, "missing_required_parameter", "model"),
    ({"model": 1}, "invalid_type", "model"),
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "hi"}, "invalid_type", "messages"),
    ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "invalid_type", "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "missing_required_parameter", "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "assistant"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "missing_required_parameter", "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "type": "custom", "function": {"name": "f"}}]}]},
        "invalid_value",
        "messages[0].tool_calls[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {}}}]}]},
        "invalid_type",
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"continue_final_message": True, "add_generation_prompt": True}, "invalid_value", "continue_final_message"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": json.loads("[" * 100 + "]" * 100)}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
    ({"reasoning_effort": "extreme"}, "invalid_value", "reasoning_effort"),
    ({"messages": [{"role": "user", "content": None}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "invalid_type", "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "missing_required_parameter",
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "unsupported_parameter",
        "messages[0].content[0].image_url",
    ),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "unknown_parameter", "messages[0].mood"),
    ({"messages": [HI["messages"][0]] * 4097}, "invalid_value", "messages"),
    ({"temperature": "1"}, "invalid_type", "temperature"),
    ({"temperature": True}, "invalid_type", "temperature"),
    ({"temperature": 2.5}, "invalid_value", "temperature"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"n": 129}, "invalid_value", "n"),
    ({"n": 0}, "invalid_value", "n"),
    ({"n": 1.5}, "invalid_type", "n"),
    ({"n": 10**6}, "invalid_value", "n"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"max_tokens": "5"}, "invalid_type", "max_tokens"),
    ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
    ({"max_tokens": 2**31}, "invalid_value", "max_tokens"),
    ({"max_tokens": 5000}, "context_length_exceeded", "max_tokens"),
    ({"max_completion_tokens": 5000}, "context_length_exceeded", "max_completion_tokens"),
    ({"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
    ({"seed": 2**70}, "invalid_type", "seed"),
    ({"stop": 5}, "invalid_type", "stop"),
    ({"stop": ["a", 1]}, "invalid_type", "stop[1]"),
    ({"stop": ["a"] * 5}, "invalid_value", "stop"),
    ({"stop": [""]}, "invalid_value", "stop"),
    ({"stop_token_ids": [1] * 5000}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [300]}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [1, -1]}, "invalid_value", "stop_token_ids"),
    ({"allowed_token_ids": [300]}, "invalid_value", "allowed_token_ids"),
    ({"logit_bias": {"300": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"a": 1}}, "invalid_type", "logit_bias"),
    ({"logit_bias": {"1": "2"}}, "invalid_type", "logit_bias.1"),
    ({"logit_bias": {"1": 100.5}}, "invalid_value", "logit_bias"),
    ({"logit_bias": [1]}, "invalid_type", "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "invalid_value", "logit_bias"),
    ({"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -2.5}, "invalid_value", "frequency_penalty"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"typical_p": 0}, "invalid_value", "typical_p"),
    ({"bad_words": [""]}, "invalid_value", "bad_words"),
    ({"min_tokens": 2, "max_tokens": 1}, "invalid_value", "min_tokens"),
    ({"min_tokens": -1}, "invalid_value", "min_tokens"),
    ({"logprobs": 1}, "invalid_type", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "invalid_value", "top_logprobs"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"cache_salt": "x" * 513}, "invalid_value", "cache_salt"),
    ({"stream": "no"}, "invalid_type", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"colour": 1}}, "unknown_parameter", "stream_options.colour"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "invalid_type", "stream_options.include_usage"),
    ({"wibble": 1}, "unknown_parameter", "wibble"),
    ({"user": 1}, "invalid_type", "user"),
    ({"metadata": []}, "invalid_type", "metadata"),
    ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
    ({"metadata": {"a" * 65: "b"}}, "invalid_value", "metadata"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "invalid_value",
        "stream_options.continuous_usage_stats",
    ),
    ({"best_of": 1}, "unknown_parameter", "best_of"),
    ({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 5, "truncation": "disabled"}, "invalid_value", "truncation"),
    ({"truncation": "some"}, "invalid_value", "truncation"),
    ({"store": True}, "unsupported_parameter", "store"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "context_length_exceeded", "messages"),
]


async def test_bad_fields(serving):
    async with serving() as server:
        client = await server.connect()
        for change, code, param in BAD_FIELDS:
            await client.send("POST", CHAT, {**HI, **change})
            check(await client.receive(), 400, code, param)
        # the same with stream: still a status, not a frame
        await client.send("POST", CHAT, {**HI, "stream": True, "max_tokens": 5000})
        check(await client.receive(), 400, "context_length_exceeded", "max_tokens")
        await client.send("POST", CHAT, HI)
        assert (await client.receive()).status == 200
        await server.assert_all_free()


@pytest.mark.parametrize("prompt", [5, [], "", [""], [[]], [1, "a"], [True], {"a": 1}, [1.5], [-1], [300]])
async def test_bad_prompts(serving, prompt):
    async with serving() as server:
        answer = await server.ask("POST", "/v1/completions", {"model": "fake", "prompt": prompt})
        assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")
        answer = await server.ask("POST", "/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 1})
        assert answer.status == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"a": NaN}', b'{"model": "\\ud83d"}', b"[" * 10000 + b"]" * 10000],
)
async def test_what_is_no_json_object(serving, body):
    async with serving() as server:
        check(await server.ask("POST", CHAT, body), 400, "invalid_json")


async def test_http_failures(serving):
    async with serving(max_request_bytes=1000) as server:
        check(await server.ask("GET", "/nowhere"), 404, "not_found")
        answer = await server.ask("GET", CHAT)
        check(answer, 405, "method_not_allowed")
        assert "POST" in answer.headers["allow"]
        check(await server.ask("POST", CHAT, b"a=b", content_type="text/plain"), 415, "unsupported_media_type")
        check(await server.ask("POST", CHAT, {**HI, "model": "gpt"}), 404, "model_not_found", "model")
        check(await server.ask("GET", "/v1/models/a/b"), 404, "model_not_found", "model")
        check(await server.ask("POST", CHAT, b" " * 1001), 413, "request_too_large")


async def test_content_type_may_be_absent_or_have_parameters(serving):
    async with serving() as server:
        for content_type in ("", "application/json; charset=utf-8", "application/problem+json"):
            assert (await server.ask("POST", CHAT, HI, content_type=content_type)).status == 200


async def test_too_large_chunked_body_gets_its_answer(serving):
    """The answer is read although the server does not take the rest of the body."""
    async with serving(max_request_bytes=100_000) as server:
        client = await server.connect()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await client.stream.send_all(head.encode())
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with trio.CancelScope() as sending:
            async with trio.open_nursery() as nursery:

                async def upload():
                    try:
                        for _ in range(40):
                            await client.stream.send_all(chunk)
                    except trio.BrokenResourceError:
                        pass

                nursery.start_soon(upload)
                check(await client.receive(), 413, "request_too_large")
                sending.cancel()


async def test_slow_body_is_408(serving):
    async with serving(body_timeout=0.05) as server:
        client = await server.connect()
        await client.stream.send_all(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{{".encode())
        check(await client.receive(), 408, "request_timeout")


@pytest.mark.parametrize(
    ("request_bytes", "status", "reason"),
    [
        (b"NONSENSE\r\n\r\n", 400, "request line"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400, "header line"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * 200_000 + b"\r\n\r\n", 431, "too long"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 501, "Transfer-Encoding"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HTTP/1.1"),
    ],
)
async def test_what_is_no_http_1(serving, request_bytes, status, reason):
    async with serving() as server:
        client = await server.connect()
        await client.stream.send_all(request_bytes)
        answer = await client.receive()
        assert answer.status == status
        assert answer.json["error"].keys() == {"message", "type", "param", "code"}
        assert reason in answer.json["error"]["message"]
        assert await client.stream.receive_some() == b""


async def test_values_that_ask_for_nothing_pass(serving):
    async with serving() as server:
        client = await server.connect()
        tables = [(CHAT, fields.CHAT, HI), ("/v1/completions", fields.COMPLETION, {"model": "fake", "prompt": "x"})]
        for path, table, body in tables:
            everything = {name: None for name in table if name not in body}
            await client.send("POST", path, {**everything, **body, "max_tokens": 1})
            assert (await client.receive()).status == 200
            for name, field in table.items():
                for value in field.neutral:
                    await client.send("POST", path, {**body, "max_tokens": 1, name: value})
                    assert (await client.receive()).status == 200, (name, value)
        passing = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "n": 1}
        passing |= {"store": False, "presence_penalty": 0.0, "logit_bias": {}, "tool_choice": "auto", "stream": False}
        passing |= {"response_format": {"type": "text"}, "modalities": ["text"], "service_tier": "default"}
        await client.send("POST", CHAT, {**HI, **passing})
        assert (await client.receive()).status == 200


async def test_compressed_bodies(serving):
    async with serving() as server:
        check(await server.ask("POST", CHAT, HI, content_encoding="gzip"), 415, "unsupported_media_type")
        assert (await server.ask("POST", CHAT, HI, content_encoding="identity")).status == 200


async def test_lenient_ignores_what_strict_refuses(serving):
    async with serving(compat="lenient") as server:
        extra = {"wibble": 1, "logprobs": True, "messages": [{**HI["messages"][0], "mood": "good"}]}
        with capture_logs() as logs:
            assert (await server.ask("POST", CHAT, {**HI, **extra})).status == 200
        (line,) = [line for line in logs if line["event"] == "ignored parameters"]
        assert line["parameters"] == ["messages[0].mood", "wibble"]
        check(await server.ask("POST", CHAT, {**HI, "temperature": "1"}), 400, "invalid_type", "temperature")


async def test_template_refuses(serving):
    async with serving() as server:

        class Refusing(type(server.engine.tokenizer)):
            def apply_chat_template(self, conversation, **options):
                raise ValueError("messages must alternate")

        server.engine.tokenizer = Refusing()
        # its own words stay, whatever the endpoint calls the field
        for path, body, param in ((CHAT, HI, "messages"), ("/v1/responses", {"model": "fake", "input": "x"}, "input")):
            answer = await server.ask("POST", path, body)
            check(answer, 400, "invalid_value", param)
            words = "the model's chat template does not accept these messages: messages must alternate"
            assert answer.json["error"]["message"] == words


async def test_request_id_is_echoed_but_never_used(serving):
    async with serving() as server:
        answer = await server.ask("POST", CHAT, HI, x_request_id="trace-1/2")
        assert answer.headers["x-request-id"] == "trace-1/2"
        assert "trace" not in answer.json["id"]
        for unsafe in ("a b", "x" * 129, "é"):
            answer = await server.ask("GET", "/nowhere", x_request_id=unsafe)
            assert answer.headers["x-request-id"] != unsafe


async def test_queue_full(serving, gated):
    executor, gate = gated
    limits = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    async with serving(executor=executor, engine=limits) as server:
        clients = [await server.connect() for _ in range(3)]
        for count, client in enumerate(clients[:2], start=1):
            await client.send("POST", CHAT, HI)
            await server.admitted(count)
        await clients[2].send("POST", CHAT, HI)
        answer = await clients[2].receive()
        check(answer, 503, "server_overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        gate.open()
        for client in clients[:2]:
            assert (await client.receive()).status == 200


async def test_prompt_that_fits_the_context_but_not_the_memory(serving):
    info = ExecutorInfo(num_blocks=8, block_size=4, vocab_size=256, max_model_len=1024)
    async with serving(executor=FakeExecutor(info)) as server:
        answer = await server.ask("POST", CHAT, {**HI, "messages": [{"role": "user", "content": "x" * 40}]})
        check(answer, 400, "context_length_exceeded", "messages")
        assert (await server.ask("POST", CHAT, HI)).status == 200
        assert (await server.ask("GET", "/v1/models")).json["data"][0]["max_model_len"] == 32


async def test_unexpected_errors_tell_nothing(serving, monkeypatch, caplog):
    async with serving() as server:

        def explode(*_, **__):
            raise ZeroDivisionError("a secret")

        monkeypatch.setattr(server.engine, "generate", explode)
        answer = await server.ask("POST", CHAT, HI)
        check(answer, 500, "internal_error")
        assert b"secret" not in answer.body


async def test_an_integer_that_is_too_long_is_told_its_limit(serving):
    async with serving() as server:
        answer = await server.ask("POST", CHAT, {**HI, "seed": 10**20})
        check(answer, 400, "invalid_type", "seed")
        assert "at most 64 bits" in answer.json["error"]["message"]
