"""The figures of docs/benchmarks.md from what the programs here wrote: `python bench/plot.py results docs/figures`.

Needs matplotlib (the dependency group `bench`).  The same results give the same files.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

Results = Mapping[str, Any]
"""What a program wrote: settings, machine, idle, results."""

GREY = "#666666"


def new(title: str, x: str, y: str, *, number: int = 1) -> tuple[Any, Any]:
    """An empty figure of so many axes beside each other."""
    import matplotlib as mpl

    mpl.use("svg")
    # ids and text that are the same whenever and wherever it is drawn
    style: Any = {"svg.hashsalt": "trio_llm", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
    style |= {"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False}
    mpl.rcParams.update(style)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 if number == 1 else 8.0, 3.4), layout="constrained", facecolor="white")
    axes = figure.subplots(1, number, squeeze=False)[0]
    figure.suptitle(title)
    for each in axes:
        each.set_xlabel(x)
        each.set_ylabel(y)
    return figure, axes


def lines(axis: Any, measured: Mapping[str, Any], column: str) -> None:
    """A figure against the number of clients, a line for each server, with the spread."""
    for name, by_clients in measured.items():
        clients = sorted(by_clients, key=int)
        values = [by_clients[count][column] for count in clients]
        middle = [statistics.median(each) for each in values]
        below = [centre - min(each) for centre, each in zip(middle, values, strict=True)]
        above = [max(each) - centre for centre, each in zip(middle, values, strict=True)]
        axis.errorbar([int(count) for count in clients], middle, yerr=[below, above], marker="o", capsize=3, label=name)
    axis.set_xscale("log", base=2)
    counts = sorted({int(count) for by_clients in measured.values() for count in by_clients})
    axis.set_xticks(counts, [str(count) for count in counts])


def output_rate(peers: Results) -> Any:
    """Output tokens a second against the number of clients, for us and the peers."""
    figure, (axis,) = new("Output, all clients together", "clients", "tokens/s")
    lines(axis, peers["results"], "output_tokens_per_s")
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


def latency(peers: Results) -> Any:
    """Times to the first token and between tokens against the number of clients."""
    figure, axes = new("Time that a client waits, medians", "clients", "ms", number=2)
    for axis, column, what in zip(
        axes, ("ttft_p50_ms", "itl_p50_ms"), ("for the first token", "between two tokens"), strict=True
    ):
        lines(axis, peers["results"], column)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.set_title(what)
    axes[0].legend()
    return figure


def step(steps: Results) -> Any:
    """What a decode step's milliseconds go to, by number of sequences."""
    figure, (axis,) = new("A decode step", "ms", "sequences")
    batches = {
        batch: {
            name: statistics.median(run.get(name, 0.0) for run in runs)
            for name in {name for run in runs for name in run}
            if not name.endswith("_before") and name != "the step" and not name.startswith("beside")
        }
        for batch, runs in steps["results"].items()
    }
    last = batches[max(batches, key=int)]
    ordered = sorted(last, key=lambda name: -last[name])
    shown, rest = ordered[:5], ordered[5:]
    places = range(len(batches))
    left = [0.0] * len(batches)
    for name in [*shown, "all else"]:
        widths = [
            parts.get(name, 0.0) if name in shown else sum(parts.get(other, 0.0) for other in rest)
            for parts in batches.values()
        ]
        axis.barh(places, widths, left=left, label=name)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axis.set_yticks(places, list(batches))
    axis.legend(fontsize=7)
    return figure


def prefill(long: Results) -> Any:
    """Prompt tokens a second against the length of the prompt."""
    figure, (axis,) = new("Prefill of one prompt", "tokens of the prompt", "tokens/s")
    lengths = {
        int(name.removeprefix("prefill_")): values
        for name, values in long["results"].items()
        if name.startswith("prefill_")
    }
    middle = [statistics.median(values) for values in lengths.values()]
    spread = [
        [centre - min(values) for centre, values in zip(middle, lengths.values(), strict=True)],
        [max(values) - centre for centre, values in zip(middle, lengths.values(), strict=True)],
    ]
    axis.errorbar(list(lengths), middle, yerr=spread, marker="o", capsize=3)
    for share in (0.5, 0.3):
        axis.axhline(share * middle[0], color=GREY, linestyle=":", linewidth=1)
        axis.annotate(f"{share} of the first", (max(lengths), share * middle[0]), ha="right", va="bottom", color=GREY)
    axis.set_xticks(list(lengths))
    axis.set_ylim(bottom=0)
    return figure


FIGURES: Mapping[str, tuple[str, Callable[[Results], Any]]] = {
    "output": ("peers.json", output_rate),
    "latency": ("peers.json", latency),
    "step": ("step.json", step),
    "prefill": ("long.json", prefill),
}
"""Of each figure the file that it is drawn from."""


def draw(results: Path, figures: Path) -> list[Path]:
    """Draw those figures whose results are there."""
    figures.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, (source, make) in FIGURES.items():
        if not (results / source).exists():
            print(f"{name}: there is no {source}")
            continue
        figure = make(orjson.loads((results / source).read_bytes()))
        path = figures / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        # matplotlib leaves blanks at the ends of lines
        path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
        drawn.append(path)
    return drawn


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="a directory with peers.json, step.json and long.json")
    parser.add_argument("figures", type=Path, help="a directory to draw to")
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = parse(None)
    for drawn in draw(arguments.results, arguments.figures):
        print(drawn)
