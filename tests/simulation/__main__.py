"""Play seeds by hand; see `test_simulation`."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor

from .simulation import Totals, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    seeds = parser.add_mutually_exclusive_group(required=True)
    seeds.add_argument("--seed", type=int, help="play one seed")
    seeds.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), help="play a range")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes for a range")
    parser.add_argument("--digest", action="store_true", help="print a digest of all that happens in the seed")
    options = parser.parse_args()
    if options.seed is not None:
        log: list[object] = []
        totals = simulate(options.seed, log)
        if options.digest:
            print(hashlib.blake2b(repr(log).encode(), digest_size=16).hexdigest())
        else:
            show(totals)
        return 0
    return play_range(*options.seeds, options.jobs)


def play_range(first: int, end: int, jobs: int) -> int:
    """Play them all, whatever fails; 1 if any did."""
    totals, failed, began = Totals(), [], time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        for seed, (result, report) in enumerate(pool.map(attempt, range(first, end), chunksize=8), first):
            totals.add(result)
            if report is not None:
                failed.append(seed)
                print(f"{report}\nreplay: python -m tests.simulation --seed {seed}\n", file=sys.stderr)
    show(totals)
    print(f"{end - first} seeds in {time.monotonic() - began:.0f} s, {len(failed)} failed: {failed[:20]}")
    return 1 if failed else 0


def attempt(seed: int) -> tuple[Totals, str | None]:
    """The totals of a seed, and the traceback if it failed."""
    try:
        return simulate(seed), None
    except Exception:
        return Totals(), f"seed {seed}\n{traceback.format_exc()}"


def show(totals: Totals) -> None:
    for counter in (totals.doors, totals.faults, totals.events):
        for name, count in sorted(counter.items()):
            print(f"{count:10,}  {name}")
        print()


if __name__ == "__main__":
    sys.exit(main())
