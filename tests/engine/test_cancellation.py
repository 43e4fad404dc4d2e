"""Cancelled at every checkpoint, and at random moments beside a real thread: all is given back."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.engine import Engine
from trio_llm.engine.generation import Generation
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.simulation import FakeModel, open_simulation

CheckFree = Callable[[Engine], Any]


class CancelAt(trio.abc.Instrument):
    """Cancels a scope after its task's n-th step."""

    def __init__(self, task: trio.lowlevel.Task, scope: trio.CancelScope, steps: int) -> None:
        self.task, self.scope, self.steps = task, scope, steps

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.steps -= 1
            if self.steps == 0:
                self.scope.cancel()


async def cancelled_at(step: int, run: Callable[[], Awaitable[None]]) -> bool:
    """Run with a cancellation at the n-th checkpoint; False when it ended before."""
    with trio.CancelScope() as scope:
        instrument = CancelAt(trio.lowlevel.current_task(), scope, step)
        trio.lowlevel.add_instrument(instrument)
        try:
            await run()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return scope.cancel_called


@pytest.mark.parametrize("prompt", [[1, 2, 3], "a text, tokenised in a thread"])
async def test_at_every_checkpoint_of_a_request(prompt: Any, check_free: CheckFree) -> None:
    async with open_simulation(credit_window=2) as engine:

        async def request() -> None:
            async with engine.generate(prompt, max_tokens=4, request_id="same") as generation:
                async for _ in generation:
                    pass

        step = 1
        while await cancelled_at(step, request):
            await check_free(engine)
            step += 1
        await check_free(engine)
        assert step > 4
        finished = engine.statistics().finished
        assert finished["length"] >= 1
        assert 2 <= finished["abort"] + finished["length"] <= step


async def test_at_every_checkpoint_of_an_engine(autojump_clock: MockClock) -> None:
    executors: list[FakeExecutor] = []

    async def life() -> None:
        executors.append(FakeExecutor())
        async with open_simulation(executor=executors[-1], credit_window=2) as engine:
            async with engine.generate([1, 2, 3], max_tokens=4) as generation:
                async for _ in generation:
                    pass

    step = 1
    while await cancelled_at(step, life):
        assert not executors[-1].sequences
        step += 1
    assert step > 4


async def test_random_cancels_beside_a_real_thread(check_free: CheckFree) -> None:
    choose = random.Random(0)
    admitted: list[Generation] = []
    executor = FakeExecutor(ExecutorInfo(num_blocks=64, block_size=4, vocab_size=128, max_model_len=128))

    async def request(engine: Engine, number: int) -> None:
        with trio.CancelScope() as scope:
            prompt = [choose.randrange(128) for _ in range(choose.randrange(1, 30))]
            tokens_before_cancel = choose.randrange(0, 30)
            how = choose.choice(["cancel", "abort", "leave", "deadline"])
            if how == "deadline":
                scope.deadline = trio.current_time() + choose.random() * 0.01
            generation = engine.generate(prompt, max_tokens=choose.randrange(1, 60))
            async with generation:
                if tokens_before_cancel == 0 and how == "cancel":
                    scope.cancel()
                async for _ in generation:
                    tokens_before_cancel -= 1
                    if tokens_before_cancel <= 0 and how == "leave":
                        break
                    if tokens_before_cancel <= 0 and how == "cancel":
                        scope.cancel()
                    if tokens_before_cancel <= 0 and how == "abort":
                        generation.abort()
        if generation.core_id:  # else its deadline was over before it was admitted
            admitted.append(generation)
            assert generation.finish_reason is not None

    async with open_engine(FakeModel(), executor=executor, credit_window=4, max_num_seqs=8) as engine:
        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(request, engine, number)
            await check_free(engine)
        statistics = engine.statistics()
        assert sum(statistics.finished.values()) == len(admitted) > 150
        kept = sum(generation.usage.completion_tokens for generation in admitted)
        assert kept == statistics.generation_tokens
        async with engine.generate([1], max_tokens=3) as generation:
            assert len([delta async for delta in generation]) == 3
