"""How it is asked: by so many clients at once, or by requests that come at random."""

from __future__ import annotations

import argparse
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio
from answers import Answer, summarise
from report import look, repeats, spread_of

Ask = Callable[[int], Awaitable[Answer]]
"""Sends the request of that number and reads its answer to the end; raises nothing."""
OpenClient = Callable[[], AbstractAsyncContextManager[Ask]]


async def closed_loop(open_client: OpenClient, *, concurrency: int, requests: int) -> list[Answer]:
    """`requests` answers to `concurrency` clients, each of which asks again when it was answered."""
    answers: list[Answer] = []
    indices = iter(range(requests))

    async def one_client() -> None:
        async with open_client() as ask:
            for index in indices:
                answer = await ask(index)
                answers.append(answer)

    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(one_client)
    return _read(answers)


async def open_loop(open_client: OpenClient, *, rate: float, requests: int, seed: str) -> list[Answer]:
    """`requests` answers to requests that arrive as a Poisson process of `rate` a second, whether or not those
    before them were answered."""
    answers: list[Answer] = []
    arrivals = random.Random(seed)

    async def one_request(index: int) -> None:
        async with open_client() as ask:
            answers.append(await ask(index))

    async with trio.open_nursery() as nursery:
        due = trio.current_time()
        for index in range(requests):
            await trio.sleep_until(due)
            nursery.start_soon(one_request, index)
            due += arrivals.expovariate(rate)
    return _read(answers)


def _read(answers: list[Answer]) -> list[Answer]:
    for answer in answers:
        answer.read()
    return answers


Run = Callable[[Any, str], Awaitable[tuple[Sequence[Answer], dict[str, float]]]]
"""Runs one level (of concurrency, or a rate) under a name of its own: the answers, and figures beside theirs."""


async def measure(
    unit: str, levels: Sequence[Any], args: argparse.Namespace, warm_up: Run, run: Run
) -> list[dict[str, Any]]:
    """All runs of all levels, each level after a warm-up of its own.

    Args:
        unit: what a level is called.

    Raises:
        SystemExit: an answer of a warm-up failed; measuring makes no sense then.
    """
    results = []
    for level in levels:
        warm, _ = await warm_up(level, f"warm {level}")
        if failed := [answer.failure for answer in warm if answer.failure is not None]:
            raise SystemExit(f"warm-up failed: {failed[0]}")
        runs: list[dict[str, float]] = []
        for repeat in repeats(args):
            before = look()
            answers, others = await run(level, f"{level} {repeat}")
            runs.append({**summarise(answers), **others, **before})
        results.append({unit: level, **spread_of(runs), "repeats": runs})
    return results
