"""What HTTP costs: `python bench/over_http.py --model smollm2`.

One engine, asked in turns in this process (as bench/engine.py does) and over HTTP by bench/serve.py, a program of its own.  A
turn of one and a turn of the other make a pair, whose ratio is the figure: what else the machine does changes both.
Which of them goes first alternates.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import trio
from answers import summarise
from engine import ask
from load import add_arguments, load_of, num_requests
from loops import Ask, closed_loop
from protocol_streams import served
from report import arguments, look, note, quiet, repeats, spread, spread_of, write

import trio_llm
from trio_llm.config import ServerSettings
from trio_llm.engine.registry import Registry
from trio_llm.server import logs
from trio_llm.server.app import create_app
from trio_llm.spinning import spin_shortly

CLIENT = Path(__file__).with_name("serve.py")


async def in_process(engine: trio_llm.Engine, args: argparse.Namespace, clients: int, number: int) -> float:
    """Output tokens a second of a closed loop without HTTP."""
    load = load_of(args, model=args.model, timeout=600, extra_body={}, api_key=None)

    @asynccontextmanager
    async def open_client() -> AsyncIterator[Ask]:
        yield lambda index: ask(engine, load, f"{clients} {number}", index)

    answers = await closed_loop(open_client, concurrency=clients, requests=num_requests(args, clients))
    return summarise(answers)["output_tokens_per_s"]


async def over_http(port: int, args: argparse.Namespace, clients: int, number: int) -> float:
    """Output tokens a second of the same over a socket; other prompts, or they would be found in the prefix cache."""
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory, "found.json")
        command = [sys.executable, str(CLIENT), "--url", f"http://127.0.0.1:{port}", "--model", args.model]
        command += ["--extra-body", '{"ignore_eos": true}', "--repeats", "1", "--json", str(found)]
        for name in ("requests", "prompt_tokens", "max_tokens"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        command += ["--concurrency", str(clients), "--seed", str(args.seed + 1 + number)]
        await trio.run_process(command, capture_stdout=True)
        (result,) = orjson.loads(await trio.Path(found).read_bytes())["results"]
    return float(result["output_tokens_per_s"]["median"])


async def measure(engine: trio_llm.Engine, port: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Pairs for each number of clients, after one that does not count."""
    results = []
    for clients in args.concurrency:
        pairs = []
        for repeat in itertools.chain([-1], repeats(args)):
            before = look()
            pair: dict[str, float] = {}
            for way in ("http", "in_process") if repeat % 2 else ("in_process", "http"):
                if way == "http":
                    pair[way] = await over_http(port, args, clients, repeat + 1)
                else:
                    pair[way] = await in_process(engine, args, clients, repeat + 1)
            pairs.append({**pair, "ratio": pair["http"] / pair["in_process"], **before})
        results.append({"clients": clients, **spread_of(pairs[1:]), "repeats": pairs[1:]})
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
    """As Markdown: medians of the pairs, with their spread."""
    lines = ["| clients | in process, tokens/s | over HTTP | ratio |", "|--:|--:|--:|--:|"]
    for row in results:
        cells = [spread([pair[name] for pair in row["repeats"]]) for name in ("in_process", "http")]
        lines.append(
            f"| {row['clients']} | {' | '.join(cells)} | {spread([pair['ratio'] for pair in row['repeats']], '.3f')} |"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2")
    add_arguments(parser)
    parser.add_argument("--settings", type=orjson.loads, default={}, help="a JSON object of engine settings")
    return parser.parse_args(argv)


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All figures."""
    async with trio_llm.open_engine(args.model, **args.settings) as engine:
        async with served(create_app(ServerSettings(), registry=Registry({args.model: engine}))) as port:
            return await measure(engine, port, args)


def main() -> None:
    """Measure, print and write."""
    args = parse(None)
    spin_shortly()
    # requests are logged as they are by `serve`, but nobody reads it
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        logs.configure(ServerSettings(log_format="json"))
        results = trio.run(run, args)
    print(table(results))
    idle = quiet(pair for row in results for pair in row["repeats"])
    print(f"{note(idle)}; median of {args.repeats} pairs [low-high]")
    write(args, results, idle=idle)


if __name__ == "__main__":
    main()
