"""POST /tokenize, POST /detokenize, GET /tokenizer_info and GET /version."""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.engine.test_detokenizer import trained
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.embedding import open_embedder
from trio_llm.engine.simulation import FakeEmbeddingModel, FakeEncoder, FakeModel
from trio_llm.server.openai import compatibility

MESSAGES = [{"role": "user", "content": "hi"}]
RENDERED = b"user: hi\nassistant: "


async def test_a_prompt(serving):
    async with serving() as server:
        for body in ({"prompt": "hé"}, {"model": "fake", "prompt": "hé", "return_token_strs": False}):
            answer = await server.ask("POST", "/tokenize", body)
            assert answer.status == 200
            assert answer.json == {"count": 3, "max_model_len": 1024, "tokens": [104, 195, 169], "token_strs": None}
        answer = await server.ask("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True})
        assert answer.json["token_strs"] == ["h", "i"]
        assert (await server.ask("POST", "/tokenize", {"prompt": ""})).json["tokens"] == []
        assert (await server.ask("POST", "/tokenize", {"prompt": "x" * 5000})).json["count"] == 5000


async def test_messages_are_what_a_chat_would_see(serving):
    async with serving() as server:
        tokens = (await server.ask("POST", "/tokenize", {"messages": MESSAGES})).json["tokens"]
        assert bytes(tokens) == RENDERED
        chat = await server.ask(
            "POST", "/v1/chat/completions", {"model": "fake", "messages": MESSAGES, "max_tokens": 1}
        )
        assert chat.json["usage"]["prompt_tokens"] == len(tokens)


async def test_special_tokens(serving):
    tokenizer = trained("byte-level")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.add_bos_token = True
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    special = tokenizer.encode("the fox")
    executor = FakeExecutor(ExecutorInfo(num_blocks=8, block_size=4, vocab_size=len(tokenizer), max_model_len=64))
    async with serving(model=FakeModel(tokenizer=tokenizer), executor=executor) as server:
        for extra, expected in [({}, special), ({"add_special_tokens": False}, plain)]:
            assert (await server.ask("POST", "/tokenize", {"prompt": "the fox", **extra})).json["tokens"] == expected
        messages = [{"role": "user", "content": "the fox"}]
        for extra, expected in [({}, plain), ({"add_special_tokens": True}, special)]:
            assert (await server.ask("POST", "/tokenize", {"messages": messages, **extra})).json["tokens"] == expected
        answer = await server.ask("POST", "/detokenize", {"tokens": [tokenizer.bos_token_id, *plain]})
        assert answer.json == {"prompt": "<bos>the fox"}


async def test_tools_are_told_to_the_template(serving):
    tokenizer = trained("byte-level")
    tokenizer.chat_template = "{% for t in tools or () %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
    executor = FakeExecutor(ExecutorInfo(num_blocks=8, block_size=4, vocab_size=len(tokenizer), max_model_len=64))
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "fox", "parameters": {}}}]}
    async with serving(model=FakeModel(tokenizer=tokenizer), executor=executor) as server:
        tokens = (await server.ask("POST", "/tokenize", body)).json["tokens"]
        assert tokenizer.decode(tokens) == "fox hi"
    async with serving() as server:
        answer = await server.ask("POST", "/tokenize", body)
        assert (answer.status, answer.json["error"]["param"]) == (400, "tools")


async def test_there_and_back(serving):
    async with serving() as server:
        for text in ("", "hello", "ünïcödé 🫠", "x" * 9000):  # more tokens than an array usually may have
            tokens = (await server.ask("POST", "/tokenize", {"prompt": text})).json["tokens"]
            answer = await server.ask("POST", "/detokenize", {"model": "fake", "tokens": tokens})
            assert (answer.status, answer.json) == (200, {"prompt": text})


BAD = [
    ("/tokenize", {}, "invalid_value", "prompt"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "invalid_value", "prompt"),
    ("/tokenize", {"prompt": 5}, "invalid_type", "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "invalid_type", "prompt"),
    ("/tokenize", {"messages": []}, "invalid_value", "messages"),
    ("/tokenize", {"messages": "hi"}, "invalid_type", "messages"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "invalid_type", "return_token_strs"),
    ("/tokenize", {"prompt": "a", "chat_template": "x"}, "unsupported_parameter", "chat_template"),
    (
        "/tokenize",
        {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
        "invalid_value",
        "chat_template_kwargs",
    ),
    ("/tokenize", {"prompt": "a", "wibble": 1}, "unknown_parameter", "wibble"),
    ("/tokenize", {"prompt": "a", "model": "nobody"}, "model_not_found", "model"),
    ("/detokenize", {}, "missing_required_parameter", "tokens"),
    ("/detokenize", {"tokens": "a"}, "invalid_type", "tokens"),
    ("/detokenize", {"tokens": [1, "a"]}, "invalid_type", "tokens"),
    ("/detokenize", {"tokens": [True]}, "invalid_type", "tokens"),
    ("/detokenize", {"tokens": [256]}, "invalid_value", "tokens"),
    ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens"),
    ("/detokenize", {"tokens": [2**70]}, "invalid_type", "tokens"),
]


async def test_bad_requests(serving):
    async with serving() as server:
        for path, body, code, param in BAD:
            answer = await server.ask("POST", path, body)
            error = answer.json["error"]
            assert answer.status == (404 if code == "model_not_found" else 400)
            assert (error["code"], error["param"]) == (code, param), (body, error)


SMALLEST = {
    "POST /v1/embeddings": {"model": "embed", "input": "hi"},
    "POST /tokenize": {"prompt": "hi"},
    "POST /detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("title", compatibility.TEXT_TABLES)
async def test_every_row_of_the_tables_is_treated_as_it_says(serving, title, capsys):
    """What is supported is tried in the next test."""
    method, path = title.split()
    smallest = SMALLEST[title]
    async with open_embedder(FakeEmbeddingModel(), encoder=FakeEncoder()) as embedder:
        prepare = partial(_add, embedder)
        async with serving(prepare=prepare) as server, serving(prepare=prepare, compat="lenient") as lenient:
            _, table = compatibility.TEXT_TABLES[title]
            for name, row in table.items():
                if row.treatment == "supported":
                    assert name in smallest or (await server.ask(method, path, {**smallest, name: None})).status == 200
                    continue
                passing = [None, *row.neutral, *(["x"] if row.treatment == "accepted" else [])]
                for value in passing:
                    assert (await server.ask(method, path, {**smallest, name: value})).status == 200
                refused = await server.ask(method, path, {**smallest, name: [5]})
                assert (refused.status, refused.json["error"]["param"]) == (400, name)
                if row.treatment == "refused":
                    assert refused.json["error"]["code"] == "unsupported_parameter"
                    capsys.readouterr()
                    assert (await lenient.ask(method, path, {**smallest, name: [5]})).status == 200
                    assert name in capsys.readouterr().out


THINGS = {
    "model": {"model": "embed"},
    "prompt": {"prompt": "ho"},
    "tokens": {"tokens": [2]},
    "add_special_tokens": {"add_special_tokens": False},
    "return_token_strs": {"return_token_strs": True},
    "messages": {"prompt": None, "messages": MESSAGES},
}
OF_MESSAGES = {
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": {"continue_final_message": True},
    "chat_template_kwargs": {"chat_template_kwargs": {"mood": "good"}},
}
OF_EMBEDDINGS = {
    "model": {"model": "fake"},
    "input": {"input": "ho"},
    "encoding_format": {"encoding_format": "base64"},
    "dimensions": {"dimensions": 2},
}


@pytest.mark.parametrize("title", compatibility.TEXT_TABLES)
async def test_every_supported_row_does_something(serving, title):
    tokenizer = trained("byte-level")
    tokenizer.chat_template = (
        "{{ tools | length if tools }}{{ mood }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        "{{ eos_token }}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.add_bos_token = True
    model = FakeModel(tokenizer=tokenizer)
    executor = FakeExecutor(ExecutorInfo(num_blocks=8, block_size=4, vocab_size=len(tokenizer), max_model_len=64))
    method, path = title.split()
    rows = OF_EMBEDDINGS if path == "/v1/embeddings" else THINGS | OF_MESSAGES
    _, table = compatibility.TEXT_TABLES[title]
    async with open_embedder(FakeEmbeddingModel(dimensions={2}), encoder=FakeEncoder()) as embedder:
        async with serving(prepare=partial(_add, embedder), model=model, executor=executor) as server:
            for name in (name for name, row in table.items() if row.treatment == "supported"):
                before = SMALLEST[title] | ({"prompt": None, "messages": MESSAGES} if name in OF_MESSAGES else {})
                one, other = [(await server.ask(method, path, body)).json for body in (before, before | rows[name])]
                assert "error" not in one and one != other, name


def _add(embedder, app):
    app.registry["embed"] = embedder


async def test_embedding_models_have_a_tokenizer_too(serving):
    async with open_embedder(FakeEmbeddingModel(), encoder=FakeEncoder()) as embedder:
        async with serving(prepare=partial(_add, embedder)) as server:
            answer = await server.ask("POST", "/tokenize", {"model": "embed", "prompt": "hi"})
            assert answer.json["tokens"] == [104, 105]


async def test_tokenizer_info(serving):
    tokenizer = trained("byte-level")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    async with serving(model=FakeModel(tokenizer=tokenizer)) as server:
        for path in ("/tokenizer_info", "/tokenizer_info?model=fake"):
            info = (await server.ask("GET", path)).json
            assert (info["model"], info["tokenizer_class"]) == ("fake", type(tokenizer).__name__)
            assert (info["eos_token"], info["bos_token"]) == ("<eos>", tokenizer.bos_token)
            assert (info["chat_template"], info["max_model_len"], info["vocab_size"]) == ("{{ messages }}", 1024, 256)
        assert (await server.ask("GET", "/tokenizer_info?model=nobody")).status == 404


async def test_version(serving):
    try:
        expected = version("trio-llm")
    except PackageNotFoundError:
        expected = "unknown"
    async with serving() as server:
        assert (await server.ask("GET", "/version")).json == {"version": expected}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/tokenizer_info", "/version", "/v1/embeddings"])
async def test_they_want_a_key(serving, path):
    async with serving(api_key=["sk"]) as server:
        assert (await server.ask("GET" if path in ("/tokenizer_info", "/version") else "POST", path)).status == 401
