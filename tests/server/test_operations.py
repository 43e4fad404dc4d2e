"""Models, health, metrics."""

from __future__ import annotations

import re

import pytest

from trio_llm.core.executor import FakeExecutor
from trio_llm.engine.registry import Registry
from trio_llm.errors import EngineDead
from trio_llm.server.app import create_app

HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
CHAT = "/v1/chat/completions"


async def test_models(serving):
    async with serving() as server:
        server.app.registry["org/alias"] = server.engine
        listed = (await server.ask("GET", "/v1/models")).json
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["fake", "org/alias"]
        for card in listed["data"]:
            assert card.keys() == {"id", "object", "created", "owned_by", "max_model_len"}
            assert card["max_model_len"] == 1024
            assert (await server.ask("GET", "/v1/models/" + card["id"])).json == card
        answer = await server.ask("POST", CHAT, {**HI, "model": "org/alias"})
        assert answer.json["model"] == "org/alias"


async def test_health(serving, monkeypatch):
    async with serving() as server:
        for path in ("/health", "/health/ready", "/health/live"):
            assert (await server.ask("GET", path)).status == 200
        monkeypatch.setattr(server.engine, "_stuck", True)
        assert (await server.ask("GET", "/health/live")).status == 200
        answer = await server.ask("GET", "/health/ready")
        assert (answer.status, answer.json["status"]) == (503, "stuck")


async def test_while_loading(serving):
    async with serving() as server:
        server.app.lifecycle.registry = server.app.registry = Registry()
        assert (await server.ask("GET", "/health/live")).status == 200
        assert (await server.ask("GET", "/health")).json["status"] == "not_ready"
        for method, path, body in (("POST", CHAT, HI), ("GET", "/v1/models", None), ("GET", "/metrics", None)):
            answer = await server.ask(method, path, body)
            assert (answer.status, answer.json["error"]["code"]) == (503, "model_loading")
            assert int(answer.headers["retry-after"]) >= 1


async def test_while_draining(serving):
    async with serving() as server:
        server.app.lifecycle.leaving = True
        assert (await server.ask("GET", "/health/ready")).status == 503
        assert (await server.ask("POST", CHAT, HI)).status == 200
        server.app.lifecycle.drain()
        answer = await server.ask("POST", CHAT, HI)
        assert (answer.status, answer.json["error"]["code"]) == (503, "shutting_down")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["connection"] == "close"
        assert (await server.ask("GET", "/health/live")).status == 200


async def test_dead_engine(serving):
    executor = FakeExecutor(next_token=lambda context, index: 1 // 0, broken=RuntimeError("past help"))
    with pytest.RaisesGroup(EngineDead, flatten_subgroups=True, allow_unwrapped=True):
        async with serving(executor=executor) as server:
            answer = await server.ask("POST", CHAT, HI)
            assert (answer.status, answer.json["error"]["code"]) == (503, "engine_dead")
            await server.until(lambda: False)


def metric(text, name):
    match = re.search(rf"^trio_llm_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert match, (name, text)
    return float(match[1])


async def test_metrics(serving, gated):
    executor, gate = gated
    async with serving(executor=executor, engine={"max_num_seqs": 1}) as server:
        clients = [await server.connect() for _ in range(2)]
        for client in clients:
            await client.send("POST", CHAT, {**HI, "max_tokens": 4})
        await server.admitted(2)
        gate.let(1)
        await server.until(lambda: server.engine.statistics().generation_tokens == 1)
        gate.let(1)
        await server.until(lambda: server.engine.statistics().generation_tokens == 2)
        text = (await server.ask("GET", "/metrics")).body.decode()
        label = '{model_name="fake"}'
        assert metric(text, "num_requests_running" + label) == 1
        assert metric(text, "num_requests_waiting" + label) == 1
        assert metric(text, "kv_cache_usage_perc" + label) > 0
        gate.open()
        for client in clients:
            assert (await client.receive()).status == 200
        await server.assert_all_free()
        text = (await server.ask("GET", "/metrics")).body.decode()
        assert metric(text, "num_requests_running" + label) == 0
        assert metric(text, "num_requests_waiting" + label) == 0
        assert metric(text, "kv_cache_usage_perc" + label) == 0
        assert metric(text, "generation_tokens_total" + label) == 8
        assert metric(text, "prompt_tokens_total" + label) == 40
        assert metric(text, 'request_success_total{finished_reason="length",model_name="fake"}') == 2
        assert metric(text, "time_to_first_token_seconds_count" + label) == 2
        assert metric(text, "inter_token_latency_seconds_count" + label) == 6


async def test_access_line(serving, capsys):
    async with serving() as server:
        await server.ask(
            "POST", CHAT, {**HI, "messages": [{"role": "user", "content": "a secret"}]}, x_request_id="mine"
        )
        await server.until(lambda: not server.app.exchanges)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if CHAT in line]
    for fact in ("status=200", "completion_tokens=5", "finish_reason=length", "ttft=", "client_request_id=mine"):
        assert fact in line
    assert "secret" not in line


def test_create_app_reads_a_file(tmp_path):
    path = tmp_path / "trio_llm.toml"
    path.write_text("[trio_llm]\nmax_request_bytes = 77\n")
    app = create_app(str(path))
    assert app.settings.max_request_bytes == app.config["MAX_CONTENT_LENGTH"] == 77
