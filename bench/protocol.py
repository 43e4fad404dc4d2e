"""What the server costs beside the model: `python bench/protocol.py --model smollm2`.

Each part of a request's and of a token's way is run by itself, many times (bench/protocol_parts.py); then the same
streams are read in process, from the application without Hypercorn, and over real sockets, from an engine that
needs no weights (bench/protocol_streams.py).  Times are of one processor, unless the name says otherwise.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence

import trio
from protocol_parts import parts
from protocol_streams import INFO, streams
from report import arguments, look, note, quiet, write

from trio_llm.config import ServerSettings
from trio_llm.core.executor import FakeExecutor
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.simulation import FakeModel
from trio_llm.models.loader import load_model
from trio_llm.server import logs


def table(found: Mapping[str, Sequence[float]]) -> str:
    """Microseconds, or what else the name says, as Markdown."""
    lines = ["| µs, or what is said | median | lowest | highest |", "|---|--:|--:|--:|"]
    lines += [
        f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |"
        for name, values in found.items()
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and template are used")
    parser.add_argument("--size", type=int, default=2048, help="bytes of a request")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=10.0, help="that a step takes, in which nothing is computed")
    return parser.parse_args(argv)


async def run(args: argparse.Namespace) -> dict[str, list[float]]:
    """Measure, print and write."""
    logs.configure(ServerSettings(log_level="error"))
    tokenizer = load_model(args.model).tokenizer
    looks = [look()]
    async with open_engine(FakeModel(), executor=FakeExecutor(INFO)) as engine:
        found = await parts(engine, tokenizer, args.size)
    looks.append(look())
    found |= await streams(args.streams, args.tokens, args)
    print(table(found))
    print(note(quiet(looks)))
    write(args, found, idle=quiet(looks))
    return found


if __name__ == "__main__":
    trio.run(run, parse(None))
