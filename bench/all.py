"""All measurements, one after the other, and the figures: `python bench/all.py results --figures docs/figures`.

Each program writes its JSON and its table to the directory.  With the peers named it takes some ten minutes, in
which nothing else should run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from processes import DoesNotServe, serving
from report import machine

HERE = Path(__file__).parent
PORT = "8105"
SLOW = 8
"""Slow clients, among so many in all:"""
CLIENTS = 32

Task = tuple[str, list[str]]
"""A name, under which its results are kept, and a program with its arguments."""


def tasks(args: argparse.Namespace) -> Iterator[Task]:
    """What is measured, in this order; `http` and those after it that begin so need a server."""
    repeats = ["--repeats", str(args.repeats), "--seconds", str(args.seconds)]
    # as long as what the docs have: 109 tokens with the chat template
    load = ["--prompt-tokens", "75", *repeats]
    peers = [f"--{name}={value}" for name in PEERS if (value := getattr(args, name.replace("-", "_")))]
    yield "peers", ["peers.py", "--requests", "0", *load, *peers]
    yield "engine", ["engine.py", *load, "--concurrency", "1", "8", "32"]
    yield "over_http", ["over_http.py", *load, "--concurrency", "8", "32"]
    yield "sampling", ["engine.py", *load, "--concurrency", "32", "--sampling", '{"temperature": 0.8, "top_p": 0.95}']
    served = ["serve.py", "--url", f"http://127.0.0.1:{PORT}", "--model", "smollm2", *load]
    served += ["--extra-body", '{"ignore_eos": true}', "--concurrency"]
    yield "http-all", [*served, str(CLIENTS)]
    yield "http-fewer", [*served, str(CLIENTS - SLOW)]
    yield "http-slow", [*served, str(CLIENTS - SLOW), "--slow-clients", str(SLOW)]
    yield "step", ["step.py", *repeats]
    yield "operations", ["step.py", *repeats, "--by-operation"]
    yield "scheduler", ["step.py", *repeats, "--scheduler", "--batch", "256"]
    yield "protocol", ["protocol.py", *repeats]
    yield "start", ["start.py", *repeats]
    yield "long", ["long.py", *repeats]
    yield "speculation", ["speculation.py", *repeats]
    if args.texts:
        yield "quality", ["quality.py", *map(str, args.texts)]


PEERS = ("openvino", "llama-server", "transformers", "vllm", "directory")


def run(name: str, command: Sequence[str], directory: Path) -> bool:
    """Run one program; whether it went well."""
    print(f"=== {name}: {' '.join(command)}", flush=True)
    began = time.monotonic()
    with (directory / f"{name}.txt").open("w") as output:
        done = subprocess.run(
            [sys.executable, str(HERE / command[0]), *command[1:], "--json", str(directory / f"{name}.json")],
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    print((directory / f"{name}.txt").read_text(), end="")
    print(f"--- {name}: {time.monotonic() - began:.0f} s, exit code {done.returncode}", flush=True)
    return done.returncode == 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="a directory for tables and JSON")
    parser.add_argument("--figures", type=Path, help="a directory for the figures; none are drawn without")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="begin no more runs of the same after so long")
    parser.add_argument("--only", nargs="+", help="names of what is to be measured")
    parser.add_argument(
        "--texts", type=Path, nargs="*", default=[], help="for bench/quality.py, which else is left out"
    )
    for name in PEERS:
        parser.add_argument(f"--{name}", help="as of bench/peers.py")
    return parser.parse_args(argv)


def main() -> int:
    args = parse(None)
    args.results.mkdir(parents=True, exist_ok=True)
    print(machine())
    chosen = [(name, command) for name, command in tasks(args) if args.only is None or name in args.only]
    failed = []
    over_http = [task for task in chosen if task[0].startswith("http-")]
    for name, command in chosen:
        if name.startswith("http-"):
            if over_http:
                failed += measure_http(over_http, args.results)
                over_http = []
        elif not run(name, command, args.results):
            failed.append(name)
    if args.figures is not None:
        subprocess.run([sys.executable, str(HERE / "plot.py"), str(args.results), str(args.figures)], check=True)
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return int(bool(failed))


def measure_http(chosen: Sequence[Task], directory: Path) -> list[str]:
    """Run what needs a server, with one; the names of what failed."""
    command = [sys.executable, "-m", "trio_llm.cli.main", "serve", "smollm2", "--port", PORT]
    try:
        with serving(command, f"http://127.0.0.1:{PORT}/health/ready", directory / "server.log"):
            return [name for name, program in chosen if not run(name, program, directory)]
    except DoesNotServe as error:
        print(error)
        return [name for name, _ in chosen]


if __name__ == "__main__":
    sys.exit(main())
