"""Both ways to start a server, as programs of their own: `trio-llm serve` and `hypercorn -k trio`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
import trio
from hypercorn.utils import load_application

HERE = Path(__file__).parent
CHAT = "/v1/chat/completions"
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**HI, "max_tokens": 400, "stream": True}
COMMANDS = {
    "own": [sys.executable, "fake_app.py"],
    "hypercorn": [
        *(sys.executable, "-m", "hypercorn", "-k", "trio", "-c", "python:trio_llm.hypercorn_config"),
        *("--bind", "127.0.0.1:0", "fake_app:create()"),
    ],
}


class Program:
    """A running program, and what it said."""

    def __init__(self, process):
        self.process = process
        self.port = 0
        self.output = ""
        self._grown = trio.Event()

    async def watch(self, stream):
        """Collect what comes from a pipe."""
        async for data in stream:
            self.output += data.decode()
            self._grown.set()
            self._grown = trio.Event()

    async def until(self, pattern):
        """Wait until the output matches."""
        with trio.fail_after(60):
            while not (match := re.search(pattern, self.output)):
                await self._grown.wait()
        return match

    async def exit_code(self):
        """Wait for its end."""
        with trio.fail_after(60):
            return await self.process.wait()

    def terminate(self):
        """Send SIGTERM."""
        os.kill(self.process.pid, signal.SIGTERM)


@asynccontextmanager
async def program(command, **environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRIO_LLM_PORT": "0", **environment}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), env.get("PYTHONPATH", "")])
    async with trio.open_nursery() as nursery:
        process = await trio.lowlevel.open_process(
            command, cwd=HERE, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        started = Program(process)
        nursery.start_soon(started.watch, process.stdout)
        nursery.start_soon(started.watch, process.stderr)
        try:
            yield started
        finally:
            with trio.CancelScope(shield=True):
                # hypercorn's own process has a child
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


@asynccontextmanager
async def served(make_server, launch, **environment):
    async with program(COMMANDS[launch], **environment) as started:
        match = await started.until(r"http://127\.0\.0\.1:(\d+)")
        started.port = int(match[1])
        started.server = make_server(None, None, None, started.port, trio.Event(), trio.Event())
        try:
            yield started
        finally:
            for client in started.server.clients:
                client.stream.socket.close()


async def gauges(server):
    text = (await server.ask("GET", "/metrics")).body.decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [float(re.search(rf"trio_llm_{name}{{.*}} (\S+)", text)[1]) for name in names]


async def test_disconnects(make_server, launch):
    async with served(make_server, launch) as started:
        server = started.server
        clients = [await server.connect() for _ in range(20)]
        for index, client in enumerate(clients):
            await client.send("POST", CHAT, STREAM if index % 2 else {**STREAM, "stream": False})
        for client in clients[1::2]:
            await client.until(b'"content":"')
        running, _, usage = await gauges(server)
        assert running > 0 and usage > 0
        for client in clients:
            client.stream.socket.close()
        with trio.fail_after(2):  # to the natural end it would be longer: 400 steps of 5 ms
            while await gauges(server) != [0, 0, 0]:
                pass
        assert (await server.ask("POST", CHAT, {**HI, "max_tokens": 2})).status == 200


async def test_sigterm_lets_a_stream_finish(make_server, launch):
    async with served(make_server, launch) as started:
        client = await started.server.connect()
        await client.send("POST", CHAT, {**STREAM, "max_tokens": 100})
        await client.until(b'"content":"a')
        started.terminate()
        with trio.fail_after(20):
            await client.until(b'"finish_reason":"length"')
            await client.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert await started.exit_code() == 0
        if launch == "own":
            assert "trio-llm: drained, good bye" in started.output
        else:
            assert started.output.count("Running on") == 1


async def test_ready_line_and_json_logs(make_server):
    async with served(make_server, "own") as started:
        await started.until("is ready at .*\n.*curl ")
        await started.server.ask("POST", CHAT, {**HI, "max_tokens": 2})
        match = await started.until(r'\{.*"path":"?.*chat/completions.*\}')
        line = orjson.loads(match[0])
        assert (line["status"], line["completion_tokens"], line["finish_reason"]) == (200, 2, "length")
        assert line["level"] == "info" and line["request_id"]


async def test_exit_3_when_the_engine_dies(make_server):
    async with served(make_server, "own") as started:
        answer = await started.server.ask("POST", "/v1/completions", {"model": "fake", "prompt": "!"})
        assert answer.status in (500, 503)
        assert await started.exit_code() == 3
        assert re.search("^trio-llm: the engine died: .+$", started.output, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["serve", "--wibble"], 2, "Unknown option"),
        (["serve", "--port", "x"], 2, "port"),
        (["serve", "--config", "/does/not/exist.toml"], 1, "cannot read"),
        (["serve", "/does/not/exist.gguf"], 1, "exist.gguf"),
        (["pull", "nothing"], 1, "catalogue"),
    ],
)
async def test_other_exit_codes(arguments, code, line):
    async with program([sys.executable, "-m", "trio_llm", *arguments]) as started:
        assert await started.exit_code() == code
        await started.until(f"trio-llm: .*{line}")
    complaints = [text for text in started.output.splitlines() if text.startswith("trio-llm:")]
    assert len(complaints) == 1
    assert "Traceback" not in started.output


async def test_busy_port_exits_1(make_server):
    async with served(make_server, "own") as first:
        async with program(COMMANDS["own"], TRIO_LLM_PORT=str(first.port)) as second:
            assert await second.exit_code() == 1
            await second.until(f"trio-llm: cannot listen on 127.0.0.1:{first.port}")


async def test_second_signal_ends_at_once(make_server):
    async with served(make_server, "own") as started:
        client = await started.server.connect()
        await client.send("POST", CHAT, {**STREAM, "max_tokens": 900})
        await client.until(b'"content":"a')
        started.terminate()
        await started.until('"event":"draining"|"event": "draining"')
        os.kill(started.process.pid, signal.SIGINT)
        await client.until(b'"code":"shutting_down"}}\n\n')
        assert await started.exit_code() == 0


async def test_hypercorn_under_asyncio_is_refused():
    command = [sys.executable, "-m", "hypercorn", "--bind", "127.0.0.1:0", "fake_app:create()"]
    async with program(command) as started:
        await started.until("hypercorn -k trio")


async def test_hypercorn_when_the_engine_dies(make_server):
    async with served(make_server, "hypercorn") as started:
        answer = await started.server.ask("POST", "/v1/completions", {"model": "fake", "prompt": "!"})
        assert answer.status in (500, 503)
        for path in ("/health/live", "/health/ready"):
            with trio.fail_after(10):
                while (await started.server.ask("GET", path)).status != 503:
                    pass
        answer = await started.server.ask("POST", CHAT, HI)
        assert (answer.status, answer.json["error"]["code"]) == (503, "engine_dead")
        started.terminate()
        assert await started.exit_code() == 0


async def test_hypercorn_without_a_model():
    command = [part.replace("create()", "create_without_model()") for part in COMMANDS["hypercorn"]]
    async with program(command) as started:
        await started.exit_code()
        await started.until("there is no such model")


def test_the_name_in_the_docs_is_found():
    """Hypercorn looks names up in the module's own dictionary, so a module's __getattr__ is not asked."""
    load_application("trio_llm:create_app()", 2**20)
