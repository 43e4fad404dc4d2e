"""The load generator against small servers whose timing is known."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import serve
import trio
from answers import Answer, Arrival, percentile, summarise
from http_client import Client
from load import Load
from loops import OpenClient, closed_loop, open_loop
from serve import Server, ask
from trio.testing import MockClock, memory_stream_pair

LOAD = Load(
    model="m",
    prompt_tokens=40,
    max_tokens=8,
    seed=0,
    shared_prefix=False,
    timeout=60,
    extra_body={"ignore_eos": True},
    api_key=None,
)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"

Write = Callable[[bytes], Awaitable[None]]
Behaviour = Callable[[dict[str, Any], Write], Awaitable[None]]


def frame(event: dict[str, Any] | str) -> bytes:
    """One event as a chunk of the body."""
    data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def delta(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 50, "completion_tokens": tokens}}


async def serve_stream(behaviour: Behaviour, stream: trio.abc.Stream) -> None:
    """Serve requests, each within one send of the client, until the client goes."""
    async with stream:
        try:
            while request := await stream.receive_some():
                await behaviour(json.loads(request.partition(b"\r\n\r\n")[2]), stream.send_all)
        except trio.BrokenResourceError:
            pass  # a client that gave up


def connecting(nursery: trio.Nursery, behaviour: Behaviour) -> Callable[[], Awaitable[trio.abc.Stream]]:
    async def connect() -> trio.abc.Stream:
        ours, theirs = memory_stream_pair()
        nursery.start_soon(serve_stream, behaviour, ours)
        return theirs

    return connect


def clients(connect: Callable[[], Awaitable[trio.abc.Stream]], load: Load = LOAD) -> OpenClient:
    return Server(connect, "server", 80).clients(load, "run")


async def steady(
    body: dict[str, Any], write: Write, *, first: float = 0.5, gap: float = 0.1, tokens: int = 5, joined: int = 1
) -> None:
    """`tokens` tokens, the first after `first` seconds, then `joined` in a chunk every `gap`."""
    await write(STREAM + frame({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
    await trio.sleep(first)
    await write(frame(delta("word")))
    for _ in range((tokens - 1) // joined):
        await trio.sleep(gap)
        await write(frame(delta("word" * joined)))
    await write(frame(delta("", "length")) + frame(usage(tokens)) + frame("[DONE]") + END)


def write_once(*parts: bytes) -> Behaviour:
    async def behaviour(_: dict[str, Any], write: Write) -> None:
        await write(b"".join(parts))

    return behaviour


async def test_times_and_counts_of_a_steady_server(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    connect = connecting(nursery, steady)

    answers = await closed_loop(clients(connect), concurrency=2, requests=6)

    figures = summarise(answers)
    assert figures["errors"] == 0
    assert figures["requests"] == 6
    # three rounds of two clients, each of 0.5 s + 4 * 0.1 s
    assert figures["wall_s"] == pytest.approx(2.7)
    assert figures["output_tokens_per_s"] == pytest.approx(30 / 2.7)
    assert figures["requests_per_s"] == pytest.approx(6 / 2.7)
    assert figures["ttft_p50_ms"] == pytest.approx(500)
    assert figures["ttft_p99_ms"] == pytest.approx(500)
    assert figures["itl_p50_ms"] == pytest.approx(100)
    assert figures["itl_p99_ms"] == pytest.approx(100)
    assert figures["prompt_tokens"] == 50
    assert figures["output_tokens"] == 5
    assert figures["tokens_per_arrival"] == 1
    assert figures["counted_by_chunks"] == 0


async def test_an_open_loop_waits_for_nobody(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    connect = connecting(nursery, partial(steady, first=1000.0))

    answers = await open_loop(clients(connect, attrs.evolve(LOAD, timeout=2000)), rate=4.0, requests=400, seed="run")

    starts = sorted(answer.started for answer in answers)
    assert len(starts) == 400
    assert starts[-1] < min(answer.ended for answer in answers)
    # 399 gaps of a Poisson process: a mean of 1/4 s, known to a twentieth of its value
    assert (starts[-1] - starts[0]) / 399 == pytest.approx(0.25, rel=0.15)
    assert len({round(later - earlier, 6) for earlier, later in itertools.pairwise(starts)}) > 300


async def test_joined_tokens_share_the_time_of_their_chunk(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    behaviour = partial(steady, tokens=9, joined=4, gap=0.4)

    [answer] = await closed_loop(clients(connecting(nursery, behaviour)), concurrency=1, requests=1)

    assert answer.tokens == 9
    assert [gap for gap, _ in answer.token_gaps()] == pytest.approx([0.1, 0.1])
    assert [tokens for _, tokens in answer.token_gaps()] == pytest.approx([4, 4])


async def test_without_usage_chunks_are_counted(nursery: trio.Nursery) -> None:
    behaviour = write_once(STREAM, *map(frame, (delta("a"), delta("b"), delta("", "stop"))), END)

    [answer] = await closed_loop(clients(connecting(nursery, behaviour)), concurrency=1, requests=1)

    assert answer.failure is None
    assert answer.tokens == 2
    assert summarise([answer])["counted_by_chunks"] == 1


@pytest.mark.parametrize(
    ("parts", "failure"),
    [
        ((b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy",), "HTTP 503: busy"),
        ((STREAM, frame(delta("a")), frame({"error": {"message": "lost"}}), END), "an error in the stream"),
        ((STREAM, frame(delta("a")), frame("[DONE]"), END), "without a finish_reason"),
        ((STREAM, frame(delta("", "stop")), frame(usage(0)), END), "holds no text"),
        ((STREAM, frame("not JSON"), END), "not JSON"),
        ((STREAM, frame(delta("a", "stop")), b"zz\r\n"), "ProtocolError: b'zz' is no length"),
    ],
)
async def test_a_failure_is_never_a_success(parts: tuple[bytes, ...], failure: str, nursery: trio.Nursery) -> None:
    connect = connecting(nursery, write_once(*parts))

    answers = await closed_loop(clients(connect), concurrency=1, requests=2)

    assert all(answer.failure is not None and failure in answer.failure for answer in answers)
    good = Answer(0.0, 1.0, [Arrival(0.5, 1, 1)], "stop", {"completion_tokens": 4, "prompt_tokens": 1})
    for answer in answers:
        answer.started, answer.ended = 0.0, 2.0
    figures = summarise([good, *answers])
    assert figures["errors"] == 2
    assert figures["output_tokens_per_s"] == 2


async def test_a_silent_server_is_a_failure(autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    async def silent(_: dict[str, Any], write: Write) -> None:
        await write(STREAM + frame(delta("a")))
        await trio.sleep_forever()

    client = Client(connecting(nursery, silent), "server")

    answer = await ask(client, "/v1", LOAD, "run", 0)

    assert answer.failure == "no end within 60 s"
    assert answer.ended == pytest.approx(answer.started + 60)
    nursery.cancel_scope.cancel()


def test_prompts_differ_from_their_first_words_and_never_between_processes() -> None:
    prompts = [LOAD.prompt("8 0", index) for index in range(64)] + [LOAD.prompt("8 1", index) for index in range(64)]

    assert len({tuple(prompt.split()[:3]) for prompt in prompts}) == len(prompts)
    assert LOAD.prompt("8 0", 0).split()[:4] == prompts[0].split()[:4]
    assert {len(prompt.split()) for prompt in prompts} == {40}


def test_a_shared_prefix_is_shared() -> None:
    load = attrs.evolve(LOAD, shared_prefix=True)
    first, second = (load.prompt("8 0", index).split() for index in range(2))

    assert first[:18] == second[:18]
    assert first[:25] != second[:25]


def test_percentiles_are_of_the_weight() -> None:
    samples = [(3.0, 1.0), (1.0, 97.0), (2.0, 2.0)]

    assert percentile(samples, 0.5) == 1.0
    assert percentile(samples, 0.98) == 2.0
    assert percentile(samples, 1.0) == 3.0
    assert percentile([], 0.5) == 0.0


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a server on a real socket, and the bodies it was sent."""
    bodies: list[dict[str, Any]] = []

    async def behaviour(body: dict[str, Any], write: Write) -> None:
        bodies.append(body)
        await write(STREAM)
        for event in (delta("Once"), delta(" upon", "length"), usage(2), "[DONE]"):
            await write(frame(event))
        await write(END)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, partial(serve_stream, behaviour), 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", bodies
        nursery.cancel_scope.cancel()


async def test_the_whole_program(
    served: tuple[str, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, bodies = served
    report = tmp_path / "out.json"
    arguments = ["--url", url, "--model", "m", "--concurrency", "1", "2", "--requests", "4", "--repeats", "3"]
    arguments += ["--max-tokens", "2", "--extra-body", '{"ignore_eos": true}', "--json", str(report)]

    status = await serve.run(serve.parse(arguments))

    assert status == 0
    assert len(bodies) == (2 + 3 * 4) * 2
    assert all(body["ignore_eos"] and body["stream"] and body["temperature"] == 0 for body in bodies)
    assert len({body["messages"][0]["content"] for body in bodies}) == len(bodies)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["clients", "1", "2"]
    document = json.loads(report.read_text())
    assert [result["concurrency"] for result in document["results"]] == [1, 2]
    assert [len(result["repeats"]) for result in document["results"]] == [3, 3]
    assert document["settings"]["model"] == "m"
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["versions"]["trio"] == trio.__version__


async def test_the_whole_program_in_an_open_loop(
    served: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, bodies = served
    arguments = ["--url", url, "--model", "m", "--rate", "500", "--requests", "8", "--repeats", "1"]

    assert await serve.run(serve.parse(arguments)) == 0

    assert len(bodies) == 8 + 8
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["requests/s come", "500"]


async def test_a_server_that_refuses_the_warm_up_ends_the_program(nursery: trio.Nursery) -> None:
    behaviour = write_once(b"HTTP/1.1 404 Not Found\r\nContent-Length: 8\r\n\r\nno model")
    listeners = await nursery.start(partial(trio.serve_tcp, partial(serve_stream, behaviour), 0, host="127.0.0.1"))
    url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"

    with pytest.raises(SystemExit, match="warm-up failed: HTTP 404: no model"):
        await serve.run(serve.parse(["--url", url, "--model", "m"]))
    nursery.cancel_scope.cancel()
