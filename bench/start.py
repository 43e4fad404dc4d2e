"""How long `trio-llm serve` takes until it serves: `python bench/start.py --model smollm2`.

It is started again and again, from a cache that the first start, which does not count, has warmed.
"""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import orjson
from processes import DoesNotServe, stop
from report import arguments, look, note, quiet, repeats, spread, write

IMPORTS = "imports, in all"
REST = "from there to ready"
TARGET = 3.0
"""Seconds that REST may take."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def start(command: Sequence[str], port: int) -> dict[str, float]:
    """Start a server and stop it; seconds of each part.

    Raises:
        DoesNotServe: with what it said.
    """
    began = time.monotonic()
    server = subprocess.Popen(
        [*command, "--port", str(port), "--log-format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        # it listens before it loads, and after it has imported what the server needs
        while server.poll() is None:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.002)
        listening = time.monotonic() - began
        said = []
        loaded: dict[str, float] = {}
        assert server.stdout is not None
        for raw in server.stdout:
            line = raw.decode(errors="replace")
            said.append(line)
            if '"model loaded"' in line:
                loaded = orjson.loads(line)
            if re.search(r" is ready at .*\. Try:", line):
                ready = time.monotonic() - began
                imports = listening + loaded["import_seconds"]
                return {
                    "the server's imports, until it listens": listening,
                    "imports of torch and transformers": loaded["import_seconds"],
                    "weights and tokenizer": loaded["load_seconds"],
                    "KV memory, kernels, packing, probes": ready - imports - loaded["load_seconds"],
                    "ready": ready,
                    IMPORTS: imports,
                    REST: ready - imports,
                }
        raise DoesNotServe("".join(said)[-2000:])
    finally:
        stop(server)
        if server.stdout is not None:
            server.stdout.close()


def table(runs: Sequence[dict[str, float]]) -> str:
    """Medians with their spread."""
    names = [name for name in runs[0] if not name.endswith("_before")]
    lines = ["| seconds | median [lowest-highest] |", "|---|--:|"]
    return "\n".join([*lines, *(f"| {name} | {spread([run[name] for run in runs], '.2f')} |" for name in names)])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2")
    return parser.parse_args(argv)


def main() -> None:
    args = parse(None)
    command = [sys.executable, "-m", "trio_llm.cli.main", "serve", args.model]
    start(command, free_port())
    runs = []
    for _ in repeats(args):
        before = look()
        runs.append({**start(command, free_port()), **before})
    print(table(runs))
    print(f"{note(quiet(runs))}; median of {len(runs)} starts")
    slowest = max(run[REST] for run in runs)
    print(f"at most {slowest:.2f} s after the imports, of {TARGET:g}: {'well' if slowest <= TARGET else 'TOO LONG'}")
    write(args, runs, idle=quiet(runs))


if __name__ == "__main__":
    main()
