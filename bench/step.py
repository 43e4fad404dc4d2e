"""Where the milliseconds of a decode step go: `python bench/step.py --model smollm2`.

The core runs alone in this thread, without Trio and text.  Every part of a step is timed by the
function that does it; a part's time is its own, without that of the parts inside it.  Beside the step, on
Trio's thread, its outputs are handed over to their readers (bench/hand_over.py).
`--by-operation` computes layer by layer what is otherwise one call for all layers, to see what they consist of;
`--scheduler` puts an executor without a model in its place, to see what all but the model costs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
import trio
from hand_over import hand_over
from report import arguments, look, note, quiet, repeats, spread, write

from trio_llm.config import EngineSettings
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.request import Request
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import StepPlan, StepResult
from trio_llm.engine.loading import load_core
from trio_llm.engine.simulation import ByteTokenizer


class Instant(FakeExecutor):
    """Answers at once, so that what is left is the rest of the engine."""

    def collect(self, handle: StepPlan) -> StepResult:
        return StepResult(tuple((1,) if row.sample else () for row in handle.rows))


class Parts:
    """Own times of named functions, nested or not."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Count what runs inside under a name."""
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds[name] += took - self._inner.pop()
            self._inner[-1] += took

    def watch(self, owner: Any, method: str, name: str | Callable[..., str]) -> None:
        """Time a method of an object or of a class, under a name or one that depends on its arguments."""
        if not hasattr(owner, method):
            return
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.time(name if isinstance(name, str) else name(*args, **kwargs)):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


def watch_everything(parts: Parts, core: EngineCore) -> None:
    """The parts of a step, from the schedule to the outputs."""
    parts.watch(core.scheduler, "schedule", "schedule")
    parts.watch(core.scheduler, "update", "commit")
    executor: Any = core.executor
    parts.watch(executor, "launch", "launch: tables and packing")
    parts.watch(executor, "collect", "collect: rows, sampling, log-probabilities")
    model = getattr(executor, "_model", None)
    if model is None:
        return
    from trio_llm.core import torch_executor
    from trio_llm.core.kernels import Kernels

    parts.watch(model, "forward", "forward: tensors of the step")
    parts.watch(model, "_forward", "forward: the model between its kernels")
    parts.watch(model.backend, "begin_step", "attention: metadata")
    parts.watch(torch_executor, "sample", "sampling")
    parts.watch(Kernels, "linear", lambda _, layer, rows: f"kernel: linear, {layer.inputs} to {layer.outputs}")
    for method in ("attend", "decoders", "draw"):
        parts.watch(Kernels, method, f"kernel: {method}")


def make_core(args: argparse.Namespace) -> tuple[EngineCore, Any]:
    """An engine for as many sequences as the largest batch, and a tokenizer."""
    size = max(args.batch)
    settings = EngineSettings(
        **{"max_num_seqs": size, "max_num_batched_tokens": max(512, 2 * size), "credit_window": 2**20, **args.settings}
    )
    if args.scheduler:
        info = ExecutorInfo(num_blocks=64 * size, block_size=16, vocab_size=512, max_model_len=4096)
        return EngineCore(Instant(info), settings), ByteTokenizer()
    if args.by_operation:
        from trio_llm.core.model import PagedModel

        PagedModel.fuse_layers = lambda model: 0  # type: ignore[assignment,method-assign]
    model, core = load_core(args.model, None, settings)
    return core, model.tokenizer


def measure(core: EngineCore, parts: Parts, batch: int, run: int, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step of `batch` sequences, by part: medians of the steps of one run."""
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **args.sampling})
    total = args.context + args.steps + 8
    for index in range(batch):
        resolved = params.resolved(SamplingParams(), max_tokens=total, seed=index)
        prompt = [(index * 31 + place) % 400 + 5 for place in range(args.context)]
        core.add(Request(f"{batch} {run} {index}", prompt, resolved))
    while any(len(s.token_ids) == args.context for r in core._requests.values() for s in r.sequences):
        core.step()
    for _ in range(4):
        core.step()
    steps: list[dict[str, float]] = []
    for _ in range(args.steps):
        parts.seconds.clear()
        with parts.time("between the parts"):
            core.step()
        steps.append({name: 1e3 * seconds for name, seconds in parts.seconds.items()})
    for index in range(batch):
        core.finish(f"{batch} {run} {index}")
    names = sorted({name for step in steps for name in step})
    found = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
    return {"the step": statistics.median(sum(step.values()) for step in steps), **found}


Runs = Mapping[int, Sequence[Mapping[str, float]]]
"""Of each batch the figures of its runs."""


def median(runs: Sequence[Mapping[str, float]], name: str) -> float:
    """Of a part that not every step may have."""
    return statistics.median(run.get(name, 0.0) for run in runs)


def table(results: Runs) -> str:
    """A column for each batch: medians of the runs, with the spread of the whole; the largest part comes first."""
    names = {name for runs in results.values() for run in runs for name in run if not name.endswith("_before")}
    last = list(results.values())[-1]
    ordered = sorted(names - {"the step"}, key=lambda name: -median(last, name))
    lines = [f"| ms | {' | '.join(map(str, results))} |", f"|---|{'--:|' * len(results)}"]
    wholes = (spread([run["the step"] for run in runs], ".2f") for runs in results.values())
    lines.append(f"| the step | {' | '.join(wholes)} |")
    lines += [
        f"| {name} | {' | '.join(f'{median(runs, name):.2f}' for runs in results.values())} |" for name in ordered
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=50, help="of a run")
    parser.add_argument("--by-operation", action="store_true", help="layers are not one call, but all that is in them")
    parser.add_argument("--scheduler", action="store_true", help="no model: what all else costs")
    parser.add_argument("--sampling", type=orjson.loads, default={}, help="a JSON object of sampling parameters")
    parser.add_argument("--settings", type=orjson.loads, default={}, help="a JSON object of engine settings")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict[int, list[dict[str, float]]]:
    """Measure, print and write."""
    core, tokenizer = make_core(args)
    parts = Parts()
    watch_everything(parts, core)
    results: dict[int, list[dict[str, float]]] = {batch: [] for batch in args.batch}
    for batch, runs in results.items():
        for number in repeats(args):
            before = look()
            figures = measure(core, parts, batch, number, args)
            figures["beside it: hand over"] = trio.run(hand_over, tokenizer, batch, args.steps)
            runs.append({**figures, **before})
    core.close()
    idle = quiet(each for runs in results.values() for each in runs)
    print(table(results))
    print(f"{note(idle)}; medians of {args.repeats} runs, each the median of {args.steps} steps")
    write(args, results, idle=idle)
    return results


if __name__ == "__main__":
    run(parse(None))
