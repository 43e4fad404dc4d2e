"""How many writes an answer is, and that what is joined in one says the same."""

from __future__ import annotations

import h11
import orjson
import pytest
import trio
from quart import Response

from trio_llm.engine.simulation import ByteTokenizer, FakeModel
from trio_llm.server.connection import Connection

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
PROMPT = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 1}


class WordyTokenizer(ByteTokenizer):
    """Every token is 8 KiB of text, so that sockets fill up."""

    def decode(self, token_ids, *, skip_special_tokens=False, **_):
        return "x" * 8192 * len(token_ids)


@pytest.fixture
def written(monkeypatch):
    """What connections write, write by write."""
    found = []
    write = Connection._write

    async def noting(self, data):
        found.append(bytes(data))
        await write(self, data)

    monkeypatch.setattr(Connection, "_write", noting)
    return found


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, HI, 200),
        ("POST", CHAT, {**HI, "stream": True, "stream_options": {"include_usage": True}}, 200),
        ("POST", COMPLETIONS, PROMPT, 200),
        ("POST", COMPLETIONS, {**PROMPT, "stream": True}, 200),
        ("GET", "/health", None, 200),
        ("HEAD", "/health", None, 200),
        ("GET", "/nowhere", None, 404),
        ("POST", CHAT, {**HI, "messages": []}, 400),
        ("POST", CHAT, b"{", 400),
    ],
)
async def test_a_short_answer_is_one_write(serving, written, method, path, body, status):
    async with serving() as server:
        client = await server.connect()
        for _ in range(2):
            await client.send(method, path, body)
            if method == "HEAD":
                head = await client.until(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            else:
                answer = await client.receive()
                assert answer.status == status
                if isinstance(body, dict) and body.get("stream"):
                    assert answer.events[-1] == "DONE"
            assert client.buffer == b""
        assert len(written) == 2


async def test_what_http_cannot_parse_is_answered_in_one_write(serving, written):
    async with serving() as server:
        client = await server.connect()
        await client.stream.send_all(b"nonsense\r\n\r\n")
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert len(written) == 1


async def test_each_token_that_is_waited_for_is_one_write_and_the_last_of_them_ends_the_answer(serving, written, gated):
    executor, gate = gated
    async with serving(executor=executor) as server:
        client = await server.connect()
        await client.send("POST", CHAT, {**HI, "max_tokens": 4, "stream": True})
        for number in range(4):
            gate.let(1)
            await server.until(lambda number=number: len(written) == number + 1)
        assert (await client.receive()).events[-1] == "DONE"
        assert len(written) == 4
        assert written[0].startswith(b"HTTP/1.1 200 OK\r\n") and b"data: " in written[0]
        assert written[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (COMPLETIONS, PROMPT)])
async def test_the_head_does_not_wait_for_a_first_token_that_is_late(serving, launch, gated, path, body):
    executor, gate = gated
    async with serving(launch, executor=executor, first_result_timeout=0.01) as server:
        client = await server.connect()
        await client.send("POST", path, {**body, "stream": True})
        with trio.fail_after(10):
            assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        gate.open()
        with trio.fail_after(10):
            await client.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_an_answer_larger_than_the_socket_takes_comes_whole(serving, launch):
    async with serving(launch, model=FakeModel(tokenizer=WordyTokenizer())) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send("POST", CHAT, {**HI, "max_tokens": 100, "stream": True})
        # the engine is done with it long before its client has read it
        await server.until(lambda: server.engine.statistics().finished["length"] == 1)
        answer = await client.receive()
        text = "".join(
            choice["delta"].get("content", "") for event in answer.events[:-1] for choice in event["choices"]
        )
        assert len(text) == 100 * 8192
        assert answer.events[-1] == "DONE"
        await server.until(lambda: not server.app.exchanges)
        await client.send("GET", "/health")
        assert (await client.receive()).status == 200


async def test_a_client_that_leaves_in_the_last_write_leaves_nothing_behind(serving, launch):
    async with serving(launch, model=FakeModel(tokenizer=WordyTokenizer()), write_timeout=60) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send("POST", CHAT, {**HI, "max_tokens": 200, "stream": True})
        await server.until(lambda: server.engine.statistics().finished["length"] == 1)
        assert server.app.exchanges
        client.stream.socket.close()
        with trio.fail_after(10):
            await server.app.all_left()
        await server.assert_all_free()


async def test_a_body_that_fails_before_its_first_piece_is_no_answer(serving):
    def prepare(app):
        async def pieces():
            raise ZeroDivisionError
            yield b""

        app.add_url_rule("/broken", view_func=lambda: Response(pieces()))

    async with serving(prepare=prepare) as server:
        client = await server.connect()
        await client.send("GET", "/broken")
        with trio.fail_after(10), pytest.raises((EOFError, trio.BrokenResourceError)):
            await client.receive()
        assert (await server.ask("GET", "/health")).status == 200


async def test_who_is_silent_between_two_requests_is_let_go_and_who_waits_for_an_answer_is_not(serving, gated):
    executor, gate = gated
    async with serving(executor=executor, keep_alive_timeout=0.05) as server:
        client = await server.connect()
        for _ in range(2):
            await client.send("POST", CHAT, HI)
            with trio.move_on_after(0.15):
                await client.stream.receive_some()
                raise AssertionError("it was cut off, or answered")
            gate.let(1)
            assert (await client.receive()).status == 200
        with trio.fail_after(5):
            assert await client.stream.receive_some() == b""


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_only_the_head_and_the_end_of_a_stream_of_chunks_are_made_by_h11(
    serving, monkeypatch, written, gated, version
):
    sent = []
    send = h11.Connection.send
    monkeypatch.setattr(h11.Connection, "send", lambda self, event: sent.append(type(event)) or send(self, event))
    executor, gate = gated
    async with serving(executor=executor) as server:
        client = await server.connect()
        body = orjson.dumps({**HI, "max_tokens": 4, "stream": True})
        head = f"POST {CHAT} HTTP/{version}\r\nhost: here\r\ncontent-type: application/json\r\n"
        await client.stream.send_all(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        for number in range(4):
            gate.let(1)
            await server.until(lambda number=number: len(written) == number + 1)
        if version == "1.1":
            assert (await client.receive()).events[-1] == "DONE"
            assert sent == [h11.Response, h11.Data, h11.EndOfMessage]
        else:  # no chunks, and the end is that of the connection
            with trio.fail_after(10), pytest.raises(EOFError):
                await client.until(b"never")
            assert client.buffer.endswith(b"data: [DONE]\n\n")
            assert sent[:6] == [h11.Response, *[h11.Data] * 4, h11.EndOfMessage]
