"""What every program here says beside its figures: the machine, whether it was idle, the spread; and its JSON."""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

LOOK = 0.25
"""Seconds over which the other programs are watched before a run."""
BUSY = 0.1
"""Cores that other programs may use on a machine that is called idle."""

Figures = Mapping[str, float]


def machine() -> dict[str, Any]:
    """What this machine is; the versions are those beside this program, not a server's."""
    cpu = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    versions = {"python": platform.python_version()}
    for name in ("trio-llm", "trio", "torch", "transformers"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    found = {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "system": platform.platform(), "versions": versions}
    torch = sys.modules.get("torch")  # a program that has not imported it measured no GPU
    return {**found, "gpu": torch.cuda.get_device_name()} if torch and torch.cuda.is_available() else found


def look() -> dict[str, float]:
    """What else the machine does, just before a run: cores that other programs use, and the load average.

    A server under test counts as another program, and does nothing then.  The load average remembers the run before;
    the cores do not.
    """
    return {"cores_busy_before": _cores_busy(LOOK), "load_average_before": os.getloadavg()[0]}


def _cores_busy(seconds: float) -> float:
    """Cores that others than this process use; not a number where that cannot be known."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return math.nan

    def used() -> float:
        user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
        ticks = user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])

    before, began = used(), time.monotonic()
    time.sleep(seconds)
    return max(0.0, (used() - before) / max(time.monotonic() - began, 1e-9))


def quiet(looks: Iterable[Figures]) -> dict[str, Any]:
    """Whether the machine was idle before all runs, for the JSON and for `note`."""
    looks = list(looks)
    busy, load = (max(each[name] for each in looks) for name in ("cores_busy_before", "load_average_before"))
    return {"is_idle": not busy > BUSY, "cores_busy_before": busy, "load_average_before": load}


def note(idle: Mapping[str, Any]) -> str:
    """The same in words."""
    busy, load = idle["cores_busy_before"], idle["load_average_before"]
    words = f"other programs used at most {busy:.2f} cores before a run"
    if math.isnan(busy):
        words = "what other programs did is not known"
    verdict = "the machine was idle" if idle["is_idle"] else "THE MACHINE WAS NOT IDLE, do not trust these figures"
    return f"{verdict}: {words}; load average at most {load:.2f}"


def spread_of(repeats: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """Of each figure of several runs the median, the lowest and the highest."""
    columns = {name: [repeat[name] for repeat in repeats] for name in repeats[0]}
    return {
        name: {"median": statistics.median(values), "low": min(values), "high": max(values)}
        for name, values in columns.items()
    }


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Several values in a cell of a table: median [lowest-highest]."""
    return f"{statistics.median(values):{form}} [{min(values):{form}}-{max(values):{form}}]"


def repeats(args: argparse.Namespace) -> Iterator[int]:
    """The numbers of the runs of the same thing: `--repeats` of them, or fewer where `--seconds` are over."""
    began = time.monotonic()
    for repeat in range(args.repeats):
        if repeat and args.seconds and time.monotonic() - began > args.seconds:
            return
        yield repeat


def arguments(
    description: str | None, *, repeats: int | None = 5, epilog: str | None = None
) -> argparse.ArgumentParser:
    """A parser with the arguments that all programs here have.

    Args:
        description: the program's docstring, of which the first line is shown.
        repeats: runs by default; None: there is nothing to repeat.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0], epilog=epilog)
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="runs of each, of which the median is told")
        parser.add_argument("--seconds", type=float, default=0.0, help="begin no more runs of the same after so long")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--label", default="", help="what is measured, for the JSON")
    return parser


def write(args: argparse.Namespace, results: Any, *, idle: Mapping[str, Any] | None = None) -> None:
    """Write figures, settings and machine where `--json` says, if it does.

    Args:
        idle: what `quiet` says; None where speed is not measured.
    """
    if args.json is None:
        return
    settings = {name: value for name, value in vars(args).items() if name not in ("api_key", "json")}
    document = {"settings": settings, "machine": machine(), "idle": idle, "results": results}
    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
    args.json.write_bytes(orjson.dumps(document, option=options, default=str))
