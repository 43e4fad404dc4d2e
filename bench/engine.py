"""A closed-loop load on an engine in this process: `python bench/engine.py --model smollm2`.

The same prompts, repeats and figures as bench/serve.py, without HTTP between; what the two
differ in is what the server costs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import trio
from serve import Answer, Arrival, Load, busiest, machine, spread_of, summarise, table

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
                    # a delta is a step of the engine, which is what a server that joins nothing would send
                    answer.arrivals.append(Arrival(trio.current_time(), len(deltas), len(text)))
        usage = generation.usage
        answer.usage = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        answer.finish_reason = str(generation.finish_reason)
    except TrioLLMError as error:
        answer.failure = f"{type(error).__name__}: {error}"
    answer.ended = trio.current_time()
    return answer


async def closed_loop(
    engine: trio_llm.Engine, load: Load, run: str, *, concurrency: int, requests: int
) -> list[Answer]:
    """`requests` answers to `concurrency` clients, each of which asks again when it was answered."""
    answers: list[Answer] = []
    indices = iter(range(requests))

    async def one_client() -> None:
        for index in indices:
            answers.append(await ask(engine, load, run, index))  # noqa: PERF401  clients share the list

    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(one_client)
    return answers


async def measure(engine: trio_llm.Engine, load: Load, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs of all concurrencies, each after its own warm-up.

    Raises:
        SystemExit: an answer failed.
    """
    results = []
    for concurrency in args.concurrency:
        repeats = []
        for repeat in range(-1, args.repeats):
            requests = max(concurrency, args.requests or max(8, 4 * concurrency)) if repeat >= 0 else concurrency
            load_average = os.getloadavg()[0]
            steps_before = (await engine.settled()).num_steps
            run = f"{concurrency} {repeat}"
            answers = await closed_loop(engine, load, run, concurrency=concurrency, requests=requests)
            if failed := [answer.failure for answer in answers if answer.failure is not None]:
                raise SystemExit(failed[0])
            if repeat >= 0:
                summary = summarise(answers)
                summary["load_average_before"] = load_average
                summary["step_ms"] = 1e3 * summary["wall_s"] / ((await engine.settled()).num_steps - steps_before)
                repeats.append(summary)
        results.append({"concurrency": concurrency, **spread_of(repeats), "repeats": repeats})
    return results


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=0, help="of one run; default: 4 a client, at least 8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=110, help="roughly, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shared-prefix", action="store_true", help="three quarters of all prompts are the same")
    parser.add_argument("--sampling", type=orjson.loads, default={}, help="a JSON object of sampling parameters")
    parser.add_argument("--settings", type=orjson.loads, default={}, help="a JSON object of engine settings")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--label", default="", help="what is measured, for the JSON")
    return parser.parse_args(argv)


async def run(args: argparse.Namespace) -> None:
    """Measure, print and write."""
    load = Load(
        model=args.model,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        seed=args.seed,
        shared_prefix=args.shared_prefix,
        timeout=600,
        extra_body=args.sampling,
        api_key=None,
    )
    async with trio_llm.open_engine(args.model, **args.settings) as engine:
        results = await measure(engine, load, args)
    print(table(results))
    for result in results:
        step = result["step_ms"]
        print(f"a step at {result['concurrency']}: {step['median']:.1f} ms [{step['low']:.1f}-{step['high']:.1f}]")
    print(f"load average before a run at most {busiest(results):.2f}; median of {args.repeats} runs [low-high]")
    if args.json is not None:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        document = {"settings": settings, "machine": machine(), "results": results}
        await trio.Path(args.json).write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    trio.run(run, parse(None))
