"""The faults of the stock stack, each on a real socket.  Their numbers are those of docs/server.md."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from trio_llm.engine.simulation import ByteTokenizer, FakeModel
from trio_llm.server.connection import Connection

CHAT = "/v1/chat/completions"
LONG = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 900}
STREAM = {**LONG, "stream": True}
WEBSOCKET = b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
HTTP2_SETTINGS = b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n"


def descriptors():
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


class WordyTokenizer(ByteTokenizer):
    """Every token is 8 KiB of text, so that sockets fill up."""

    def decode(self, token_ids, *, skip_special_tokens=False, **_):
        return "x" * 8192 * len(token_ids)


# 1: one request can end the process


@pytest.mark.parametrize(
    ("attack", "status"),
    [
        # a WebSocket upgrade with a byte too many; there are no WebSockets here, so it is a plain GET
        (
            b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n" + WEBSOCKET + b"\r\nx",
            200,
        ),
        # cleartext HTTP/2, by prior knowledge and by upgrade
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", 505),
        (
            b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade, http2-settings\r\n"
            + HTTP2_SETTINGS,
            200,
        ),
        # a body whose chunks are broken, while the request is being handled
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
async def test_no_request_ends_the_process(serving, attack, status):
    async with serving() as server:
        client = await server.connect()
        await client.stream.send_all(attack)
        assert (await client.until(b"\r\n\r\n")).split()[1] == str(status).encode()
        await client.stream.aclose()
        assert (await server.ask("GET", "/health")).status == 200


async def test_a_failing_connection_fails_alone(serving, monkeypatch, caplog):
    from trio_llm.server import connection

    async with serving() as server:
        neighbour = await server.connect()
        await neighbour.send("GET", "/health")
        await neighbour.receive()
        with monkeypatch.context() as patch:

            async def explode(*_):
                raise ZeroDivisionError

            patch.setattr(connection._HTTP1Protocol, "_create_stream", explode)
            client = await server.connect()
            await client.send("GET", "/health")
            with pytest.raises((EOFError, trio.BrokenResourceError)):
                await client.receive()
        await neighbour.send("GET", "/health")
        assert (await neighbour.receive()).status == 200
    assert "a connection failed" in caplog.text


# 2: quart-trio cancels its own connection recycling


async def test_idle_connections_are_closed_at_shutdown(serving, launch):
    async with serving(launch) as server:
        clients = [await server.connect() for _ in range(20)]
        for client in clients:
            await client.send("GET", "/health")
            await client.receive()
        server.stop.set()
        with trio.fail_after(2):
            for client in clients:
                assert await client.stream.receive_some() == b""
            await server.closed.wait()


async def test_connection_close_is_honoured(serving, launch):
    async with serving(launch) as server:
        for _ in range(20):
            client = await server.connect()
            await client.send("GET", "/health", connection="close")
            await client.receive()
            with trio.fail_after(2):
                assert await client.stream.receive_some() == b""


async def test_connections_are_used_again(serving, launch):
    async with serving(launch) as server:
        client = await server.connect()
        for stream in (False, True, False, True):
            await client.send("POST", CHAT, {**LONG, "max_tokens": 3, "stream": stream})
            assert (await client.receive()).status == 200
        await server.assert_all_free()


async def test_pipelined_requests_are_answered_in_order(serving, launch):
    async with serving(launch) as server:
        client = await server.connect()
        paths = ["/health", "/nowhere", "/v1/models", "/health/live"]
        await client.stream.send_all(b"".join(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() for path in paths))
        heads = []
        for _ in paths:
            head = (await client.until(b"\r\n\r\n")).decode()
            heads.append(int(head.split()[1]))
            length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
            while len(client.buffer) < length:
                client.buffer += await client.stream.receive_some(65536)
            client.buffer = client.buffer[length:]
        assert heads == [200, 404, 200, 200]


# 3: a write has no deadline


async def test_a_reader_that_stalls_is_cut_off(serving):
    model = FakeModel(tokenizer=WordyTokenizer())
    async with serving(model=model, write_timeout=0.1) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send("POST", CHAT, STREAM)
        await server.until(lambda: bool(server.app.exchanges))
        await server.until(lambda: not server.app.exchanges)
        await server.assert_all_free()


async def test_a_reader_that_stalls_does_not_hold_up_the_shutdown(serving):
    model = FakeModel(tokenizer=WordyTokenizer())
    async with serving(model=model) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send("POST", CHAT, STREAM)
        await server.until(lambda: server.engine.statistics().generation_tokens >= 256)
        server.stop.set()
        with trio.fail_after(5):
            await server.closed.wait()
        await server.assert_all_free()


async def test_disconnect_while_the_handler_is_stuck_in_a_write(serving, launch):
    model = FakeModel(tokenizer=WordyTokenizer())
    async with serving(launch, model=model, write_timeout=60) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send("POST", CHAT, STREAM)
        # the credit is used up: the reader has stopped
        await server.until(lambda: server.engine.statistics().generation_tokens >= 256)
        client.stream.socket.close()
        await server.assert_all_free()
        await server.until(lambda: not server.app.exchanges)


async def test_a_slow_reader_of_much_is_not_cut_off(serving):
    from quart import Response

    def prepare(app):
        app.add_url_rule("/big", view_func=lambda: Response(b"x" * 4_000_000))

    async with serving(prepare=prepare, write_timeout=0.5) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send("GET", "/big")
        assert len((await client.receive()).body) == 4_000_000


# 4: a paused h11 stops the reader


async def test_trailing_bytes_hide_no_disconnect(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server:
        before = descriptors()
        clients = [await server.connect() for _ in range(20)]
        trailing = [b"\r\n", b"x", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"y" * 5000]
        for index, client in enumerate(clients):
            await client.send("POST", CHAT, LONG if index % 2 else STREAM)
            await client.stream.send_all(trailing[index % len(trailing)])
        await server.admitted(20)
        for client in clients:
            client.stream.socket.close()
        # nothing is written in the meantime: the engine does not move
        await server.until(lambda: server.engine.statistics().num_requests == 0)
        await server.until(lambda: not server.app.exchanges)
        gate.open()
        await server.assert_all_free()
        await server.until(lambda: descriptors() <= before)


async def test_a_peer_that_sends_too_much_too_early_is_cut_off(serving, gated, monkeypatch):
    from trio_llm.server import connection

    monkeypatch.setattr(connection, "AHEAD_PATIENCE", 0.01)
    executor, gate = gated
    async with serving(executor=executor) as server:
        client = await server.connect()
        await client.send("POST", CHAT, LONG)
        await server.admitted(1)
        await client.stream.send_all(b"x" * 200_000)
        await server.until(lambda: server.engine.statistics().num_requests == 0)
        gate.open()
        await server.assert_all_free()


async def test_a_large_next_request_may_come_early(serving):
    async with serving() as server:
        client = await server.connect()
        large = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n" + b"x" * 300_000
        await client.stream.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + large)
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 404" in await client.until(b"\r\n\r\n")


# limits of the stock stack


async def test_slow_head_is_cut_off(serving):
    async with serving(keep_alive_timeout=0.05) as server:
        client = await server.connect()
        await client.stream.send_all(b"GET /health HTTP/1.1\r\n")
        with trio.fail_after(5):
            assert await client.stream.receive_some() == b""


async def test_unix_socket(tmp_path):
    from trio_llm.errors import ConfigurationError
    from trio_llm.server.serve import _listen_unix

    path = str(tmp_path / "socket")
    listener = _listen_unix(path)
    with pytest.raises(ConfigurationError, match="in use"):
        _listen_unix(path)
    await listener.aclose()
    await _listen_unix(path).aclose()  # what a dead process left behind is taken over


async def test_what_the_socket_takes_is_written_without_waiting(serving, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write_now = Connection._write_now

    def noting(self: Connection, data: memoryview) -> int:
        count = write_now(self, data)
        written.append((len(data), count))
        return count

    monkeypatch.setattr(Connection, "_write_now", noting)
    async with serving() as server:
        answer = await server.ask("POST", CHAT, {**STREAM, "max_tokens": 900})
        assert answer.events
    assert len(written) > 2
    assert all(count == size for size, count in written)


async def test_a_write_that_is_cut_off_in_the_middle_ends_the_connection() -> None:
    ours, theirs = trio.socket.socketpair()
    connection = Connection(None, None, None, 60, trio.SocketStream(ours))
    connection._protocol = SimpleNamespace(broken=False)
    with theirs, trio.CancelScope() as scope:
        scope.cancel()
        await connection._write(b"few bytes")
        assert not connection._protocol.broken, "they went out without waiting"
        await connection._write(bytes(10_000_000))
    assert scope.cancelled_caught
    assert connection._protocol.broken
    assert ours.fileno() == -1
