"""Hundreds of seeds of traffic and faults; that they replay; and that enough happens in them.

python -m tests.simulation --seed 17              plays one seed again
python -m tests.simulation --seeds 0 100000       plays many, on all cores
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from trio_llm.core.block_pool import BlockPool
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.prefix_cache import PrefixCache
from trio_llm.core.queues import Queues

from .replay import replayable
from .simulation import Totals, simulate
from .traffic import NUM_REQUESTS, POISONS

ROOT = Path(__file__).parents[2]
NUM_SEEDS = 300
AT_LEAST = 1000
"""Times that each of these must have happened in all seeds together."""

EXITS = [
    "end: end token",
    "end: stop token",
    "end: stop string",
    "end: length",
    "end: form",
    "deadline",
    "cancelled",
    "cancelled before it is let in",
    "abort",
    "abort by id",
    "abort twice",
    "abort before it is let in",
    "abort while it is queued",
    "left early",
    "an exception in the block",
    "stalled",
    "refused: queued requests",
    "refused: queued tokens",
    "refused: too long",
    "refused: id in use",
    "refused: form",
    "refused: draining",
    "refused: dead",
    "closed in flight",
    "died in flight",
    *(f"failed: {kind}" for kind in POISONS),
]
FAULTS = [
    "launch raises once",
    "collect raises once",
    "CUDA out of memory",
    "CPU out of memory",
    "row raises",
    "row runs out of memory",
    "row is not finite",
    "processor raises",
    "admit raises",
    "a step of the draft model raises",
]
EVENTS = [
    "preemptions",
    "steps beside a paused sequence",
    "cache_hits",
    "accepted_drafts",
    "draft_model_forwards",
    "wasted_tokens",
]


def test_any_traffic_with_any_faults() -> None:
    totals = Totals()
    for seed in range(NUM_SEEDS):
        try:
            totals.add(simulate(seed))
        except BaseException:
            print(f"\nseed {seed}; replay: python -m tests.simulation --seed {seed}", file=sys.stderr)  # noqa: T201
            raise
    assert totals.events["requests"] >= 200 * NUM_SEEDS
    rare = {
        name: counter[name]
        for counter, names in ((totals.doors, EXITS), (totals.faults, FAULTS), (totals.events, EVENTS))
        for name in names
        if counter[name] < AT_LEAST
    }
    assert not rare, f"happened less than {AT_LEAST} times"
    assert totals.doors.keys() == set(EXITS) and totals.faults.keys() == set(FAULTS), "a door or fault is not counted"
    assert min(totals.events[f"engine: {end}"] for end in ("finish", "close", "die")) > 20


def test_a_seed_plays_the_same_again() -> None:
    first: list[object] = []
    second: list[object] = []
    simulate(7, first)
    simulate(7, second)
    assert len(first) > NUM_REQUESTS
    assert first == second
    other: list[object] = []
    simulate(8, other)
    assert other != first


def test_a_seed_plays_the_same_in_another_process() -> None:
    """Where strings have other hashes and objects other addresses."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", "7", "--digest"]
    digests = {
        subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_trio_can_be_made_to_replay() -> None:
    """The private parts of Trio that `replayable` needs do what they did."""

    def order(seed: int) -> list[int]:
        order = []

        async def task(number: int) -> None:
            for _ in range(3):
                await trio.lowlevel.checkpoint()
                order.append(number)

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(task, number)

        with replayable(Random(seed)):
            trio.run(main)
        return order

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) == 5


def free_too_little(free: Any) -> Any:
    return lambda self, table: free(self, table[1:] if len(table) > 3 else table)


def find_what_is_not_there(_: Any) -> Any:
    return lambda self, sequence, count: [bytes([position]) for position in range(count)]


def be_deaf_to_some(finish: Any) -> Any:
    return lambda self, name, index=None: None if name.endswith("3") else finish(self, name, index)


def lose_credit(acknowledge: Any) -> Any:
    return lambda self, name, index, count: acknowledge(self, name, index, count - 1)


def let_the_last_in_first(_: Any) -> Any:
    return lambda self: max((entry for entry in self._waiting if not entry[-1].is_finished), default=[None])[-1]


@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (BlockPool, "free", free_too_little),
        (PrefixCache, "_hashes", find_what_is_not_there),
        (Queues, "first_waiting", let_the_last_in_first),
        (EngineCore, "finish", be_deaf_to_some),
        (EngineCore, "acknowledge", lose_credit),
    ],
)
def test_a_defect_is_found(owner: type, name: str, defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation sees what it is there to see."""
    monkeypatch.setattr(owner, name, defect(getattr(owner, name)))
    found = False
    for seed in range(20):
        try:
            simulate(seed)
        except Exception:
            found = True
            break
    assert found
