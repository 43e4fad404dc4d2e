"""What Anthropic's own package makes of this server."""

from __future__ import annotations

import anthropic
import pytest
import trio

from tests.server.scripted import CALLING, THINKING, saying
from tests.server.test_messages import CALL, TIME, TIME_CALL, WEATHER

HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}


def client_of(server, **options):
    return anthropic.AsyncAnthropic(**{"base_url": server.url, "api_key": "none", "max_retries": 0, **options})


async def test_messages(serving):
    executor, model, ids = saying("byte-level", "the quick fox")
    async with serving(executor=executor, model=model) as server, client_of(server) as client:
        message = await client.messages.create(**HI, stop_sequences=["fox"])
        assert [(block.type, block.text) for block in message.content] == [("text", "the quick ")]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "fox")
        assert message._request_id == message.id.removeprefix("msg_")
        async with client.messages.stream(**HI) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(texts) == final.content[0].text == "the quick fox"
        assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", len(ids) + 1)
        counted = await client.messages.count_tokens(model="fake", messages=HI["messages"])
        assert counted.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens


async def test_tools_and_thinking(serving):
    text = f"<think>\nhm\n</think>\nLet me look.\n{CALL}\n{TIME_CALL}"
    executor, model, _ = saying("byte-level", text, template=THINKING)
    async with serving(executor=executor, model=model) as server, client_of(server) as client:
        wanted = {**HI, "tools": [WEATHER, TIME], "thinking": {"type": "enabled", "budget_tokens": 1024}}
        whole = await client.messages.create(**wanted)
        async with client.messages.stream(**wanted) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_message()
        assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= kinds
        thinking, said, weather, time = final.content
        assert (thinking.type, thinking.thinking, said.text.strip()) == ("thinking", "hm", "Let me look.")
        assert (weather.name, weather.input) == ("weather", {"city": "Bern", "days": 3})
        assert (time.name, time.input) == ("time", {})
        assert final.stop_reason == whole.stop_reason == "tool_use"
        for one, other in zip(final.content, whole.content, strict=True):
            assert one.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})
        # what was answered is given back as it is
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in (weather, time)]
        history = [
            *HI["messages"],
            {"role": "assistant", "content": final.content},
            {"role": "user", "content": results},
        ]
        again = await client.messages.create(**{**wanted, "messages": history})
        assert again.usage.input_tokens + again.usage.cache_read_input_tokens > 100


async def test_errors_have_their_classes(serving):
    async with serving(api_key=("sesame",)) as server:
        async with client_of(server, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await client.messages.create(**HI)
            assert unknown.value.body["error"]["type"] == "authentication_error"
            assert unknown.value.request_id == unknown.value.body["request_id"]
        async with client_of(server, api_key="sesame") as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**HI, "model": "gpt"})
            with pytest.raises(anthropic.BadRequestError, match="temperature"):
                await client.messages.create(**HI, extra_body={"temperature": 3})
            with pytest.raises(anthropic.BadRequestError, match="temperature"):
                async with client.messages.stream(**HI, extra_body={"temperature": 3}):
                    pass
        async with client_of(server, api_key=None, auth_token="sesame") as client:
            assert (await client.messages.create(**{**HI, "max_tokens": 3})).stop_reason == "max_tokens"
            server.engine.drain()
            with pytest.raises(anthropic.InternalServerError) as refused:
                await client.messages.create(**HI)
            assert refused.value.status_code == 503


async def test_a_stream_that_fails(serving):
    executor, model, _ = saying("byte-level", "one two three four five six")
    calm = executor.next_token

    def next_token(context, index):
        if index == 3:
            raise RuntimeError("broken")
        return calm(context, index)

    executor.next_token = next_token
    async with serving(executor=executor, model=model) as server, client_of(server) as client:
        async with client.messages.stream(**HI) as stream:
            with pytest.raises(anthropic.APIStatusError) as failed:
                await stream.get_final_message()
        assert failed.value.body["error"]["type"] == "api_error"


async def test_without_trio(serving):
    executor, model, _ = saying("byte-level", CALL, template=CALLING)
    async with serving(executor=executor, model=model) as server:

        def play():
            with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
                with client.messages.stream(**HI, tools=[WEATHER]) as stream:
                    return client.messages.create(**HI, tools=[WEATHER]), stream.get_final_message()

        for message in await trio.to_thread.run_sync(play):
            assert message.stop_reason == "tool_use"
            assert message.content[0].input == {"city": "Bern", "days": 3}
