"""openai's package for Python against the real model: what needs a model that means what it says."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest
import trio

from tests.conformance.server import MODEL, base_url, serves

CHAT = "/v1/chat/completions"
RIVERS = {"model": MODEL, "messages": [{"role": "user", "content": "Name three rivers."}], "temperature": 0}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class River(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    length: int = pydantic.Field(ge=0, le=10000)


@pytest.fixture
def client():
    with openai.OpenAI(base_url=f"{base_url()}/v1", api_key="none", max_retries=0) as found:
        yield found


def check_streams_say_the_same(client):
    whole = client.chat.completions.create(**RIVERS, max_tokens=30, n=2, seed=7)
    with client.chat.completions.stream(**RIVERS, max_tokens=30, n=2, seed=7) as stream:
        stream.until_done()
        choices = stream.current_completion_snapshot.choices
    assert [choice.message.content for choice in choices] == [choice.message.content for choice in whole.choices]


def check_logprobs_spell_the_text(client):
    plain = {"repetition_penalty": 1}
    answer = client.chat.completions.create(**RIVERS, max_tokens=20, logprobs=True, top_logprobs=3, extra_body=plain)
    (choice,) = answer.choices
    spelled = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode()
    assert spelled == choice.message.content
    # greedy: each token is the likeliest
    assert all(entry.token == entry.top_logprobs[0].token for entry in choice.logprobs.content)


def check_parse(client):
    answer = client.chat.completions.parse(**RIVERS, max_tokens=60, response_format=River)
    assert isinstance(answer.choices[0].message.parsed, River)


def check_parse_stream(client):
    with client.chat.completions.stream(**RIVERS, max_tokens=60, response_format=River) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert isinstance(final.choices[0].message.parsed, River)


def check_asynchronous_under_trio():
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{base_url()}/v1", api_key="none", max_retries=0) as client:
            answer = await client.chat.completions.create(**RIVERS, max_tokens=10)
            stream = await client.chat.completions.create(**RIVERS, max_tokens=10, stream=True)
            async with stream:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            return answer.choices[0].message.content, text

    whole, streamed = trio.run(ask)
    assert whole == streamed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def check_tool_calls(client, choice):
    if not serves(CHAT, "tools"):
        pytest.skip("tools are not supported yet")
    fields = {**RIVERS, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 60}
    answer = client.chat.completions.create(**fields)
    calls = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather"]
    assert json.loads(calls[0].function.arguments).keys() == {"city", "days"}
    with client.chat.completions.stream(**fields) as stream:
        stream.until_done()
        streamed = stream.current_completion_snapshot.choices[0]
    assert [call.function.arguments for call in streamed.message.tool_calls] == [
        call.function.arguments for call in calls
    ]
    assert streamed.finish_reason == answer.choices[0].finish_reason
