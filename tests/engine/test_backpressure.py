"""Credit: a slow reader slows itself only, loses nothing, and is let go when it has stalled too long."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio

from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.engine import Engine
from trio_llm.engine.simulation import open_simulation
from trio_llm.errors import ReaderStalled

OpenFake = Callable[..., AbstractAsyncContextManager[Engine]]
CheckFree = Callable[[Engine], Any]

ROOMY = ExecutorInfo(num_blocks=4096, block_size=4, vocab_size=128, max_model_len=128)


async def settle_down(engine: Engine) -> None:
    """Until the core has nothing that it may do."""
    while True:
        before = (await engine.settled()).num_steps
        if (await engine.settled()).num_steps == before:
            return


@pytest.mark.parametrize("window", [1, 2, 3, 7, 256])
@pytest.mark.parametrize("n", [1, 2])
async def test_every_window_flows(open_fake: OpenFake, check_free: CheckFree, window: int, n: int) -> None:
    async with open_fake(FakeExecutor(ROOMY), credit_window=window) as engine:
        async with engine.generate([1, 2, 3], max_tokens=50, n=n) as generation:
            deltas = [delta async for delta in generation]
        assert generation.usage.completion_tokens == 50 * n
        for choice in generation.choices:
            joined = [token for delta in deltas if delta.index == choice.index for token in delta.token_ids]
            assert joined == choice.token_ids
        await check_free(engine)


@pytest.mark.parametrize("window", [1, 2, 3, 7])
async def test_the_core_never_runs_ahead_of_the_window(open_fake: OpenFake, check_free: CheckFree, window: int) -> None:
    async with open_fake(credit_window=window) as engine:
        async with engine.generate([1, 2, 3], max_tokens=50) as generation:
            num_read = 0
            while num_read < 50:
                await settle_down(engine)
                ahead = generation.usage.completion_tokens - num_read
                # acknowledged in halves of a window, so up to half of one may be missing
                assert min(window - window // 2, 50 - num_read) <= ahead <= window
                num_read += len((await anext(generation)).token_ids)
        assert generation.usage.completion_tokens == 50
        await check_free(engine)


async def test_drain_takes_all_that_came(open_fake: OpenFake) -> None:
    async with open_fake(credit_window=8) as engine:
        async with engine.generate([1, 2, 3], max_tokens=20) as generation:
            assert generation.drain() == [] or generation.text
            await settle_down(engine)
            tokens = [token for delta in generation.drain() for token in delta.token_ids]
            while generation.finish_reason is None:
                await settle_down(engine)
                tokens += [token for delta in generation.drain() for token in delta.token_ids]
            assert tokens == generation.choices[0].token_ids
            assert generation.drain() == []
            assert [delta async for delta in generation] == []


Steps = list[list[tuple[int, int, tuple[int, ...], int, bool]]]


@pytest.mark.parametrize("max_num_seqs", [4, 16])
@pytest.mark.parametrize(
    ("num_stalled", "num_blocks"),
    [
        (1, 4096),
        (1000, 4096),
        # the blocks of those who stall are wanted by the others
        (15, 30),
    ],
)
async def test_the_others_are_scheduled_in_the_same_steps(
    check_free: CheckFree,
    autojump_clock: trio.testing.MockClock,
    num_stalled: int,
    num_blocks: int,
    max_num_seqs: int,
) -> None:
    """The plans with stalled readers are those without, row for row, once they have stalled."""

    async def run(num_stalled: int) -> tuple[Steps, int]:
        async def reader(engine: Engine, prompt: int) -> None:
            await trio.sleep(1.37 * prompt)  # never just when a turn begins
            async with engine.generate([prompt] * (1 + prompt), max_tokens=24 - prompt, seed=0) as generation:
                async for _ in generation:
                    pass
            assert generation.finish_reason == "length"

        executor = FakeExecutor(ExecutorInfo(num_blocks=num_blocks, block_size=4, vocab_size=128, max_model_len=128))
        sleepers = []
        async with open_simulation(
            executor=executor,
            credit_window=4,
            stall_timeout=10_000,
            seconds_per_turn=1,
            enable_prefix_caching=False,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=32,
        ) as engine:
            for number in range(num_stalled):
                sleepers.append(sleeper := engine.generate([100 + number % 20]))
                await sleeper.__aenter__()
            while any(sleeper.usage.completion_tokens < 4 for sleeper in sleepers):  # noqa: ASYNC110
                await trio.sleep(1)
            await trio.sleep(10)
            num_plans = len(executor.plans)
            async with trio.open_nursery() as nursery:
                for prompt in range(15):
                    nursery.start_soon(reader, engine, prompt)
            num_preemptions = engine.statistics().core.num_preemptions
            assert all(sleeper.usage.completion_tokens == 4 for sleeper in sleepers), "memory is bounded by the window"
            for sleeper in sleepers:
                await sleeper.__aexit__(None, None, None)
            await check_free(engine)
        steps = [
            sorted((row.start, *row.token_ids[:1], row.token_ids, row.output_index, row.sample) for row in plan.rows)
            for plan in executor.plans[num_plans:]
        ]
        return steps, num_preemptions

    alone, num_preempted_alone = await run(0)
    beside, num_preempted = await run(num_stalled)
    assert alone == beside
    assert (num_preempted > num_preempted_alone) == (num_blocks == 30)


async def test_stall_limit(check_free: CheckFree, autojump_clock: trio.testing.MockClock) -> None:
    async with open_simulation(credit_window=4, stall_timeout=60, seconds_per_turn=0.1) as engine:
        async with engine.generate([1, 2, 3]) as generation:
            began = trio.current_time()
            await anext(generation)
            while engine.statistics().num_requests:  # noqa: ASYNC110
                await trio.sleep(1)
            assert 60 <= trio.current_time() - began < 80
            await check_free(engine)
            # what was made before can still be read
            assert len(generation.drain()) == 3
            with pytest.raises(ReaderStalled, match="60 seconds"):
                await anext(generation)
        assert engine.statistics().finished["abort"] == 1


async def test_a_slow_reader_does_not_stall(autojump_clock: trio.testing.MockClock) -> None:
    """One token each 59 seconds, for as long as it takes."""
    async with open_simulation(credit_window=4, stall_timeout=60, seconds_per_turn=0.1) as engine:
        async with engine.generate([1, 2, 3], max_tokens=30) as generation:
            async for _ in generation:
                await trio.sleep(59)
        assert generation.finish_reason == "length"
        assert generation.usage.completion_tokens == 30


async def test_a_reader_need_not_hurry_after_the_end(autojump_clock: trio.testing.MockClock) -> None:
    async with open_simulation(credit_window=4, stall_timeout=60) as engine:
        async with engine.generate([1, 2, 3], max_tokens=4) as generation:
            await trio.sleep(1000)
            assert len([delta async for delta in generation]) == 4
        assert generation.finish_reason == "length"


async def test_a_thousand_stalled_readers(check_free: CheckFree, autojump_clock: trio.testing.MockClock) -> None:
    executor = FakeExecutor(ExecutorInfo(num_blocks=4096, block_size=4, vocab_size=128, max_model_len=128))
    async with open_simulation(executor=executor, credit_window=4, stall_timeout=60, seconds_per_turn=0.1) as engine:
        sleepers = [engine.generate([number % 128]) for number in range(1000)]
        for sleeper in sleepers:
            await sleeper.__aenter__()
        async with engine.generate([1], max_tokens=40) as awake:
            async for _ in awake:
                pass
        assert awake.finish_reason == "length"
        assert max(sleeper.usage.completion_tokens for sleeper in sleepers) <= 4
        await trio.sleep(200)
        await check_free(engine)
        assert engine.statistics().finished["abort"] == 1000
        for sleeper in sleepers:
            await sleeper.__aexit__(None, None, None)
