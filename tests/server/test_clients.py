"""The openai package, both kinds, against a live server."""

from __future__ import annotations

import openai
import pytest
import trio

MESSAGES = [{"role": "user", "content": "hi"}]


def use_sync(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        models = client.models.list().data
        assert [model.id for model in models] == ["fake"]
        assert client.models.retrieve("fake").max_model_len == 1024
        whole = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=20, n=2)
        stream = client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=20, n=2, stream=True, stream_options={"include_usage": True}
        )
        texts = ["", ""]
        usage = None
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            usage = chunk.usage or usage
        assert texts == [choice.message.content for choice in whole.choices]
        assert usage is not None and usage.prompt_tokens_details.cached_tokens > 0  # the prompt was there already
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 40)
        text = client.completions.create(model="fake", prompt="x", max_tokens=3)
        assert (
            "".join(
                part.choices[0].text
                for part in client.completions.create(model="fake", prompt="x", max_tokens=3, stream=True)
            )
            == text.choices[0].text
        )
        with client.chat.completions.stream(model="fake", messages=MESSAGES, max_tokens=5, n=2) as helper:
            helper.until_done()
            choices = helper.current_completion_snapshot.choices
        assert [choice.message.role for choice in choices] == ["assistant", "assistant"]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="fake", messages=MESSAGES, temperature=9)
        assert caught.value.param == "temperature"
        assert caught.value.request_id
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt", messages=MESSAGES)
        assert missing.value.code == "model_not_found"


async def test_sync_client(serving):
    async with serving() as server:
        await trio.to_thread.run_sync(use_sync, server.url)
        await server.assert_all_free()


async def test_async_client_under_trio(serving):
    async with serving() as server:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=20)
            texts = {}

            async def read(number):
                stream = await client.chat.completions.create(
                    model="fake", messages=MESSAGES, max_tokens=20, stream=True
                )
                async with stream:
                    texts[number] = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(read, number)
            assert set(texts.values()) == {whole.choices[0].message.content}
        await server.assert_all_free()


async def test_async_client_leaves_in_the_middle(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            gate.let(3)
            with trio.CancelScope() as scope:
                stream = await client.chat.completions.create(
                    model="fake", messages=MESSAGES, max_tokens=800, stream=True
                )
                async with stream:
                    async for _ in stream:
                        scope.cancel()
            await server.until(lambda: server.engine.statistics().num_requests == 0)
            gate.open()
            await server.assert_all_free()


async def test_error_inside_a_stream_is_raised(serving, gated):
    executor, gate = gated
    executor.next_token = lambda context, index: ord("a") if index < 2 else 1 // 0
    async with serving(executor=executor) as server:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            gate.let(2)
            stream = await client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=800, stream=True)
            gate.open()
            with pytest.raises(openai.APIError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code == "request_failed"
            await stream.close()
