"""The headers that OpenAI's clients look at, on every answer."""

from __future__ import annotations

import pytest

HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
REQUESTS = [
    ("POST", "/v1/chat/completions", HI, 200),
    ("POST", "/v1/chat/completions", {**HI, "stream": True}, 200),
    ("POST", "/v1/chat/completions", {}, 400),
    ("GET", "/v1/models", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/health/live", None, 200),
    ("GET", "/nowhere", None, 404),
    ("GET", "/v1/completions", None, 405),
    ("POST", "/v1/completions", b" " * 2000, 413),
]


async def test_they_are_on_every_answer(serving, launch):
    async with serving(launch, max_request_bytes=1000) as server:
        for method, path, body, status in REQUESTS:
            answer = await server.ask(method, path, body, x_request_id="mine")
            assert answer.status == status
            assert answer.headers["x-request-id"] == "mine"
            assert answer.headers["openai-version"] == "2020-10-01"
            assert 0 <= int(answer.headers["openai-processing-ms"]) < 60_000


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "a\tb", "<b>"])
async def test_request_ids_that_are_not_echoed(serving, given):
    async with serving() as server:
        ids = {(await server.ask("GET", "/health", x_request_id=given)).headers["x-request-id"] for _ in range(2)}
        assert len(ids) == 2 and given not in ids


@pytest.mark.parametrize(("path", "line"), [("/health", b"HTTP/1.1 200 OK"), ("/x", b"HTTP/1.1 404 Not Found")])
async def test_status_lines_have_their_phrase(serving, path, line):
    async with serving() as server:
        client = await server.connect()
        await client.send("GET", path)
        assert (await client.until(b"\r\n")).strip() == line
