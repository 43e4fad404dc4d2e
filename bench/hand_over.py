"""What Trio's thread does with a step's outputs: text, channels, and the readers that wake up."""

from __future__ import annotations

import time
from typing import Any

import trio

from trio_llm.config import EngineSettings
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.nursery import run_engine
from trio_llm.engine.simulation import FakeModel, drive_in_task
from trio_llm.engine.worker import Report, Worker

PROMPT = [97] * 16


async def hand_over(tokenizer: Any, batch: int, steps: int) -> float:
    """Milliseconds of processor time a step, for as many readers as sequences.

    No model computes anything, and turns of the core are taken on this thread: between two of them all readers
    read, as they do while a model computes.  The turns' own time is taken off.
    """
    max_tokens = steps + 2
    num_blocks = (max_tokens // 16 + 3) * batch
    info = ExecutorInfo(num_blocks=num_blocks, block_size=16, vocab_size=200, max_model_len=max_tokens + 64)
    settings = EngineSettings(max_num_seqs=batch, max_num_batched_tokens=max(512, 16 * batch))
    core = EngineCore(FakeExecutor(info, next_token=lambda context, index: 97 + index % 26), settings)
    in_turns, num_turns = 0.0, 0
    num_begun, all_begun = 0, trio.Event()

    async def drive(worker: Worker, deliver: Any) -> None:
        turn = worker._turn

        def timed(*arguments: Any) -> Report:
            nonlocal in_turns, num_turns
            began = time.thread_time()
            try:
                return turn(*arguments)
            finally:
                in_turns += time.thread_time() - began
                num_turns += 1

        worker._turn = timed  # type: ignore[assignment,method-assign]
        await drive_in_task(worker, deliver)

    async def read() -> None:
        nonlocal num_begun
        has_begun = False
        async with engine.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True, temperature=0) as generation:
            async for _ in generation:
                generation.drain()
                if not has_begun:
                    has_begun = True
                    num_begun += 1
                    if num_begun == batch:
                        all_begun.set()

    async with run_engine(lambda: (FakeModel(tokenizer=tokenizer), core), settings, drive=drive) as engine:
        async with trio.open_nursery() as nursery:
            for _ in range(batch):
                nursery.start_soon(read)
            await all_begun.wait()
            began, turns_before, count_before = time.thread_time(), in_turns, num_turns
        elapsed = time.thread_time() - began - (in_turns - turns_before)
        return 1e3 * elapsed / max(1, num_turns - count_before)
