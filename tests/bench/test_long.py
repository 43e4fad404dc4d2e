"""The programs for long contexts, on an engine that needs no weights."""

from __future__ import annotations

import long as bench

from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.simulation import open_simulation

INFO = ExecutorInfo(num_blocks=2048, block_size=16, vocab_size=128, max_model_len=8192)


async def test_prefill_asks_for_prompts_of_these_lengths() -> None:
    fake = FakeExecutor(INFO)
    async with open_simulation(executor=fake) as engine:
        runs = await bench.repeat(bench.parse(["--repeats", "2"]), lambda run: bench.prefill(engine, [64, 256], run))

    assert len(runs) == 2
    assert all(run["prefill_64"] > 0 and run["prefill_256"] > 0 and "cores_busy_before" in run for run in runs)
    # nothing was found in the cache: three runs, each computed whole
    assert sum(plan.num_tokens for plan in fake.plans) == 3 * (64 + 256)


async def test_a_shared_prefix_is_found() -> None:
    fake = FakeExecutor(INFO)
    async with open_simulation(executor=fake) as engine:
        figures = await bench.shared_prefix(engine, "run")

    assert set(figures) == {"ttft_cached_ms", "ttft_one_block_ms"}
    assert sum(plan.num_tokens for plan in fake.plans) == 512 + (512 - 480) + 16


async def test_a_long_prompt_comes_while_all_decode() -> None:
    fake = FakeExecutor(INFO)
    async with open_simulation(executor=fake, stream_interval=0.0) as engine:
        figures = await bench.mixed_load(engine, "run", decoders=4, long=1024, tokens=32)

    assert figures["p99_over_median"] > 0
    mixed = [plan for plan in fake.plans if len(plan.rows) == 5]
    assert sum(max(len(row.token_ids) for row in plan.rows) for plan in mixed) >= 1024 - 512
