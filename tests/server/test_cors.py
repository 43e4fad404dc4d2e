"""What browsers ask before they let a page use the server."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from trio_llm.config import ServerSettings
from trio_llm.errors import ConfigurationError

PAGE = "https://page.example:8443"
CHAT = "/v1/chat/completions"
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
PREFLIGHT = {
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization,content-type,x-stainless-os",
}


def cors_headers(answer):
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control")}


@pytest.mark.parametrize("origins", [[PAGE, "http://localhost:3000"], ["*"]])
async def test_an_allowed_page(serving, launch, origins):
    async with serving(launch, allowed_origins=origins, api_key=["sk"]) as server:
        allowed = "*" if origins == ["*"] else PAGE
        preflight = await server.ask("OPTIONS", CHAT, origin=PAGE, **PREFLIGHT)
        assert (preflight.status, preflight.body) == (204, b"")
        headers = cors_headers(preflight)
        assert headers["access-control-allow-origin"] == allowed
        assert "POST" in headers["access-control-allow-methods"]
        assert headers["access-control-allow-headers"] == PREFLIGHT["access_control_request_headers"]
        for key, status in (("sk", 200), ("wrong", 401)):  # a page must be able to read errors too
            answer = await server.ask("POST", CHAT, HI, origin=PAGE, authorization=f"Bearer {key}")
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] == allowed
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert answer.headers.get("vary") == (None if origins == ["*"] else "origin")


@pytest.mark.parametrize("origin", ["https://other.example", PAGE + ".evil.example", PAGE.upper(), "null", ""])
async def test_other_pages_get_no_header(serving, origin):
    async with serving(allowed_origins=[PAGE], api_key=["sk"]) as server:
        preflight = await server.ask("OPTIONS", CHAT, origin=origin, **PREFLIGHT)
        assert preflight.status == 401
        answer = await server.ask("POST", CHAT, HI, origin=origin, authorization="Bearer sk")
        assert answer.status == 200
        for found in (preflight, answer):
            assert cors_headers(found) == {}
            assert found.headers["vary"] == "origin"


async def test_it_is_off_by_default(serving):
    async with serving() as server:
        answer = await server.ask("OPTIONS", CHAT, origin=PAGE, **PREFLIGHT)
        assert cors_headers(answer) == {} and "vary" not in answer.headers


async def test_options_that_is_no_preflight_wants_a_key(serving):
    async with serving(allowed_origins=["*"], api_key=["sk"]) as server:
        assert (await server.ask("OPTIONS", CHAT, origin=PAGE)).status == 401


@pytest.mark.parametrize("origin", ["example.com", "https://example.com/", "https://a b", "https://", ""])
def test_what_is_no_origin(origin):
    with pytest.raises(ConfigurationError, match="origin"):
        ServerSettings(allowed_origins=(origin,))


async def test_a_preflight_is_answered_to_its_end(serving, launch):
    async with serving(launch, allowed_origins=["*"]) as server:
        with capture_logs() as logs:
            assert (await server.ask("OPTIONS", CHAT, origin=PAGE, **PREFLIGHT)).status == 204
            await server.until(lambda: any(line.get("method") == "OPTIONS" for line in logs))
        [line] = [line for line in logs if line.get("method") == "OPTIONS"]
        assert line["status"] == 204 and "disconnected" not in line
