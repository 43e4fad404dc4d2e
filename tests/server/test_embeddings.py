"""POST /v1/embeddings: shapes, errors, disconnects, the drain, the openai client, the real model."""

from __future__ import annotations

import base64
import os
import signal
import struct
import threading
from contextlib import asynccontextmanager
from functools import partial

import openai
import pytest
import trio

from trio_llm.config import ServerSettings
from trio_llm.engine.embedding import open_embedder
from trio_llm.engine.simulation import FakeEmbeddingModel, FakeEncoder
from trio_llm.server.serve import serve

PATH = "/v1/embeddings"
ASK = {"model": "embed", "input": "abc"}


class Gate:
    """Lets steps through when told to."""

    def __init__(self):
        self.began = threading.Event()
        self.permits = threading.Semaphore(0)

    def __call__(self, texts):
        self.began.set()
        assert self.permits.acquire(timeout=60)


@asynccontextmanager
async def embedding(serving, launch="own", *, encoder=None, model=None, engine=None, **settings):
    """A server of a chat model "fake" and an embedding model "embed"; gives it and the embedder."""
    opened = open_embedder(model or FakeEmbeddingModel(), encoder=encoder or FakeEncoder(), **(engine or {}))
    async with opened as embedder:
        prepare = partial(_add, embedder)
        async with serving(launch, prepare=prepare, **settings) as server:
            yield server, embedder


def _add(embedder, app):
    app.registry["embed"] = embedder


async def test_shape(serving, launch):
    async with embedding(serving, launch) as (server, _):
        answer = await server.ask("POST", PATH, ASK)
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json == {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [97, 99, 3, 294]}],
            "model": "embed",
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", [[97, 98, 2, 195]]),
        (["ab", "c"], [[97, 98, 2, 195], [99, 99, 1, 99]]),
        ([5, 6], [[5, 6, 2, 11]]),
        ([[5, 6], [7]], [[5, 6, 2, 11], [7, 7, 1, 7]]),
    ],
)
async def test_inputs(serving, given, expected):
    async with embedding(serving) as (server, _):
        for encoding_format in (None, "float", "base64"):
            body = (await server.ask("POST", PATH, {**ASK, "input": given, "encoding_format": encoding_format})).json
            found = [entry["embedding"] for entry in body["data"]]
            if encoding_format == "base64":
                found = [list(struct.unpack("<4f", base64.b64decode(text))) for text in found]
            assert found == expected
            assert [entry["index"] for entry in body["data"]] == list(range(len(expected)))
            assert body["usage"]["prompt_tokens"] == sum(row[2] for row in expected)


BAD = [
    ({"model": None}, "missing_required_parameter", "model"),
    ({"model": "nobody"}, "model_not_found", "model"),
    ({"model": "fake"}, "model_not_supported", "model"),
    ({"input": None}, "missing_required_parameter", "input"),
    ({"input": 5}, "invalid_type", "input"),
    ({"input": []}, "invalid_type", "input"),
    ({"input": ["a", 1]}, "invalid_type", "input"),
    ({"input": [1.5]}, "invalid_type", "input"),
    ({"input": ""}, "invalid_value", "input"),
    ({"input": ["a", ""]}, "invalid_value", "input"),
    ({"input": [[1], []]}, "invalid_value", "input"),
    ({"input": [256]}, "invalid_value", "input"),
    ({"input": [-1]}, "invalid_value", "input"),
    ({"input": ["a"] * 2049}, "invalid_value", "input"),
    ({"input": "x" * 65}, "context_length_exceeded", "input"),
    ({"input": ["a", "x" * 65]}, "context_length_exceeded", "input"),
    ({"encoding_format": "int8"}, "invalid_value", "encoding_format"),
    ({"encoding_format": 1}, "invalid_type", "encoding_format"),
    ({"dimensions": "2"}, "invalid_type", "dimensions"),
    ({"dimensions": True}, "invalid_type", "dimensions"),
    ({"dimensions": 0}, "invalid_value", "dimensions"),
    ({"dimensions": 2}, "unsupported_parameter", "dimensions"),
    ({"truncate_prompt_tokens": 5}, "unsupported_parameter", "truncate_prompt_tokens"),
    ({"wibble": 5}, "unknown_parameter", "wibble"),
    ({"user": 5}, "invalid_type", "user"),
]


async def test_bad_requests(serving):
    async with embedding(serving) as (server, embedder):
        client = await server.connect()
        for change, code, param in BAD:
            await client.send("POST", PATH, {**ASK, **change})
            answer = await client.receive()
            error = answer.json["error"]
            assert answer.status == (404 if code == "model_not_found" else 400)
            assert (error["code"], error["param"]) == (code, param), (change, error)
        assert (
            "at most 64 tokens" in (await server.ask("POST", PATH, {**ASK, "input": "x" * 65})).json["error"]["message"]
        )
        await client.send("POST", PATH, {**ASK, "user": "me", "dimensions": 4, "priority": 0})
        assert (await client.receive()).status == 200
        assert embedder.statistics().num_requests == 0


async def test_fewer_dimensions(serving):
    async with embedding(serving, model=FakeEmbeddingModel(dimensions={2})) as (server, _):
        body = (await server.ask("POST", PATH, {**ASK, "dimensions": 2})).json
        assert body["data"][0]["embedding"] == [97, 99]


async def test_the_other_endpoints_refuse_an_embedding_model(serving):
    async with embedding(serving) as (server, _):
        bodies = {
            "/v1/chat/completions": {"model": "embed", "messages": [{"role": "user", "content": "hi"}]},
            "/v1/completions": {"model": "embed", "prompt": "hi"},
        }
        for path, body in bodies.items():
            answer = await server.ask("POST", path, body)
            assert (answer.status, answer.json["error"]["code"]) == (400, "model_not_supported")
            assert "/v1/embeddings" in answer.json["error"]["message"]


async def test_it_stands_beside_the_others(serving):
    async with embedding(serving) as (server, _):
        models = (await server.ask("GET", "/v1/models")).json["data"]
        assert [(card["id"], card["max_model_len"]) for card in models] == [("fake", 1024), ("embed", 64)]
        assert (await server.ask("GET", "/health")).json["engines"]["embed"]["state"] == "ready"
        await server.ask("POST", PATH, ASK)
        metrics = (await server.ask("GET", "/metrics")).body.decode()
        assert 'trio_llm_prompt_tokens_total{model_name="embed"} 3.0' in metrics
        assert 'trio_llm_request_success_total{finished_reason="stop",model_name="embed"} 1.0' in metrics
        assert (await server.ask("POST", "/v1/requests/x/abort")).status == 404


async def test_a_client_that_leaves_is_not_computed(serving, launch):
    gate = Gate()
    async with embedding(serving, launch, encoder=FakeEncoder(gate), engine={"max_num_seqs": 1}) as (server, embedder):
        clients = [await server.connect() for _ in range(3)]
        for count, client in enumerate(clients, start=1):
            await client.send("POST", PATH, {**ASK, "input": ["a", "b"]})
            await server.until(lambda count=count: embedder.statistics().num_requests == count)
        for client in clients[:2]:
            client.stream.socket.close()
        await server.until(lambda: embedder.statistics().num_requests == 1)
        gate.permits.release(10)
        assert (await clients[2].receive()).status == 200
        assert embedder.statistics().core.num_computed_tokens <= 4  # the step that ran, and the last request
        assert embedder.statistics().finished["abort"] == 2


async def test_queue_full(serving):
    gate = Gate()
    limits = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    async with embedding(serving, encoder=FakeEncoder(gate), engine=limits) as (server, embedder):
        clients = [await server.connect() for _ in range(2)]
        for count, client in enumerate(clients, start=1):
            await client.send("POST", PATH, ASK)
            await server.until(lambda count=count: embedder.statistics().num_requests == count)
        answer = await server.ask("POST", PATH, ASK)
        assert (answer.status, answer.json["error"]["code"]) == (503, "server_overloaded")
        assert "retry-after" in answer.headers
        gate.permits.release(10)
        for client in clients:
            assert (await client.receive()).status == 200


async def test_a_failing_step_is_a_500(serving):
    def fail(texts):
        raise MemoryError("a secret")

    async with embedding(serving, encoder=FakeEncoder(fail)) as (server, _):
        answer = await server.ask("POST", PATH, ASK)
        assert (answer.status, answer.json["error"]["code"]) == (500, "request_failed")
        assert b"secret" not in answer.body


async def test_the_drain_cuts_off_who_waits_too_long(make_server):
    gate = Gate()
    settings = ServerSettings(port=0, model="embed", shutdown_timeout=0.05)
    opener = partial(open_embedder, FakeEmbeddingModel(name="embed"), encoder=FakeEncoder(gate))
    ready = {}
    async with trio.open_nursery() as nursery:
        run = partial(serve, settings, open_engine=opener, on_ready=lambda url, app: ready.update(app=app))
        url = await nursery.start(run)
        app = ready["app"]
        server = make_server(app, None, None, int(url.rpartition(":")[2]), trio.Event(), trio.Event())
        client = await server.connect()
        await client.send("POST", PATH, ASK)
        await trio.to_thread.run_sync(gate.began.wait)
        os.kill(os.getpid(), signal.SIGTERM)
        answer = await client.receive()
        assert (answer.status, answer.json["error"]["code"]) == (503, "shutting_down")
        gate.permits.release(10)
    client.stream.socket.close()


async def test_the_openai_client(serving):
    async with embedding(serving) as (server, _):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            for options in ({}, {"encoding_format": "float"}):
                found = await client.embeddings.create(model="embed", input=["abc", "b"], **options)
                assert [entry.embedding for entry in found.data] == [[97, 99, 3, 294], [98, 98, 1, 98]]
                assert found.usage.total_tokens == 4
            with pytest.raises(openai.BadRequestError, match="at most 64 tokens"):
                await client.embeddings.create(model="embed", input="x" * 65)


async def test_the_log_tells_the_tokens(serving, capsys):
    async with embedding(serving) as (server, _):
        await server.ask("POST", PATH, {**ASK, "input": "do not log me"})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if PATH in line]
    assert "prompt_tokens=13" in line and "model=embed" in line
    assert "do not log me" not in line


async def test_serving_the_real_model():
    """`serve` of a name from the catalogue finds out itself that it is an embedding model."""
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(partial(serve, ServerSettings(port=0, model="all-minilm-l6-v2")))
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
                texts = ["A cat sleeps.", "A kitten naps.", "Stocks fell."]
                found = await client.embeddings.create(model="all-minilm-l6-v2", input=texts)
                cat, kitten, stocks = (entry.embedding for entry in found.data)
                assert len(cat) == 384
                assert sum(x * x for x in cat) == pytest.approx(1, abs=1e-5)
                near, far = (sum(x * y for x, y in zip(cat, other, strict=True)) for other in (kitten, stocks))
                assert near > 0.5 > far + 0.3
            os.kill(os.getpid(), signal.SIGTERM)
