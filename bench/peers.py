"""Ours and its peers in one run: `python bench/peers.py --openvino venv/bin/python --llama-server build/bin/llama-server`.

Each is started, measured and stopped in turn, with the same prompts and the same file of weights, as often as
`--rounds` says; the table has the medians of all rounds and the ratios of ours to each.  A peer
is measured if it is named.  docs/benchmarks.md tells how to install them.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
from serve import machine

from trio_llm.models.catalogue import resolve

HERE = Path(__file__).parent
OURS = "trio_llm"


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
        """One round: the results of all concurrencies."""
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "out.json"
            options = ["--json", str(report), "--seed", str(args.seed), "--repeats", str(args.repeats)]
            options += ["--prompt-tokens", str(args.prompt_tokens), "--max-tokens", str(args.max_tokens)]
            options += ["--requests", str(args.requests), "--concurrency", *map(str, args.concurrency)]
            if self.port is None:
                subprocess.run([*self.command, *options], check=True)
            else:
                options += ["--url", f"http://127.0.0.1:{self.port}", "--model", self.model]
                options += ["--extra-body", orjson.dumps(dict(self.extra_body)).decode()]
                with self.serving(Path(directory) / "server.log"):
                    subprocess.run([sys.executable, str(HERE / "serve.py"), *options], check=True)
            results: list[dict[str, Any]] = orjson.loads(report.read_bytes())["results"]
            return results

    @contextlib.contextmanager
    def serving(self, log: Path) -> Iterator[None]:
        """Its server, from ready to stopped.

        Raises:
            SystemExit: it ended before it was ready, or was not within five minutes.
        """
        with log.open("w") as output:
            server = subprocess.Popen(self.command, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 300
            while not self._is_ready():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{self.name} does not serve:\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self.ready}", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


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
    return found


def combine(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> dict[int, dict[str, list[float]]]:
    """Of each concurrency the figures of all repeats of all rounds."""
    figures: dict[int, dict[str, list[float]]] = {}
    for results in rounds:
        for result in results:
            columns = figures.setdefault(result["concurrency"], {})
            for repeat in result["repeats"]:
                for name, value in repeat.items():
                    columns.setdefault(name, []).append(value)
    return figures


def table(measured: Mapping[str, Mapping[int, Mapping[str, Sequence[float]]]]) -> str:
    """Medians with their spread, and the ratio of ours to each peer."""
    lines = ["| | clients | output tokens/s | ours is | TTFT p50 ms | ITL p50 ms |", "|---|--:|--:|--:|--:|--:|"]
    for name, figures in measured.items():
        for concurrency, columns in figures.items():
            speeds = columns["output_tokens_per_s"]
            ours = statistics.median(measured[OURS][concurrency]["output_tokens_per_s"])
            ratio = "" if name == OURS else f"{ours / statistics.median(speeds):.2f} times"
            speed = f"{statistics.median(speeds):.1f} [{min(speeds):.1f}-{max(speeds):.1f}]"
            ttft, itl = (statistics.median(columns[column]) for column in ("ttft_p50_ms", "itl_p50_ms"))
            lines.append(f"| {name} | {concurrency} | {speed} | {ratio} | {ttft:.0f} | {itl:.1f} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="ours serves it; a catalogue name")
    parser.add_argument("--gguf", type=Path, help="the same weights for those that read a GGUF file")
    parser.add_argument("--directory", help="the same weights for transformers serve")
    parser.add_argument("--ours", default="", help="further arguments for trio-llm serve, in one string")
    parser.add_argument("--openvino", help="a Python that has openvino-genai, orjson, trio and attrs")
    parser.add_argument("--llama-server", help="the program")
    parser.add_argument("--transformers", help="the program, of an environment with transformers[serving]")
    parser.add_argument("--threads", type=int, default=machine()["cores"], help="of llama.cpp")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=0, help="of one run; default: 4 a client, at least 8")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="of each concurrency in each round")
    parser.add_argument("--prompt-tokens", type=int, default=110)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser.parse_args(argv)


def main() -> None:
    args = parse(None)
    contestants = peers(args)
    rounds: dict[str, list[Any]] = {peer.name: [] for peer in contestants}
    for _ in range(args.rounds):
        for peer in contestants:
            print(f"--- {peer.name}", flush=True)
            rounds[peer.name].append(peer.measure(args))
    measured = {name: combine(results) for name, results in rounds.items()}
    print(table(measured))
    load = max(value for figures in measured.values() for c in figures.values() for value in c["load_average_before"])
    print(f"load average before a run at most {load:.2f}")
    if args.json is not None:
        document = {"machine": machine(), "measured": measured}
        args.json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))


if __name__ == "__main__":
    main()
