"""POST /v1/completions: several prompts, echo, scoring, gaps, token ids."""

from __future__ import annotations

import pytest
import trio

from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.simulation import ByteTokenizer, FakeModel

COMPLETIONS = "/v1/completions"
ASK = {"model": "fake", "max_tokens": 5}


def streamed(answer):
    """Text and finish_reason of each choice of a stream."""
    texts, reasons = {}, {}
    for chunk in answer.events[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                assert choice["index"] not in reasons
                reasons[choice["index"]] = choice["finish_reason"]
    return [(texts[index], reasons[index]) for index in sorted(texts)]


PROMPTS = [["one", "two", "three"], [list(b"one"), list(b"two"), list(b"three")]]


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("n", [1, 3])
async def test_several_prompts(serving, prompts, n):
    async with serving() as server:
        single = [
            (await server.ask("POST", COMPLETIONS, {**ASK, "prompt": prompt, "seed": 1})).json for prompt in prompts
        ]
        body = {**ASK, "prompt": prompts, "n": n, "seed": 1}
        answer = await server.ask("POST", COMPLETIONS, body)
        choices = answer.json["choices"]
        assert [choice["index"] for choice in choices] == list(range(3 * n))
        for place, alone in enumerate(single):
            assert choices[place * n]["text"] == alone["choices"][0]["text"]
        usage = answer.json["usage"]
        assert usage["prompt_tokens"] == sum(alone["usage"]["prompt_tokens"] for alone in single)
        assert usage["completion_tokens"] == 5 * 3 * n
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await server.ask("POST", COMPLETIONS, {**body, **options})
        assert streamed(answer) == [(choice["text"], choice["finish_reason"]) for choice in choices]
        last = answer.events[-2]
        assert last["choices"] == []
        assert {**last["usage"], "prompt_tokens_details": 0} == {**usage, "prompt_tokens_details": 0}
        await server.assert_all_free()


@pytest.mark.parametrize("stream", [True, False])
async def test_one_bad_prompt_refuses_all(serving, gated, stream):
    executor, _ = gated
    async with serving(executor=executor) as server:
        for bad in ("", "x" * 2000):
            body = {**ASK, "prompt": ["fine", "fine too", bad], "stream": stream}
            answer = await server.ask("POST", COMPLETIONS, body)
            assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")
        await server.until(lambda: server.engine.statistics().num_requests == 0)


async def test_too_many_prompts(serving):
    async with serving(engine={"max_num_seqs": 2, "max_num_queued_reqs": 4}) as server:
        answer = await server.ask("POST", COMPLETIONS, {**ASK, "prompt": ["x"] * 4, "n": 2})
        assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")
        assert "at most 3" in answer.json["error"]["message"]
        answer = await server.ask("POST", COMPLETIONS, {**ASK, "prompt": ["x"] * 3, "n": 2})
        assert answer.status == 200


async def test_all_end_with_the_exchange(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server:
        client = await server.connect()
        await client.send("POST", COMPLETIONS, {**ASK, "max_tokens": 900, "prompt": ["a", "b", "c"], "stream": True})
        gate.let(3)
        await client.until(b'"text"')
        assert server.engine.statistics().num_requests == 3
        await client.stream.aclose()
        await server.until(lambda: server.engine.statistics().num_requests == 0)
        gate.open()
        await server.assert_all_free()


async def test_abort_by_id_ends_all(serving, gated):
    executor, gate = gated
    async with serving(executor=executor) as server, trio.open_nursery() as nursery:
        answers = []

        async def ask():
            body = {**ASK, "max_tokens": 900, "prompt": ["a", "b"]}
            answers.append(await server.ask("POST", COMPLETIONS, body))

        nursery.start_soon(ask)
        await server.until(lambda: server.engine.statistics().num_requests == 2)
        gate.let(4)
        await server.until(lambda: server.engine.statistics().generation_tokens >= 2)
        (exchange,) = [exchange for exchange in server.app.exchanges if exchange.generations]
        assert (await server.ask("POST", f"/v1/requests/cmpl-{exchange.request_id}/abort")).status == 200
        await server.until(lambda: bool(answers))
        assert [choice["finish_reason"] for choice in answers[0].json["choices"]] == ["abort", "abort"]
        gate.open()


@pytest.mark.parametrize("prompt", ["hello", list(b"hello")])
@pytest.mark.parametrize("n", [1, 2])
async def test_echo(serving, prompt, n):
    async with serving() as server:
        server.executor.next_token = lambda context, index: ord("a") + index
        body = {**ASK, "prompt": prompt, "echo": True, "n": n}
        choices = (await server.ask("POST", COMPLETIONS, body)).json["choices"]
        assert [choice["text"] for choice in choices] == ["helloabcde"] * n
        answer = await server.ask("POST", COMPLETIONS, {**body, "stream": True})
        assert streamed(answer) == [("helloabcde", "length")] * n


@pytest.mark.parametrize("prompt", [["hello", "you"], [list(b"hello"), list(b"you")]])
@pytest.mark.parametrize("stream", [True, False])
async def test_scoring(serving, stream, prompt):
    """As evaluation harnesses ask: echo, no token, log-probabilities."""
    async with serving() as server:
        body = {**ASK, "prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1, "n": 2}
        answer = await server.ask("POST", COMPLETIONS, {**body, "stream": stream})
        if stream:
            assert streamed(answer) == [("hello", "length")] * 2 + [("you", "length")] * 2
            pieces = [chunk["choices"][0] for chunk in answer.events[:-1]]
            choices = sorted((piece for piece in pieces if piece["logprobs"]), key=lambda piece: piece["index"])
        else:
            choices = answer.json["choices"]
            assert answer.json["usage"]["completion_tokens"] == 0
            assert [choice["finish_reason"] for choice in choices] == ["length"] * 4
        for choice, text in zip(choices, ["hello", "hello", "you", "you"], strict=True):
            assert choice["text"] == text
            assert choice["logprobs"]["tokens"] == list(text)
            assert choice["logprobs"]["text_offset"] == list(range(len(text)))
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert len(choice["logprobs"]["token_logprobs"]) == len(text)
        await server.assert_all_free()


@pytest.mark.parametrize("stream", [True, False])
async def test_no_token_and_no_echo(serving, stream):
    async with serving() as server:
        answer = await server.ask("POST", COMPLETIONS, {**ASK, "prompt": "hi", "max_tokens": 0, "stream": stream})
        if stream:
            assert streamed(answer) == [("", "length")]
        else:
            (choice,) = answer.json["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("", "length")


async def test_scoring_a_prompt_that_fills_the_context(serving):
    info = ExecutorInfo(num_blocks=32, block_size=4, vocab_size=256, max_model_len=64)
    async with serving(executor=FakeExecutor(info)) as server:
        body = {**ASK, "prompt": "x" * 64, "max_tokens": 0, "echo": True, "logprobs": 0}
        assert (await server.ask("POST", COMPLETIONS, body)).json["usage"]["prompt_tokens"] == 64
        answer = await server.ask("POST", COMPLETIONS, {**body, "prompt": "x" * 65})
        assert answer.json["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("logprobs", [-1, 6])
async def test_logprobs_have_a_limit(serving, logprobs):
    async with serving() as server:
        answer = await server.ask("POST", COMPLETIONS, {**ASK, "prompt": "x", "logprobs": logprobs})
        assert (answer.status, answer.json["error"]["param"]) == (400, "logprobs")


async def test_prompt_logprobs_beside_logprobs(serving):
    """Each has as many alternatives as it asks for."""
    async with serving() as server:
        body = {**ASK, "prompt": "abc", "echo": True, "logprobs": 1, "prompt_logprobs": 3}
        (choice,) = (await server.ask("POST", COMPLETIONS, body)).json["choices"]
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [3, 3]
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][1][str(ord("b"))] == {
            "logprob": pytest.approx(-0.6931, abs=1e-3),
            "rank": 1,
            "decoded_token": "b",
        }
        assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [1, 1]


async def test_token_ids(serving):
    async with serving() as server:
        body = {**ASK, "prompt": ["ab", "c"], "n": 2, "return_token_ids": True}
        choices = (await server.ask("POST", COMPLETIONS, body)).json["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], [97, 98], [99], [99]]
        assert all(len(choice["token_ids"]) == 5 for choice in choices)
        events = (await server.ask("POST", COMPLETIONS, {**body, "stream": True})).events[:-1]
        for choice in choices:
            mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
            assert [token for piece in mine for token in piece.get("token_ids", [])] == choice["token_ids"]
            told = [piece["prompt_token_ids"] for piece in mine if "prompt_token_ids" in piece]
            assert told == [choice["prompt_token_ids"]]


async def test_suffix(serving):
    class Coder(ByteTokenizer):
        def get_added_vocab(self):
            return {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3, "<|fim_pad|>": 4}

    async with serving(model=FakeModel(tokenizer=Coder())) as server:
        body = {**ASK, "prompt": ["def f({x}", "y"], "suffix": "return {x}", "return_token_ids": True}
        choices = (await server.ask("POST", COMPLETIONS, body)).json["choices"]
        assert [bytes(choice["prompt_token_ids"]).decode() for choice in choices] == [
            "<|fim_prefix|>def f({x}<|fim_suffix|>return {x}<|fim_middle|>",
            "<|fim_prefix|>y<|fim_suffix|>return {x}<|fim_middle|>",
        ]
        for wrong in ({"echo": True}, {"prompt": [1, 2]}):
            answer = await server.ask("POST", COMPLETIONS, {**body, **wrong})
            assert (answer.status, answer.json["error"]["param"]) == (400, "suffix")
    async with serving() as server:
        answer = await server.ask("POST", COMPLETIONS, {**ASK, "prompt": "x", "suffix": "y"})
        assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported_parameter")
        assert answer.json["error"]["param"] == "suffix"
        assert (await server.ask("POST", COMPLETIONS, {**ASK, "prompt": "x", "suffix": ""})).status == 200
