"""What openai's own package makes of this server: its errors, retries, time-outs and helpers."""

from __future__ import annotations

import time
from typing import Literal

import openai
import pydantic
import pytest
import trio

from tests.server.scripted import CALLING, random_model, saying
from trio_llm.server.openai.error_bodies import FAILURES

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


def client_of(server, **options):
    return openai.AsyncOpenAI(**{"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, **options})


@pytest.mark.parametrize("count", [1, 3, 8])
async def test_the_stream_helper_finds_every_choice(serving, count):
    async with serving() as server, client_of(server) as client:
        server.executor.next_token = lambda context, index: b"abcdefg;"[index % 8]
        fields = {**CHAT, "stop": ";", "n": count}
        whole = await client.chat.completions.create(**fields)
        kinds = []
        async with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "chunk" and event.chunk.choices == []:
                    assert event.chunk.usage is not None
            final = await stream.get_final_completion()
        assert [choice.index for choice in final.choices] == list(range(count))
        assert [choice.message.role for choice in final.choices] == ["assistant"] * count
        assert [choice.message.content for choice in final.choices] == [
            choice.message.content for choice in whole.choices
        ]
        assert [choice.finish_reason for choice in final.choices] == ["stop"] * count
        assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (whole.usage.prompt_tokens, 8 * count)
        assert kinds.count("content.done") == count


async def test_usage_comes_last_and_once(serving):
    async with serving() as server, client_of(server) as client:
        stream = await client.chat.completions.create(
            **CHAT, max_tokens=4, n=2, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)
        assert last.choices == [] and last.usage.completion_tokens == 8
        stream = await client.chat.completions.create(**CHAT, max_tokens=4, stream=True)
        assert all(chunk.usage is None and chunk.choices for chunk in [chunk async for chunk in stream])
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in [*chunks, last]}) == 1


async def test_errors_have_their_classes(serving):
    async with serving(api_key=("sesame",)) as server:
        async with client_of(server, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError) as unknown:
                await client.models.list()
            assert (unknown.value.code, unknown.value.type) == ("invalid_api_key", "invalid_request_error")
        async with client_of(server, api_key="sesame") as client:
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(**CHAT, top_p=7)
            assert (bad.value.code, bad.value.param) == ("invalid_value", "top_p")
            with pytest.raises(openai.BadRequestError) as long:
                await client.chat.completions.create(**CHAT, max_tokens=5000)
            assert long.value.code == "context_length_exceeded" and "1024" in long.value.message
            with pytest.raises(openai.NotFoundError) as missing:
                await client.models.retrieve("gpt")
            assert missing.value.code == "model_not_found"
            assert len({error.value.request_id for error in (unknown, bad, long, missing)}) == 4
            for error in (unknown, bad, long, missing):
                assert error.value.body.keys() == {"message", "type", "param", "code"}
                assert error.value.message.startswith(f"Error code: {error.value.status_code} - ")


async def test_answers_carry_what_the_package_reads_from_headers(serving):
    async with serving() as server, client_of(server) as client:
        answer = await client.chat.completions.create(**CHAT, max_tokens=1)
        assert answer._request_id and answer.id == f"chatcmpl-{answer._request_id}"
        raw = await client.chat.completions.with_raw_response.create(
            **CHAT, max_tokens=1, extra_headers={"x-request-id": "mine"}
        )
        assert raw.headers["x-request-id"] == raw.request_id == "mine"
        assert int(raw.headers["openai-processing-ms"]) >= 0
        assert raw.headers["openai-version"]
        assert raw.parse().choices[0].finish_reason == "length"


def ask_until_it_fits(server, make_room, monkeypatch):
    waits = []

    def wait(seconds):
        waits.append(seconds)
        make_room()

    monkeypatch.setattr(time, "sleep", wait)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(**CHAT, max_tokens=1)
    return waits, answer


async def test_a_refusal_for_lack_of_room_is_tried_again_when_the_server_says(serving, gated, monkeypatch):
    executor, gate = gated
    engine = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    async with serving(executor=executor, engine=engine) as server, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(server.ask, "POST", "/v1/chat/completions", {**CHAT, "max_tokens": 1})
        await server.admitted(2)

        def make_room():
            gate.open()
            trio.from_thread.run(server.until, lambda: server.engine.statistics().num_requests == 0)

        waits, answer = await trio.to_thread.run_sync(ask_until_it_fits, server, make_room, monkeypatch)
        assert waits == [FAILURES["queue_full"].retry_after]
        assert answer.choices[0].finish_reason == "length"


async def test_a_wrong_request_is_not_tried_again(serving):
    async with serving() as server, client_of(server, max_retries=2) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(**CHAT, temperature=-1)
        assert bad.value.response.request.headers["x-stainless-retry-count"] == "0"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_times_out_leaves_nothing_behind(serving, gated, stream):
    executor, gate = gated
    async with serving(executor=executor) as server, client_of(server, timeout=0.05) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**CHAT, max_tokens=900, stream=stream)
        await server.until(lambda: not server.app.exchanges)
        gate.open()
        await server.assert_all_free()


async def test_a_finished_stream_gives_its_connection_back(serving):
    async with serving() as server, client_of(server) as client:
        for _ in range(3):
            stream = await client.chat.completions.create(**CHAT, max_tokens=3, stream=True)
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"
        pool = client._client._transport._pool
        assert len(pool.connections) == 1


async def test_an_iterator_that_is_dropped_ends_its_request(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server, client_of(server) as client:
        gate.let(2)
        async with client.chat.completions.stream(**CHAT, max_tokens=900) as stream:
            async for event in stream:
                if event.type == "content.delta":
                    break
        await server.until(lambda: server.engine.statistics().num_requests == 0)
        gate.open()
        await server.assert_all_free()


def complete(url, prompt, **fields):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(model="fake", prompt=prompt, max_tokens=5, **fields)
        texts = [""] * len(whole.choices)
        for part in client.completions.create(model="fake", prompt=prompt, max_tokens=5, stream=True, **fields):
            for choice in part.choices:
                texts[choice.index] += choice.text
    return whole, texts


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], ["abc"], [[97, 98, 99]]])
async def test_completions_of_each_kind_of_prompt(serving, prompt):
    async with serving() as server:
        whole, texts = await trio.to_thread.run_sync(lambda: complete(server.url, prompt, n=2))
        assert [choice.text for choice in whole.choices] == texts
        assert whole.usage.total_tokens == 3 + 10


class Weather(pydantic.BaseModel):
    city: Literal["Bern", "Rom"]
    days: int = pydantic.Field(ge=1, le=9)


CALLS = (
    '<tool_call>\n{"name": "Weather", "arguments": {"city": "Bern", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rom", "days": 9}}\n</tool_call>'
)


async def test_deltas_of_tool_calls_join(serving):
    executor, model, _ = saying("byte-level", CALLS, template=CALLING)
    async with serving(executor=executor, model=model) as server, client_of(server) as client:
        fields = {**CHAT, "n": 2, "tools": [openai.pydantic_function_tool(Weather)]}
        whole = await client.chat.completions.parse(**fields)
        async with client.chat.completions.stream(**fields) as stream:
            done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
            final = await stream.get_final_completion()
        assert len(done) == 4
        for answer in (whole, final):
            for choice in answer.choices:
                assert choice.finish_reason == "tool_calls"
                assert len({call.id for call in choice.message.tool_calls}) == 2
                assert [call.function.parsed_arguments for call in choice.message.tool_calls] == [
                    Weather(city="Bern", days=3),
                    Weather(city="Rom", days=9),
                ]
        assert [call.function.arguments for call in final.choices[1].message.tool_calls] == [
            call.function.arguments for call in whole.choices[1].message.tool_calls
        ]


async def test_answers_are_parsed(serving):
    """The grammar's own work: the model is random."""
    executor, model = random_model()
    async with serving(executor=executor, model=model) as server, client_of(server) as client:
        fields = {**CHAT, "response_format": Weather, "seed": 1, "max_tokens": 200, "temperature": 1}
        whole = await client.chat.completions.parse(**fields)
        parsed = whole.choices[0].message.parsed
        assert isinstance(parsed, Weather)
        async with client.chat.completions.stream(**fields) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == parsed
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(**{**fields, "max_tokens": 2})


async def test_log_probabilities_of_a_stream_are_those_of_the_whole(serving):
    async with serving() as server, client_of(server) as client:
        fields = {**CHAT, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**fields)
        async with client.chat.completions.stream(**fields) as stream:
            await stream.until_done()
            (choice,) = stream.current_completion_snapshot.choices
        assert choice.logprobs == whole.choices[0].logprobs
        assert len(choice.logprobs.content) == 8
