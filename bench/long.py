"""Long contexts, shared prefixes and mixed load, in process: `python bench/long.py --model smollm2`.

Three questions: how prefill slows with the context, what a cached prefix saves, and how much those who
decode notice of a long prompt that arrives among them.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence

import orjson
import trio
from answers import percentile
from report import arguments, look, note, quiet, spread, write
from report import repeats as numbers

import trio_llm

Figures = dict[str, float]


def random_prompt(engine: trio_llm.Engine, length: int, name: str) -> list[int]:
    """Token ids that no other name shares, and whose first block is never in the cache."""
    chooser = random.Random(name)
    return [chooser.randrange(min(engine.vocab_size, 10_000)) for _ in range(length)]


async def time_to_first(engine: trio_llm.Engine, prompt: list[int]) -> float:
    """Seconds from the request to its only token."""
    began = trio.current_time()
    async with engine.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True) as generation:
        async for _ in generation:
            pass
    return trio.current_time() - began


async def prefill(engine: trio_llm.Engine, lengths: Sequence[int], run: str) -> Figures:
    """Prompt tokens a second at each length, alone."""
    return {
        f"prefill_{length}": length / await time_to_first(engine, random_prompt(engine, length, f"{run} {length}"))
        for length in lengths
    }


async def shared_prefix(engine: trio_llm.Engine, run: str) -> Figures:
    """Time to first token of 512 tokens of which 95 % are cached, beside that of a prompt of one block."""
    prefix = random_prompt(engine, 512, f"{run} prefix")
    await time_to_first(engine, prefix)
    tail = random_prompt(engine, 26, f"{run} tail")
    cached = await time_to_first(engine, prefix[: 512 - 26] + tail)
    one_block = await time_to_first(engine, random_prompt(engine, 16, f"{run} short"))
    return {"ttft_cached_ms": 1e3 * cached, "ttft_one_block_ms": 1e3 * one_block}


async def mixed_load(engine: trio_llm.Engine, run: str, *, decoders: int, long: int, tokens: int) -> Figures:
    """Inter-token times of those who decode, without a long prompt among them and with one."""
    figures: Figures = {}
    for kind in ("without", "with"):
        gaps: list[float] = []
        first_of_long = 0.0
        progress = trio.Event()

        async def decode(
            index: int, kind: str = kind, gaps: list[float] = gaps, progress: trio.Event = progress
        ) -> None:
            prompt = random_prompt(engine, 100, f"{run} {kind} {index}")
            last = None
            async with engine.generate(prompt, max_tokens=tokens, temperature=0, ignore_eos=True) as generation:
                async for _ in generation:
                    now = trio.current_time()
                    generated = generation.usage.completion_tokens
                    # the first quarter is that in which the others come in
                    if last is not None and generated > tokens // 4:
                        gaps.append(now - last)
                        progress.set()
                    last = now

        async with trio.open_nursery() as nursery:
            for index in range(decoders):
                nursery.start_soon(decode, index)
            if kind == "with":
                await progress.wait()
                first_of_long = await time_to_first(engine, random_prompt(engine, long, f"{run} long"))
        weighted = [(gap, 1.0) for gap in gaps]
        figures[f"itl_p50_{kind}_ms"] = 1e3 * percentile(weighted, 0.5)
        figures[f"itl_p99_{kind}_ms"] = 1e3 * percentile(weighted, 0.99)
    figures["ttft_long_ms"] = 1e3 * first_of_long
    figures["p99_over_median"] = figures["itl_p99_with_ms"] / figures["itl_p50_without_ms"]
    return figures


async def repeat(args: argparse.Namespace, measure: Callable[[str], Awaitable[Figures]]) -> list[Figures]:
    """The figures of several runs, after one that warms up, each with what the machine did before it."""
    await measure("warm")
    runs = []
    for number in numbers(args):
        before = look()
        runs.append({**await measure(str(number)), **before})
    return runs


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8000])
    parser.add_argument("--decoders", type=int, default=16)
    parser.add_argument("--long", type=int, default=4096, help="tokens of the prompt that arrives among the decoders")
    parser.add_argument("--tokens", type=int, default=256, help="that each decoder makes")
    parser.add_argument("--settings", type=orjson.loads, default={}, help="a JSON object of engine settings")
    return parser.parse_args(argv)


async def run(args: argparse.Namespace) -> dict[str, list[float]]:
    """Measure, print and write."""
    runs: list[list[Figures]] = []
    # every token's time is wanted, not that of a few together
    async with trio_llm.open_engine(args.model, **{"stream_interval": 0.0, **args.settings}) as engine:
        runs.append(await repeat(args, lambda run: prefill(engine, args.lengths, run)))
        runs.append(await repeat(args, lambda run: shared_prefix(engine, run)))
        runs.append(
            await repeat(
                args, lambda run: mixed_load(engine, run, decoders=args.decoders, long=args.long, tokens=args.tokens)
            )
        )
    idle = quiet(each for question in runs for each in question)
    figures = {
        name: [each[name] for each in question]
        for question in runs
        for name in question[0]
        if not name.endswith("_before")
    }
    print("| figure | median [lowest-highest] |\n|---|--:|")
    for name, values in figures.items():
        print(f"| {name} | {spread(values, '.2f')} |")
    shortest = statistics.median(figures[f"prefill_{args.lengths[0]}"])
    for length in args.lengths[1:]:
        ratio = statistics.median(figures[f"prefill_{length}"]) / shortest
        print(f"prefill at {length} over {args.lengths[0]}: {ratio:.2f}")
    print(f"{note(idle)}; median of {args.repeats} runs")
    write(args, figures, idle=idle)
    return figures


if __name__ == "__main__":
    trio.run(run, parse(None))
