"""Answers that come before their request has come in whole."""

from __future__ import annotations

import pytest

from trio_llm.server import http

EARLY = [("POST", "/v1/nothing", 404), ("POST", "/v1/models", 405)]


@pytest.mark.parametrize(("method", "path", "status"), EARLY)
async def test_an_answer_that_needs_no_body_keeps_the_connection(serving, launch, method, path, status):
    """The body comes in a packet of its own, as Python's http.client sends it."""
    async with serving(launch) as server:
        client = await server.connect()
        await client.stream.send_all(f"{method} {path} HTTP/1.1\r\nhost: test\r\ncontent-length: 2\r\n\r\n".encode())
        await server.until(lambda: len(server.app.exchanges) == 1)
        await client.stream.send_all(b"{}")
        answer = await client.receive()
        assert answer.status == status and "connection" not in answer.headers
        await client.send("GET", "/health")
        assert (await client.receive()).status == 200


async def test_an_answer_whose_request_never_ends_says_that_it_closes(serving, launch, monkeypatch):
    monkeypatch.setattr(http, "_BODY_GRACE", 0.01)
    async with serving(launch) as server:
        client = await server.connect()
        await client.stream.send_all(b"POST /v1/nothing HTTP/1.1\r\nhost: test\r\ncontent-length: 9\r\n\r\n{}")
        answer = await client.receive()
        assert (answer.status, answer.headers["connection"]) == (404, "close")
        assert await client.stream.receive_some() == b""
