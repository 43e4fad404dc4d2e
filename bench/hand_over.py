"""What Trio's thread does with a step's outputs: text, channels, and the readers that wake up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from trio_llm.config import EngineSettings
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.engine import Engine
from trio_llm.engine.nursery import run_engine
from trio_llm.engine.simulation import FakeModel, drive_in_task
from trio_llm.engine.worker import Report, Worker


@attrs.define
class Turns:
    """What the core has taken of this thread."""

    seconds: float = 0.0
    count: int = 0


@asynccontextmanager
async def paced_engine(tokenizer: Any, batch: int, max_tokens: int) -> AsyncIterator[tuple[Engine, Turns]]:
    """An engine without a model whose turns are taken on this thread: between two of them all readers read, as they
    do while a model computes."""
    num_blocks = (max_tokens // 16 + 3) * batch
    info = ExecutorInfo(num_blocks=num_blocks, block_size=16, vocab_size=256, max_model_len=max_tokens + 64)
    settings = EngineSettings(max_num_seqs=batch, max_num_batched_tokens=max(512, 16 * batch), stream_interval=0.0)
    core = EngineCore(FakeExecutor(info, next_token=lambda context, index: 97 + index % 26), settings)
    turns = Turns()

    async def drive(worker: Worker, deliver: Any) -> None:
        turn = worker._turn

        def timed(*arguments: Any) -> Report | None:
            began = time.thread_time()
            try:
                return turn(*arguments)
            finally:
                turns.seconds += time.thread_time() - began
                turns.count += 1

        worker._turn = timed  # type: ignore[assignment,method-assign]
        await drive_in_task(worker, deliver)

    model = FakeModel() if tokenizer is None else FakeModel(tokenizer=tokenizer)
    async with run_engine(lambda: (model, core), settings, drive=drive) as engine:
        yield engine, turns


def watch(turns: Turns) -> Callable[[], tuple[float, int]]:
    """From now on: the seconds of this thread without the turns, and how many these were."""
    began, before = time.thread_time(), attrs.evolve(turns)

    def so_far() -> tuple[float, int]:
        return time.thread_time() - began - (turns.seconds - before.seconds), turns.count - before.count

    return so_far


async def hand_over(tokenizer: Any, batch: int, steps: int) -> float:
    """Milliseconds of processor time a step, for as many readers as sequences."""
    num_begun, all_begun = 0, trio.Event()

    async def read() -> None:
        nonlocal num_begun
        has_begun = False
        async with engine.generate([97] * 16, max_tokens=steps + 2, ignore_eos=True, temperature=0) as generation:
            async for _ in generation:
                generation.drain()
                if not has_begun:
                    has_begun = True
                    num_begun += 1
                    if num_begun == batch:
                        all_begun.set()

    async with paced_engine(tokenizer, batch, steps + 2) as (engine, turns):
        async with trio.open_nursery() as nursery:
            for _ in range(batch):
                nursery.start_soon(read)
            await all_begun.wait()
            so_far = watch(turns)
        seconds, count = so_far()
        return 1e3 * seconds / max(1, count)
