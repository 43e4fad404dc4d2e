"""Where the milliseconds of a decode step go: `python bench/step.py --model smollm2`.

The core runs alone in this thread, without Trio and text.  Every part of a step is timed by the
function that does it; a part's time is its own, without that of the parts inside it.  Beside the step, on
Trio's thread, its outputs are handed over to their readers (bench/hand_over.py).
`--by-operation` computes layer by layer what is otherwise one call for all layers, to see what they consist of;
`--scheduler` puts an executor without a model in its place, to see what all but the model costs;
`--random llama-8b` a model of random weights, and tells how fast its steps read memory.

On a GPU a part's time is that of launching its kernels, and `collect` waits for all of them.  What the GPU takes
between the first and the last of a part's kernels is measured by events and told beside the parts.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import attrs
import orjson
import trio
from hand_over import hand_over
from random_model import FIGURES, SHAPES, Reading, copy_speed, random_model, weight_bytes
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
        self._events: list[tuple[str, Any, Any]] = []

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

    def watch_device(self, owner: Any, method: str, name: str, event: Callable[[], Any]) -> None:
        """Record an event before and after what a method launches; `event` makes one that can tell times."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            begin, end = event(), event()
            begin.record()
            try:
                return original(*args, **kwargs)
            finally:
                end.record()
                self._events.append((name, begin, end))

        setattr(owner, method, recorded)

    def device_times(self) -> dict[str, float]:
        """Milliseconds between the events since the last call, by name; waits for them."""
        times: defaultdict[str, float] = defaultdict(float)
        for name, begin, end in self._events:
            end.synchronize()
            times[name] += begin.elapsed_time(end)
        self._events.clear()
        return times


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
    import torch

    from trio_llm.core import torch_executor
    from trio_llm.core.kernels import Kernels

    parts.watch(model, "forward", "forward: tensors of the step")
    parts.watch(model, "_forward", "forward: the model between its kernels")
    parts.watch(model.backend, "begin_step", "attention: metadata")
    parts.watch(torch_executor, "sample", "sampling")
    parts.watch(Kernels, "linear", lambda _, layer, rows: f"kernel: linear, {layer.inputs} to {layer.outputs}")
    for method in ("attend", "decoders", "forward", "best", "draw"):
        parts.watch(Kernels, method, f"kernel: {method}")
    if model.device.type == "cuda":
        event = functools.partial(torch.cuda.Event, enable_timing=True)
        parts.watch_device(executor, "launch", "beside it: the GPU computes logits", event)
        parts.watch_device(torch_executor, "sample", "beside it: the GPU chooses tokens", event)


def make_core(args: argparse.Namespace) -> tuple[EngineCore, Any, Reading | None]:
    """An engine for as many sequences as the largest batch, a tokenizer, and of a random model what a step reads."""
    size = max(args.batch)
    # without a model all prompts are taken in one step: many would have ended before the last of many had begun
    budget = max(512, (args.context + 1 if args.scheduler else 2) * size)
    settings = EngineSettings(
        **{
            "max_num_seqs": size,
            "max_num_batched_tokens": budget,
            "credit_window": 2**20,
            **args.settings,
        }
    )
    if args.scheduler:
        info = ExecutorInfo(num_blocks=64 * size, block_size=16, vocab_size=512, max_model_len=4096)
        return EngineCore(Instant(info), settings), ByteTokenizer(), None
    if args.by_operation:
        from trio_llm.core.model import PagedModel

        PagedModel.fuse_layers = lambda model: 0  # type: ignore[assignment,method-assign]
    if args.random is None:
        model, core = load_core(args.model, None, settings)
        return core, model.tokenizer, None
    # weights are counted as they are made
    settings = attrs.evolve(settings, quantization="none")
    loaded = random_model(args.random, settings)
    weights, speed = weight_bytes(loaded.model), copy_speed(loaded.model.device)
    model, core = load_core(loaded, None, settings)
    paged = cast(Any, core.executor)._model
    return core, model.tokenizer, Reading(weights, paged.block_bytes // paged.backend.block_size, speed)


def lengths(core: EngineCore) -> list[int]:
    """Tokens of each sequence: a decode step attends to as many."""
    return [len(sequence.token_ids) for request in core._requests.values() for sequence in request.sequences]


def measure(
    core: EngineCore, parts: Parts, reading: Reading | None, batch: int, run: int, args: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of a step of `batch` sequences, by part, and what it reads: medians of the steps of one run."""
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **args.sampling})
    total = args.context + args.steps + 8
    for index in range(batch):
        resolved = params.resolved(SamplingParams(), max_tokens=total, seed=index)
        prompt = [(index * 31 + place) % 400 + 5 for place in range(args.context)]
        core.add(Request(f"{batch} {run} {index}", prompt, resolved))
    while args.context in lengths(core):
        core.step()
    for _ in range(4):
        core.step()
    steps: list[dict[str, float]] = []
    for _ in range(args.steps):
        before = lengths(core)
        assert len(before) == batch, "a sequence has ended before it was measured"
        parts.seconds.clear()
        parts.device_times()
        with parts.time("between the parts"):
            core.step()
        whole = sum(parts.seconds.values())
        read = {} if reading is None else reading.figures(sum(before), whole)
        times = {name: 1e3 * seconds for name, seconds in parts.seconds.items()}
        steps.append({"the step": 1e3 * whole, **times, **parts.device_times(), **read})
    for index in range(batch):
        core.finish(f"{batch} {run} {index}")
    names = sorted({name for step in steps for name in step})
    return {name: median(steps, name) for name in names}


Runs = Mapping[int, Sequence[Mapping[str, float]]]
"""Of each batch the figures of its runs."""


def median(runs: Sequence[Mapping[str, float]], name: str) -> float:
    """Of a part that not every run or step may have."""
    return statistics.median(run.get(name, 0.0) for run in runs)


def table(results: Runs) -> str:
    """A column for each batch: medians of the runs, with the spread of the whole; the largest part comes first."""
    names = {name for runs in results.values() for run in runs for name in run}
    names = {name for name in names if not name.endswith("_before") and name not in FIGURES}
    last = list(results.values())[-1]
    ordered = sorted(names - {"the step"}, key=lambda name: -median(last, name))
    lines = [f"| ms | {' | '.join(map(str, results))} |", f"|---|{'--:|' * len(results)}"]
    wholes = (spread([run["the step"] for run in runs], ".2f") for runs in results.values())
    lines.append(f"| the step | {' | '.join(wholes)} |")
    lines += [
        f"| {name} | {' | '.join(f'{median(runs, name):.2f}' for runs in results.values())} |" for name in ordered
    ]
    return "\n".join(lines)


def reading_table(results: Runs) -> str:
    """What a step must read and how fast it does, medians of the runs."""

    def row(words: str, cell: Callable[[Sequence[Mapping[str, float]]], str]) -> str:
        return f"| {words} | {' | '.join(cell(runs) for runs in results.values())} |"

    return "\n".join(
        [
            f"| sequences | {' | '.join(map(str, results))} |",
            f"|---|{'--:|' * len(results)}",
            row("GB that a step must read", lambda runs: f"{1e-9 * median(runs, 'bytes_read'):.2f}"),
            row("GB/s", lambda runs: f"{1e-9 * median(runs, 'bytes_per_second'):.0f}"),
            row("share of a copy's speed", lambda runs: spread([run["share_of_copy_speed"] for run in runs], ".2f")),
        ]
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--random", choices=SHAPES, help="random weights in this shape in place of a model's")
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
    core, tokenizer, reading = make_core(args)
    parts = Parts()
    watch_everything(parts, core)
    results: dict[int, list[dict[str, float]]] = {batch: [] for batch in args.batch}
    for batch, runs in results.items():
        for number in repeats(args):
            before = look()
            figures = measure(core, parts, reading, batch, number, args)
            figures["beside it: hand over"] = trio.run(hand_over, tokenizer, batch, args.steps)
            runs.append({**figures, **before})
    core.close()
    idle = quiet(each for runs in results.values() for each in runs)
    print(table(results))
    if reading is not None:
        print(f"\n{reading_table(results)}\n\na copy: {1e-9 * reading.copy_speed:.0f} GB/s, read and written")
    print(f"{note(idle)}; medians of {args.repeats} runs, each the median of {args.steps} steps")
    write(args, results, idle=idle)
    return results


if __name__ == "__main__":
    run(parse(None))
