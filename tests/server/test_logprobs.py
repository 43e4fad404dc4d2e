"""Log-probabilities have a place for every token, and the tokens' bytes are those of the text."""

from __future__ import annotations

import math

import pytest

from tests.server.scripted import saying
from trio_llm.core.step import TokenLogprobs
from trio_llm.engine.detokenizer import TokenDecoder
from trio_llm.engine.simulation import ByteTokenizer
from trio_llm.engine.token_bytes import TokenBytes
from trio_llm.server.openai.logprobs import TextLogprobWriter, chat_logprobs

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEXT = "the fox \U0001fae0 한국 ha ha ha, naïve."


def joined(content):
    return b"".join(bytes(entry["bytes"] or []) for entry in content).decode()


async def ask_chat(server, **fields):
    """A whole answer's text, logprobs and usage, and the same of a stream."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "say"}], "logprobs": True, **fields}
    whole = (await server.ask("POST", CHAT, body)).json
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = (await server.ask("POST", CHAT, {**body, **options})).events
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        streamed = [entry for piece in mine if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        assert all(piece["logprobs"] is None or piece["logprobs"]["refusal"] is None for piece in mine)
        assert streamed == choice["logprobs"]["content"]
        assert "".join(piece["delta"].get("content", "") for piece in mine) == choice["message"]["content"]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    return whole


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
async def test_bytes_are_those_of_the_text(serving, kind):
    executor, model, ids = saying(kind, TEXT)
    async with serving(executor=executor, model=model) as server:
        whole = await ask_chat(server, top_logprobs=2, n=2)
        for choice in whole["choices"]:
            content = choice["logprobs"]["content"]
            assert choice["message"]["content"] == TEXT
            assert joined(content) == TEXT
            assert len(content) == len(ids)
            half = [entry for entry in content if entry["token"].startswith("bytes:")]
            assert [len(entry["bytes"]) for entry in half][:4] == [1, 1, 1, 1]
            assert all(len(entry["top_logprobs"]) == 2 for entry in content)
            assert content[0]["top_logprobs"][0] == {name: content[0][name] for name in ("token", "logprob", "bytes")}
        # the end token is counted, and is no text
        assert whole["usage"]["completion_tokens"] == 2 * (len(ids) + 1)


async def test_an_end_token_that_is_shown_has_its_place(serving):
    executor, model, ids = saying("byte-level", TEXT)
    async with serving(executor=executor, model=model) as server:
        whole = await ask_chat(server, include_stop_str_in_output=True, skip_special_tokens=False)
        content = whole["choices"][0]["logprobs"]["content"]
        assert whole["choices"][0]["message"]["content"] == joined(content) == TEXT + "</s>"
        assert len(content) == whole["usage"]["completion_tokens"] == len(ids) + 1
        whole = await ask_chat(server, include_stop_str_in_output=True)
        content = whole["choices"][0]["logprobs"]["content"]
        assert (content[-1]["token"], content[-1]["bytes"]) == ("</s>", None)
        assert joined(content) == TEXT


@pytest.mark.parametrize("stop", [" ha ha ha", "fox \U0001fae0 한", "ïv"])
async def test_with_a_stop_string(serving, stop):
    """Tokens of the stop string are there, and nothing behind them."""
    executor, model, _ = saying("byte-level", TEXT, ends=False)
    async with serving(executor=executor, model=model) as server:
        whole = await ask_chat(server, stop=[stop], max_tokens=100)
        (choice,) = whole["choices"]
        assert choice["finish_reason"] == "stop"
        before = TEXT[: TEXT.index(stop)]
        assert choice["message"]["content"] == before
        content = choice["logprobs"]["content"]
        assert joined(content).startswith(before + stop)
        assert joined(content[:-1]) in before + stop[:-1]
        assert len(content) == whole["usage"]["completion_tokens"]


async def test_a_cut_inside_a_character(serving):
    executor, model, ids = saying("byte-level", "\U0001fae0")
    async with serving(executor=executor, model=model) as server:
        whole = (
            await server.ask(
                "POST",
                CHAT,
                {
                    "model": "fake",
                    "messages": [{"role": "user", "content": "x"}],
                    "max_tokens": 3,
                    "logprobs": True,
                },
            )
        ).json
        (choice,) = whole["choices"]
        assert choice["message"]["content"] == "\ufffd"
        assert bytes(b for entry in choice["logprobs"]["content"] for b in entry["bytes"]) == b"\xf0\x9f\xab"
        assert len(ids) == 4


async def ask_text(server, **fields):
    """A choice of a whole answer, and its usage; a stream says the same."""
    body = {"model": "fake", "prompt": "the lazy dog", "max_tokens": 100, "logprobs": 2, **fields}
    whole = (await server.ask("POST", COMPLETIONS, body)).json
    *chunks, done = (await server.ask("POST", COMPLETIONS, {**body, "stream": True})).events
    assert done == "DONE"
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for piece in mine if piece["logprobs"] for x in piece["logprobs"][name]] == choice["logprobs"][
                name
            ]
    return whole["choices"][0], whole["usage"]


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
async def test_the_older_shape(serving, kind):
    executor, model, ids = saying(kind, TEXT)
    async with serving(executor=executor, model=model) as server:
        choice, usage = await ask_text(server, n=2)
        logprobs = choice["logprobs"]
        assert choice["text"] == TEXT
        assert {len(values) for values in logprobs.values()} == {len(ids) + 1} == {usage["completion_tokens"] // 2}
        assert (logprobs["tokens"][-1], logprobs["text_offset"][-1]) == (model.tokenizer.decode([1]), len(TEXT))
        for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"][:-1], strict=True):
            assert token.startswith("bytes:") or TEXT[offset:].startswith(token)
        assert all(
            2 <= len(top) <= 3 and token in top
            for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
        )


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
@pytest.mark.parametrize("prompt", ["the lazy dog", "naïve \U0001fae0", "x"])
async def test_echo(serving, kind, prompt):
    executor, model, ids = saying(kind, TEXT)
    encoded = model.tokenizer.encode(prompt)
    async with serving(executor=executor, model=model) as server:
        for given in (prompt, encoded):
            choice, usage = await ask_text(server, echo=True, prompt=given)
            logprobs = choice["logprobs"]
            text = prompt + TEXT
            assert choice["text"] == text
            assert {len(values) for values in logprobs.values()} == {len(encoded) + len(ids) + 1}
            assert usage["prompt_tokens"] == len(encoded)
            assert logprobs["token_logprobs"][0] is None
            assert logprobs["top_logprobs"][0] is None
            assert None not in logprobs["token_logprobs"][1:]
            for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"][:-1], strict=True):
                if not token.startswith("bytes:"):
                    assert text[offset:].startswith(token) or (offset == 0 and text.startswith(token.lstrip()))


async def test_zero_alternatives(serving):
    executor, model, _ = saying("byte-level", TEXT)
    async with serving(executor=executor, model=model) as server:
        choice, _ = await ask_text(server, logprobs=0, max_tokens=2)
        assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [
            [token] for token in choice["logprobs"]["tokens"]
        ]


def test_minus_infinity_is_a_number():
    tokens = TokenBytes(ByteTokenizer(), TokenDecoder(ByteTokenizer()))
    entry = TokenLogprobs(65, -math.inf, ((66, -1.0), (67, -math.inf)))
    (scored,) = chat_logprobs([entry], tokens).content
    assert [scored["logprob"], *(top["logprob"] for top in scored["top_logprobs"])] == [-9999.0, -1.0, -9999.0]
    body = TextLogprobWriter(tokens).write([entry])
    assert (body.token_logprobs, body.top_logprobs) == ([-9999.0], [{"B": -1.0, "C": -9999.0, "A": -9999.0}])
