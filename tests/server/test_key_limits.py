"""max_requests_per_key: how much of the server one key may have at a time, and what gives it back."""

from __future__ import annotations

import anthropic
import openai
import pytest

from trio_llm.config import ServerSettings, resolve
from trio_llm.errors import ConfigurationError, RequestFailed

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
KEY, OTHER = {"authorization": "Bearer sk-one"}, {"x_api_key": "sk-other"}
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
LONG = {**HI, "max_tokens": 800, "ignore_eos": True}
LIMITED = {"api_key": ["sk-one", "sk-other"], "max_requests_per_key": 1}


def check_refused(answer, *, is_anthropic=False):
    assert answer.status == 429
    assert answer.headers["retry-after"] == "1"
    error = answer.json["error"]
    assert "has 1 requests in flight" in error.pop("message")
    if is_anthropic:
        assert (answer.json["type"], error) == ("error", {"type": "rate_limit_error"})
    else:
        assert error == {"type": "requests", "param": None, "code": "rate_limit_exceeded"}


@pytest.mark.parametrize("stream", [True, False])
async def test_one_more_is_refused(serving, launch, gated, stream):
    executor, gate = gated
    async with serving(launch, executor=executor, **LIMITED) as server:
        first = await server.connect()
        await first.send("POST", CHAT, {**HI, "stream": stream}, **KEY)
        await server.admitted(1)
        for path, body in ((CHAT, HI), (RESPONSES, {"model": "fake", "input": "hi"}), ("/tokenize", {"prompt": "hi"})):
            check_refused(await server.ask("POST", path, body, **KEY))
        check_refused(await server.ask("POST", MESSAGES, HI, **KEY), is_anthropic=True)
        # another key has its own, and what does not ask for work does not count
        second = await server.connect()
        await second.send("POST", MESSAGES, HI, **OTHER)
        await server.admitted(2)
        check_refused(await server.ask("POST", CHAT, HI, **OTHER))
        for path in ("/v1/models", "/metrics", "/docs", "/health"):
            assert (await server.ask("GET", path, **KEY)).status == 200
        gate.open()
        assert [(await client.receive()).status for client in (first, second)] == [200, 200]
        assert (await server.ask("POST", CHAT, HI, **KEY)).status == 200
        assert (await server.ask("POST", MESSAGES, HI, **OTHER)).status == 200
        await server.assert_all_free()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("end", ["it ends", "disconnect", "abort", "cancel", "failure"])
async def test_however_it_ends_the_next_may_come(serving, launch, gated, end, stream):
    executor, gate = gated
    async with serving(launch, executor=executor, **LIMITED) as server:
        client = await server.connect()
        path = RESPONSES if end == "cancel" else CHAT
        body = {"model": "fake", "input": "hi"} if end == "cancel" else HI if end == "it ends" else LONG
        await client.send("POST", path, {**body, "stream": stream}, **KEY)
        await server.admitted(1)
        gate.let(10)
        if stream and end != "it ends":
            await client.until(b"data: ")
        (exchange,) = server.app.exchanges
        request_id = exchange.request_id
        if end != "it ends":
            check_refused(await server.ask("POST", CHAT, HI, **KEY))
        if end == "disconnect":
            client.stream.socket.close()
            await server.until(lambda: not server.app.exchanges)
        elif end == "abort":
            assert (await server.ask("POST", f"/v1/requests/{request_id}/abort", **KEY)).status == 200
        elif end == "cancel":
            assert (await server.ask("POST", f"{RESPONSES}/resp_{request_id}/cancel", **KEY)).status == 200
        elif end == "failure":
            exchange.fail(RequestFailed("it failed"))
        gate.open()
        if end != "disconnect":
            await client.until(b"0\r\n\r\n" if stream else b"}")
        assert (await server.ask("POST", CHAT, HI, **KEY)).status == 200
        await server.assert_all_free()


@pytest.mark.parametrize("body", [{**HI, "temperature": -1}, {**HI, "model": "other"}, b"{", None])
async def test_what_is_refused_or_answered_early_holds_nothing(serving, body):
    async with serving(**LIMITED) as server:
        client = await server.connect()
        for _ in range(3):
            await client.send("POST", CHAT, body, **KEY)
            assert (await client.receive()).status in (400, 404)
        assert (await server.ask("POST", "/nowhere", HI, **KEY)).status == 404
        assert (await server.ask("POST", CHAT, HI, **KEY)).status == 200


async def test_it_counts_from_its_head_and_the_next_is_refused_before_its_body_comes(serving):
    async with serving(**LIMITED) as server:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-one\r\ncontent-length: 10\r\n\r\n{{".encode()
        )
        first, second = await server.connect(), await server.connect()
        await first.stream.send_all(head)
        await server.until(lambda: len(server.app.exchanges) == 1)
        await second.stream.send_all(head)
        check_refused(await second.receive())
        first.stream.socket.close()
        await server.until(lambda: not server.app.exchanges)
        assert (await server.ask("POST", CHAT, HI, **KEY)).status == 200


async def test_requests_one_after_the_other_are_never_too_many(serving, launch):
    """Whoever has read an answer to its end, or a response's last event, may ask again at once."""
    async with serving(launch, **LIMITED) as server:
        client = await server.connect()
        for turn in range(20):
            await client.send("POST", CHAT, {**HI, "stream": turn % 2 == 0}, **KEY)
            assert (await client.receive()).status == 200
            assert (await server.ask("POST", CHAT, {**HI, "stream": turn % 2 == 1}, **KEY)).status == 200
        last = None
        for _ in range(10):
            client = await server.connect()
            body = {"model": "fake", "input": "hi", "max_output_tokens": 1, "previous_response_id": last}
            await client.send("POST", RESPONSES, {**body, "stream": True}, **KEY)
            event = await client.until(b"event: response.incomplete")
            event = await client.until(b"\n\n")
            last = event.partition(b'"id":"')[2].partition(b'"')[0].decode()


async def test_the_packages_know_it(serving, gated):
    executor, gate = gated
    async with serving(executor=executor, **LIMITED) as server:
        first = await server.connect()
        await first.send("POST", CHAT, HI, **KEY)
        await server.admitted(1)
        options = {"api_key": "sk-one", "max_retries": 0}
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", **options) as client:
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(**HI)
        assert refused.value.code == "rate_limit_exceeded"
        async with anthropic.AsyncAnthropic(base_url=server.url, **options) as client:
            with pytest.raises(anthropic.RateLimitError):
                await client.messages.create(**HI)
        gate.open()


@pytest.mark.parametrize(
    ("given", "words"), [({}, "nothing without api_key"), ({"api_key": ("sk",)}, "must be at least 1, got 0")]
)
def test_settings_that_make_no_sense(given, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        ServerSettings(max_requests_per_key=0, **given)
    assert caught.value.field == "max_requests_per_key"


def test_it_is_off_unless_asked_for():
    assert resolve(environ={}).max_requests_per_key is None
    settings = resolve(environ={"TRIO_LLM_API_KEY": "a", "TRIO_LLM_MAX_REQUESTS_PER_KEY": "8"})
    assert settings.max_requests_per_key == 8
