"""What speculation costs where it brings nothing, and what it brings: `python bench/speculation.py --model smollm2`.

Two engines with the same weights, one that drafts and one that does not, take turns with the same requests in this
process.  A turn of one and a turn of the other make a pair, whose ratio is the figure: what else the machine does
changes both.  Which of them goes first alternates.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import orjson
import trio
from load import WORDS
from report import arguments, look, note, quiet, repeats, spread, spread_of, write

import trio_llm

SENTENCE = "The cat sat on the mat, the dog lay by the door, and the bird sang in the tree. "


@attrs.frozen
class Text:
    """A kind of text to make."""

    shows: str
    sampling: dict[str, Any]
    is_repeated: bool = False
    """Whether the prompt says one sentence again and again, or words at random."""

    def prompt(self, number: int, length: int) -> str:
        """A prompt of about `length` tokens; no two begin alike."""
        start = f"{WORDS[number % len(WORDS)]} {number}. "
        if self.is_repeated:
            return start + SENTENCE * max(2, length // 20)
        return start + " ".join(WORDS[(number * 7919 + place * place * 31) % len(WORDS)] for place in range(length))


TEXTS = {
    "unseen": Text("nothing that was said before comes again, so nothing is found", {"temperature": 2.0}),
    "misleading": Text(
        "16 tokens nearly at random: something is nearly always found, and mostly wrong",
        {"temperature": 2.0, "allowed_token_ids": list(range(100, 116))},
    ),
    "repetitive": Text("the prompt repeats itself and the answer goes on so", {"temperature": 0.0}, is_repeated=True),
}


async def turn(
    engine: trio_llm.Engine, text: Text, args: argparse.Namespace, clients: int, number: int
) -> dict[str, Any]:
    """`clients` requests at once, read to their end.  `number` chooses prompts and seeds."""
    before = await engine.settled()

    async def ask(index: int) -> None:
        prompt = text.prompt(number * 1000 + index, args.prompt_tokens)
        sampling = {"seed": index, "ignore_eos": True, "max_tokens": args.max_tokens, **text.sampling}
        async with engine.generate(prompt, **sampling) as generation:
            async for _ in generation:
                pass

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for index in range(clients):
            nursery.start_soon(ask, index)
    seconds = trio.current_time() - began
    after = await engine.settled()
    return {
        "output_tokens_per_s": clients * args.max_tokens / seconds,
        "steps": after.num_steps - before.num_steps,
        "drafted": after.num_draft_tokens - before.num_draft_tokens,
        "accepted": after.num_accepted_tokens - before.num_accepted_tokens,
    }


async def measure(off: trio_llm.Engine, on: trio_llm.Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All texts with all numbers of clients, each after a pair that does not count."""
    results = []
    for name in args.texts:
        for clients in args.concurrency:
            pairs = []
            for repeat in itertools.chain([-1], repeats(args)):
                before = look()
                done = {}
                for engine in (on, off) if repeat % 2 else (off, on):
                    done[engine is on] = await turn(engine, TEXTS[name], args, clients, repeat + 1)
                pair = {f"off_{key}": value for key, value in done[False].items()} | done[True]
                pair["ratio"] = pair["output_tokens_per_s"] / pair["off_output_tokens_per_s"]
                pairs.append({**pair, **before})
            results.append({"text": name, "clients": clients, **spread_of(pairs[1:]), "repeats": pairs[1:]})
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
    """As Markdown: medians of the pairs, [low-high] of the ratio."""
    lines = [
        "| text | clients | tokens/s without | with | ratio | drafted | accepted |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results:
        ratios = [pair["ratio"] for pair in row["repeats"]]
        lines.append(
            f"| {row['text']} | {row['clients']} | {row['off_output_tokens_per_s']['median']:.1f} "
            f"| {row['output_tokens_per_s']['median']:.1f} "
            f"| {spread(ratios, '.3f')} "
            f"| {row['drafted']['median']:g} | {row['accepted']['median']:g} |"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, epilog="; ".join(f"{name}: {text.shows}" for name, text in TEXTS.items()))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="ngram", help="speculative_method of the engine that drafts")
    parser.add_argument("--draft-model", help="speculative_model, for the method draft_model")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=100, help="roughly")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--settings", type=orjson.loads, default={}, help="a JSON object of both engines' settings")
    return parser.parse_args(argv)


async def run(args: argparse.Namespace) -> None:
    """Measure, print and write."""
    drafting = {"speculative_method": args.method, "speculative_model": args.draft_model}
    async with (
        trio_llm.open_engine(args.model, **args.settings) as off,
        trio_llm.open_engine(args.model, **args.settings, **drafting) as on,
    ):
        results = await measure(off, on, args)
    print(table(results))
    idle = quiet(pair for row in results for pair in row["repeats"])
    print(f"{note(idle)}; median of {args.repeats} pairs [low-high]")
    write(args, results, idle=idle)


if __name__ == "__main__":
    trio.run(run, parse(None))
