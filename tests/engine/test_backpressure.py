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


async def test_one_stalled_among_many(check_free: CheckFree, autojump_clock: trio.testing.MockClock) -> None:
    """The others take the same steps with a stalled reader beside them and without."""

    async def run(*, stalled: bool) -> tuple[float, list[list[int]]]:
        results: list[list[int]] = []

        async def reader(engine: Engine, prompt: int) -> None:
            async with engine.generate([prompt], max_tokens=40, seed=0) as generation:
                async for _ in generation:
                    pass
            results.append(generation.choices[0].token_ids)

        executor = FakeExecutor(ROOMY)
        async with open_simulation(executor=executor, credit_window=4, seconds_per_turn=1) as engine:
            began = trio.current_time()
            sleeper = engine.generate([100])
            if stalled:
                await sleeper.__aenter__()
            async with trio.open_nursery() as nursery:
                for prompt in range(15):
                    nursery.start_soon(reader, engine, prompt)
            seconds = trio.current_time() - began
            if stalled:
                assert sleeper.usage.completion_tokens == 4
                await sleeper.__aexit__(None, None, None)
            await check_free(engine)
        return seconds, sorted(results)

    seconds, results = await run(stalled=False)
    seconds_beside, results_beside = await run(stalled=True)
    assert results == results_beside
    assert seconds == seconds_beside


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
