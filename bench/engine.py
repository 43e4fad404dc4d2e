"""A closed-loop load on an engine in this process: `python bench/engine.py --model smollm2`.

The same prompts, repeats and figures as bench/serve.py, without HTTP between; what the two
differ in is what the server costs.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
import trio
from answers import Answer, Arrival, table
from load import Load, add_arguments, load_of, num_requests
from loops import Ask, closed_loop, measure
from report import arguments, note, quiet, spread, write

import trio_llm
from trio_llm.errors import TrioLLMError


async def ask(engine: trio_llm.Engine, load: Load, run: str, index: int) -> Answer:
    """One request, read to its end as the server's handler would: all that has arrived at a time."""
    answer = Answer(trio.current_time())
    messages = [{"role": "user", "content": load.prompt(run, index)}]
    sampling = {"temperature": 0.0, "ignore_eos": True, **load.extra_body}
    try:
        async with engine.generate(messages, max_tokens=load.max_tokens, **sampling) as generation:
            async for first in generation:
                deltas = [first, *generation.drain()]
                text = "".join(delta.text for delta in deltas)
                if text:
                    # a chunk for each token, as from a server that joins nothing: a delta may hold several
                    num_tokens = sum(len(delta.token_ids) for delta in deltas)
                    answer.arrivals.append(Arrival(trio.current_time(), num_tokens, len(text)))
        usage = generation.usage
        answer.usage = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        answer.finish_reason = str(generation.finish_reason)
    except TrioLLMError as error:
        answer.failure = f"{type(error).__name__}: {error}"
    answer.ended = trio.current_time()
    return answer


async def measure_engine(engine: trio_llm.Engine, load: Load, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs of all concurrencies.

    Raises:
        SystemExit: an answer failed.
    """

    async def loop(concurrency: int, name: str, requests: int) -> list[Answer]:
        @asynccontextmanager
        async def open_client() -> AsyncIterator[Ask]:
            yield lambda index: ask(engine, load, name, index)

        return await closed_loop(open_client, concurrency=concurrency, requests=requests)

    async def warm_up(concurrency: int, name: str) -> tuple[Sequence[Answer], dict[str, float]]:
        return await loop(concurrency, name, concurrency), {}

    async def run(concurrency: int, name: str) -> tuple[Sequence[Answer], dict[str, float]]:
        steps, began = (await engine.settled()).num_steps, trio.current_time()
        answers = await loop(concurrency, name, num_requests(args, concurrency))
        if failed := [answer.failure for answer in answers if answer.failure is not None]:
            raise SystemExit(failed[0])
        seconds = trio.current_time() - began
        return answers, {"step_ms": 1e3 * seconds / ((await engine.settled()).num_steps - steps)}

    return await measure("concurrency", args.concurrency, args, warm_up, run)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2")
    add_arguments(parser)
    parser.add_argument("--sampling", type=orjson.loads, default={}, help="a JSON object of sampling parameters")
    parser.add_argument("--settings", type=orjson.loads, default={}, help="a JSON object of engine settings")
    return parser.parse_args(argv)


async def run(args: argparse.Namespace) -> None:
    """Measure, print and write."""
    load = load_of(args, model=args.model, timeout=600, extra_body=args.sampling, api_key=None)
    async with trio_llm.open_engine(args.model, **args.settings) as engine:
        results = await measure_engine(engine, load, args)
    print(table(results))
    for result in results:
        steps = [run["step_ms"] for run in result["repeats"]]
        print(f"a step at {result['concurrency']}: {spread(steps)} ms")
    idle = quiet(run for result in results for run in result["repeats"])
    print(f"{note(idle)}; median of {args.repeats} runs [low-high]")
    write(args, results, idle=idle)


if __name__ == "__main__":
    trio.run(run, parse(None))
