"""A load on any OpenAI-compatible server: `python bench/serve.py --url http://127.0.0.1:8000`.

Closed loop: each of `--concurrency` clients sends a streaming chat completion, reads it to its end
and sends the next, until `--requests` were answered.  Open loop: requests come at random at a
`--rate`, whether those before them were answered or not, as the public's do.  `--slow-clients` sit beside
either: they read a few tokens a second, and count for nothing.  Each is repeated, and medians are
reported with their lowest and highest value.  docs/benchmarks.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import attrs
import orjson
import trio
from answers import Answer, table
from http_client import Client, Connect, ProtocolError
from load import Load, add_arguments, load_of, num_requests
from loops import Ask, OpenClient, closed_loop, measure, open_loop
from report import arguments, machine, note, quiet, write
from slow_clients import slow_readers


async def ask(client: Client, path: str, load: Load, run: str, index: int) -> Answer:
    """Send one request and keep what comes, to be read when the run is over: the client takes as little as it can of
    the machine that it may share with the server.  Failures are in the answer, none is raised."""
    answer = Answer(trio.current_time())
    with trio.move_on_after(load.timeout) as scope:
        try:
            head = await client.request("POST", f"{path}/chat/completions", load.headers, load.body(run, index))
            if head.status == 200:
                answer.pieces = []
                while piece := await client.receive_body():
                    answer.pieces.append((client.received_at, piece))
            else:
                text = b""
                while piece := await client.receive_body():
                    text += piece
                answer.failure = f"HTTP {head.status}: {text[:200].decode(errors='replace')}"
        except (OSError, trio.BrokenResourceError, ProtocolError) as error:
            answer.failure = f"{type(error).__name__}: {error}"
    answer.ended = trio.current_time()
    if scope.cancelled_caught:
        answer.failure = f"no end within {load.timeout:g} s"
    if answer.failure is not None:
        await client.aclose()
    return answer


@attrs.frozen
class Server:
    """Where the server is."""

    connect: Connect
    host: str
    port: int
    path: str = "/v1"

    def clients(self, load: Load, run: str) -> OpenClient:
        """What opens the clients of a run."""

        @asynccontextmanager
        async def open_client() -> AsyncIterator[Ask]:
            client = Client(self.connect, f"{self.host}:{self.port}")
            try:
                yield lambda index: ask(client, self.path, load, run, index)
            finally:
                await client.aclose()

        return open_client


async def measure_server(server: Server, load: Load, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs of all concurrencies, or of all rates."""

    async def warm_up(level: float, name: str) -> tuple[Sequence[Answer], dict[str, float]]:
        concurrency = 8 if args.rate else int(level)
        clients = server.clients(load, name)
        return await closed_loop(clients, concurrency=concurrency, requests=max(2, concurrency)), {}

    async def run(level: float, name: str) -> tuple[Sequence[Answer], dict[str, float]]:
        cpu_before, began = sum(os.times()[:2]), trio.current_time()
        clients = server.clients(load, name)
        slowly = slow_readers(
            args.slow_clients, server.host, server.port, server.path, load, f"slow {name}", pause=args.slow_pause
        )
        async with slowly as taken:
            if args.rate:
                requests = num_requests(args, 8)
                answers = await open_loop(clients, rate=level, requests=requests, seed=f"{load.seed} {name}")
            else:
                requests = num_requests(args, int(level))
                answers = await closed_loop(clients, concurrency=int(level), requests=requests)
        seconds = trio.current_time() - began
        for failure in sorted({answer.failure for answer in answers if answer.failure is not None}):
            print(f"error at {level}: {failure}", file=sys.stderr)
        others = {"client_cpu_share": (sum(os.times()[:2]) - cpu_before) / seconds}
        if args.slow_clients:
            others["slow_chunks_per_s"] = taken.chunks / args.slow_clients / seconds
            others["slow_errors"] = taken.errors
        return answers, others

    unit = "rate" if args.rate else "concurrency"
    return await measure(unit, args.rate or args.concurrency, args, warm_up, run)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
    parser.add_argument("--model", required=True)
    add_arguments(parser)
    parser.add_argument("--rate", type=float, nargs="+", help="open loop, in place of --concurrency: requests a second")
    parser.add_argument("--slow-clients", type=int, default=0, help="further clients, that read slowly")
    parser.add_argument("--slow-pause", type=float, default=0.5, help="seconds between their reads of 512 bytes")
    parser.add_argument("--extra-body", type=orjson.loads, default={}, help="a JSON object, added to each request")
    parser.add_argument("--api-key")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    args = parser.parse_args(argv)
    if args.slow_clients and not args.url.startswith("http://"):
        parser.error("slow clients speak http:// only")
    return args


async def run(args: argparse.Namespace) -> int:
    """Measure, print and write; the exit status is 1 if any request failed."""
    url = urlsplit(args.url)
    secure = url.scheme == "https"
    host, port = url.hostname or "127.0.0.1", url.port or (443 if secure else 80)

    async def connect() -> trio.abc.Stream:
        if secure:
            return await trio.open_ssl_over_tcp_stream(host, port, https_compatible=True)
        return await trio.open_tcp_stream(host, port)

    others = {name: getattr(args, name) for name in ("model", "timeout", "extra_body", "api_key")}
    server = Server(connect, host, port, f"{url.path.rstrip('/')}/v1")
    results = await measure_server(server, load_of(args, **others), args)

    facts = machine()
    idle = quiet(run for result in results for run in result["repeats"])
    print(table(results))
    print(f"\n{facts['cpu']}, {facts['cores']} cores, {facts['system']}")
    print(note(idle))
    print(f"client's share of one core at most {max(result['client_cpu_share']['high'] for result in results):.2f}")
    print(f"prompts of {results[0]['prompt_tokens']['median']:.0f} tokens, median of {args.repeats} runs [low-high]")
    if any(result["counted_by_chunks"]["high"] for result in results):
        print("some answers came without usage: their tokens are counted as chunks of text")
    if args.slow_clients:
        chunks = max(result["slow_chunks_per_s"]["high"] for result in results)
        print(f"beside them {args.slow_clients} slow clients, each of which took at most {chunks:.1f} chunks/s")
    write(args, results, idle=idle)
    return int(any(result["errors"]["high"] for result in results))


if __name__ == "__main__":
    raise SystemExit(trio.run(run, parse(None)))
