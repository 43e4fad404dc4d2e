"""Ours and its peers in one run: `python bench/peers.py --openvino venv/bin/python --llama-server build/bin/llama-server`.

Each is started, measured and stopped in turn, with the same prompts and the same weights, as often as
`--rounds` says; the table has the medians of all rounds and the ratios of ours to each.  A peer is measured
if it is named and there; who is not is said.  docs/benchmarks.md tells how to install them.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
from load import add_arguments
from processes import DoesNotServe, serving
from report import arguments, machine, note, quiet, spread, write

from trio_llm.models.catalogue import resolve

HERE = Path(__file__).parent
OURS = "trio_llm"

Rounds = dict[int, dict[str, list[float]]]
"""Of each concurrency, of each figure, the values of all runs."""


@attrs.frozen
class Peer:
    """How one is started and measured."""

    name: str
    command: Sequence[str]
    """Of its server; for a peer in process, of the program that measures it."""
    port: int | None = None
    model: str = ""
    """What its server calls the model."""
    ready: str = "/health"
    """A path that is 200 when it serves."""
    extra_body: Mapping[str, Any] = attrs.Factory(dict)

    def measure(self, args: argparse.Namespace) -> list[dict[str, Any]]:
        """One round: the results of all concurrencies.

        Raises:
            DoesNotServe: it cannot be measured.
        """
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "out.json"
            options = ["--json", str(report)]
            for name in ("seed", "repeats", "seconds", "prompt_tokens", "max_tokens", "requests"):
                options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
            options += ["--concurrency", *map(str, args.concurrency)]
            if self.port is None:
                subprocess.run([*self.command, *options], check=False)
            else:
                url = f"http://127.0.0.1:{self.port}"
                options += ["--url", url, "--model", self.model]
                options += ["--extra-body", orjson.dumps(dict(self.extra_body)).decode()]
                with serving(self.command, url + self.ready, Path(directory) / "server.log"):
                    subprocess.run([sys.executable, str(HERE / "serve.py"), *options], check=False)
            if not report.exists():
                raise DoesNotServe("it could not be measured")
            results: list[dict[str, Any]] = orjson.loads(report.read_bytes())["results"]
            return results


def peers(args: argparse.Namespace) -> list[Peer]:
    """Ours, and those that were named."""
    found = [
        Peer(
            OURS,
            [sys.executable, "-m", "trio_llm.cli.main", "serve", args.model, "--port", "8101", *shlex.split(args.ours)],
            port=8101,
            model=args.model,
            ready="/health/ready",
            extra_body={"ignore_eos": True},
        )
    ]
    gguf = str(args.gguf or resolve(args.model))
    if args.openvino:
        found.append(Peer("openvino-genai", [args.openvino, str(HERE / "peer_openvino.py"), "--gguf", gguf]))
    if args.llama_server:
        slots = max(args.concurrency)
        context = slots * (args.prompt_tokens + args.max_tokens + 128)
        command = [args.llama_server, "-m", gguf, "--port", "8102", "-t", str(args.threads), "-np", str(slots)]
        command += ["-tb", str(args.threads), "-c", str(context), "--no-webui", "--cache-ram", "0"]
        body = {"ignore_eos": True, "cache_prompt": False}
        found.append(Peer("llama.cpp", command, port=8102, model="any", extra_body=body))
    if args.transformers:
        command = [args.transformers, "serve", args.directory, "--continuous-batching", "--device", "cpu"]
        command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", "8103"]
        # it refuses ignore_eos
        own = {"generation_config": '{"do_sample": false, "eos_token_id": -1}'}
        found.append(Peer("transformers serve", command, port=8103, model=args.directory, extra_body=own))
    if args.vllm:
        command = [args.vllm, "serve", args.directory, "--dtype", "float32", "--host", "127.0.0.1", "--port", "8104"]
        body = {"ignore_eos": True}
        found.append(Peer("vllm", command, port=8104, model=args.directory, extra_body=body))
    return found


def combine(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> Rounds:
    """Of each concurrency the figures of all repeats of all rounds."""
    figures: Rounds = {}
    for results in rounds:
        for result in results:
            columns = figures.setdefault(result["concurrency"], {})
            for repeat in result["repeats"]:
                for name, value in repeat.items():
                    columns.setdefault(name, []).append(value)
    return figures


def table(measured: Mapping[str, Rounds]) -> str:
    """Medians with their spread, and the ratio of ours to each peer."""
    lines = [
        "| | clients | runs | output tokens/s | ours is | TTFT p50 ms | ITL p50 ms | errors |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, figures in measured.items():
        for concurrency, columns in figures.items():
            speeds = columns["output_tokens_per_s"]
            ours = statistics.median(measured[OURS][concurrency]["output_tokens_per_s"])
            ratio = "" if name == OURS else f"{ours / statistics.median(speeds):.2f} times"
            ttft, itl = (statistics.median(columns[column]) for column in ("ttft_p50_ms", "itl_p50_ms"))
            cells = [name, str(concurrency), str(len(speeds)), spread(speeds), ratio, f"{ttft:.0f}", f"{itl:.1f}"]
            cells.append(f"{sum(columns['errors']):.0f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2", help="ours serves it; a catalogue name")
    parser.add_argument("--gguf", type=Path, help="the same weights for those that read a GGUF file")
    parser.add_argument("--directory", help="the same weights for transformers serve and vllm")
    parser.add_argument("--ours", default="", help="further arguments for trio-llm serve, in one string")
    parser.add_argument("--openvino", help="a Python that has openvino-genai, orjson and attrs")
    parser.add_argument("--llama-server", help="the program")
    parser.add_argument("--transformers", help="the program, of an environment with transformers[serving]")
    parser.add_argument("--vllm", help="the program, of an environment with vLLM's build for the CPU")
    parser.add_argument("--threads", type=int, default=machine()["cores"], help="of llama.cpp")
    parser.add_argument("--rounds", type=int, default=1)
    add_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("openvino", "llama_server", "transformers", "vllm"):
        program = getattr(args, name)
        if program is None or shutil.which(program) is None:
            setattr(args, name, None)
            why = "not named" if program is None else f"there is no program {program}"
            print(f"not measured: --{name.replace('_', '-')} ({why})", file=sys.stderr)
    if (args.transformers or args.vllm) and not args.directory:
        parser.error("transformers serve and vllm need --directory")
    return args


def main() -> None:
    args = parse(None)
    rounds: dict[str, list[Any]] = {}
    for _ in range(args.rounds):
        for peer in peers(args):
            print(f"--- {peer.name}", flush=True)
            try:
                rounds.setdefault(peer.name, []).append(peer.measure(args))
            except DoesNotServe as error:
                if peer.name == OURS:
                    raise SystemExit(f"{peer.name} does not serve:\n{error}") from None
                print(f"{peer.name} does not serve:\n{error}", file=sys.stderr)
    measured = {name: combine(results) for name, results in rounds.items() if results}
    idle = quiet(repeat for results in rounds.values() for each in results for row in each for repeat in row["repeats"])
    print(table(measured))
    print(f"{note(idle)}; median of {args.repeats * args.rounds} runs [low-high], of fewer where `runs` says so")
    write(args, measured, idle=idle)


if __name__ == "__main__":
    main()
