"""Two models raced: the first complete answer wins, the other is cancelled where it stands.

    python docs/example_race.py "Say hello." [MODEL MODEL ...]

A race is a Trio nursery with a task for each model.  The winner cancels the nursery; that
alone takes the losers out of their engines and frees their KV blocks, which the printed
statistics show.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import trio

from trio_llm import Engine, open_engine


async def race(engines: Sequence[Engine], prompt: str, *, max_tokens: int = 64) -> tuple[Engine, str]:
    """The engine whose answer was complete first, and its answer."""
    finishers: list[tuple[Engine, str]] = []

    async def run(engine: Engine) -> None:
        messages = [{"role": "user", "content": prompt}]
        async with engine.generate(messages, max_tokens=max_tokens) as generation:
            async for _ in generation:
                pass
        finishers.append((engine, generation.text))
        nursery.cancel_scope.cancel(reason="the race is over")

    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(run, engine)
    return finishers[0]


async def main(prompt: str, models: Sequence[str]) -> None:
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(open_engine(model, name=f"{number}:{model}", max_num_seqs=1))
            for number, model in enumerate(models, 1)
        ]
        winner, answer = await race(engines, prompt)
        print(f"{winner.name} won: {answer}")
        await report(engines)


async def report(engines: Sequence[Engine]) -> None:
    """Show that nobody holds anything any more."""
    for engine in engines:
        core = await engine.settled()
        finished = engine.statistics().finished
        ends = ", ".join(f"{count} {reason}" for reason, count in finished.items() if count)
        print(f"{engine.name}: {ends}; {core.num_free_blocks} of {core.num_blocks} KV blocks free")


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "Say hello.", sys.argv[2:] or ["smollm2", "smollm2"])
