"""The engine's nursery: what leaves `open_engine`, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_llm.config import EngineSettings
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import FakeExecutor
from trio_llm.engine.engine import Engine
from trio_llm.engine.loading import Model
from trio_llm.engine.nursery import open_engine, run_engine
from trio_llm.engine.simulation import FakeModel, open_simulation
from trio_llm.engine.worker import Report, Worker
from trio_llm.errors import ConfigurationError, EngineDead, ModelLoadError

OpenFake = Callable[..., AbstractAsyncContextManager[Engine]]


async def test_exceptions_of_the_block_leave_unchanged(open_fake: OpenFake) -> None:
    for error in (ValueError("mine"), ExceptionGroup("mine", [ValueError()]), KeyboardInterrupt(), StopIteration()):
        caught: BaseException | None = None
        try:
            async with open_fake():
                raise error
        except BaseException as other:
            caught = other
        assert caught is error
        assert error.__cause__ is None


async def test_a_failed_load_leaves_as_it_is() -> None:
    cause = OSError("no such file")
    error = ModelLoadError("cannot load")
    error.__cause__ = cause

    def load() -> tuple[Model, EngineCore]:
        raise error

    with pytest.raises(ModelLoadError) as caught:
        async with run_engine(load, EngineSettings()):
            raise AssertionError("unreachable")
    assert caught.value is error
    assert caught.value.__cause__ is cause


async def test_settings_are_checked_and_overridden() -> None:
    with pytest.raises(ConfigurationError):
        async with open_engine(FakeModel(), executor=FakeExecutor(), max_num_seqs=0):
            raise AssertionError("unreachable")
    async with open_engine(FakeModel(), executor=FakeExecutor(), name="mine", max_model_len=50) as engine:
        assert engine.name == "mine"
        assert engine.max_model_len == 50
        assert engine.settings.max_model_len == 50


async def test_cancelled_from_outside(open_fake: OpenFake) -> None:
    executor = FakeExecutor()
    with trio.CancelScope() as scope:
        async with open_fake(executor, credit_window=4) as engine:
            async with engine.generate("hello") as generation:
                await anext(generation)
                scope.cancel()
                await trio.sleep_forever()
    assert scope.cancelled_caught
    assert generation.finish_reason == "abort"
    assert engine.statistics().core.num_free_blocks == executor.info.num_blocks
    assert not executor.sequences


async def test_cancelled_while_loading() -> None:
    """The thread cannot be interrupted; the block ends when the load does, as cancelled."""
    started, go = threading.Event(), threading.Event()

    def load() -> tuple[Model, EngineCore]:
        started.set()
        go.wait()
        return FakeModel(), EngineCore(FakeExecutor(), EngineSettings())

    async def release() -> None:
        await trio.to_thread.run_sync(started.wait)
        scope.cancel()
        await wait_all_tasks_blocked()
        go.set()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(release)
            async with run_engine(load, EngineSettings()):
                raise AssertionError("unreachable")
        assert scope.cancelled_caught
        assert go.is_set()


async def test_a_load_that_hangs_is_given_up_once_nobody_wants_it(autojump_clock: MockClock) -> None:
    async def hang(worker: Worker, deliver: Callable[[Report], None]) -> None:
        await trio.sleep_forever()

    def load() -> tuple[Model, EngineCore]:
        raise AssertionError("unreachable")

    with trio.move_on_after(1000):
        with pytest.raises(EngineDead):
            async with run_engine(load, EngineSettings(), drive=hang):
                raise AssertionError("unreachable")
    assert 1000 + 120 <= trio.current_time() < 1130


class Stuck(FakeExecutor):
    """Hangs in every step until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go = threading.Event()
        self.on_launch = self.hang

    def hang(self, plan: Any) -> None:
        self.entered.set()
        self.go.wait()


def open_on(clock: MockClock, executor: FakeExecutor) -> AbstractAsyncContextManager[Engine]:
    """An engine with a real thread, whose steps are timed by the mock clock."""
    settings = EngineSettings(step_timeout=60, step_grace=30)
    return run_engine(lambda: (FakeModel(), EngineCore(executor, settings)), settings, clock=clock.current_time)


async def test_a_stuck_step_is_given_up(mock_clock: MockClock) -> None:
    """A thread that hangs: first the engine is unready, then it is dead and the thread abandoned."""
    executor = Stuck()
    states = []

    async def time_goes_by() -> None:
        await trio.to_thread.run_sync(executor.entered.wait)
        for seconds in (59, 2, 28, 2):
            states.append((engine.state, engine.heartbeat_age))
            mock_clock.jump(seconds)
            await wait_all_tasks_blocked()

    async with trio.open_nursery() as nursery:
        with pytest.raises(EngineDead, match="hung"):  # noqa: PT012
            async with open_on(mock_clock, executor) as engine:
                nursery.start_soon(time_goes_by)
                async with engine.generate("hello") as generation:
                    await anext(generation)
    assert states == [("ready", 0), ("ready", 59), ("stuck", 61), ("stuck", 89)]
    assert engine.state == "dead"
    assert generation.finish_reason == "error"
    executor.go.set()  # the thread comes back, finds nobody and ends


async def test_a_step_that_comes_back_in_time_is_forgiven(mock_clock: MockClock) -> None:
    executor = Stuck()
    async with open_on(mock_clock, executor) as engine:
        async with engine.generate("hello", max_tokens=5) as generation:
            await trio.to_thread.run_sync(executor.entered.wait)
            mock_clock.jump(89)
            await wait_all_tasks_blocked()
            assert engine.state == "stuck"
            executor.go.set()
            async for _ in generation:
                pass
        await engine.settled()
        mock_clock.jump(1)
        await wait_all_tasks_blocked()
        assert engine.state == "ready"
        assert engine.heartbeat_age == 0
        assert generation.finish_reason == "length"


@pytest.mark.parametrize("raises", [False, True])
async def test_leaving_beside_a_stuck_step_takes_bounded_time(mock_clock: MockClock, raises: bool) -> None:
    executor = Stuck()

    async def time_goes_by() -> None:
        await wait_all_tasks_blocked()
        mock_clock.jump(89)
        await wait_all_tasks_blocked()
        assert engine.state == "stuck"
        mock_clock.jump(2)

    async with trio.open_nursery() as nursery:
        with pytest.raises(KeyError if raises else EngineDead):  # noqa: PT012
            async with open_on(mock_clock, executor) as engine:
                async with engine.generate("hello"):
                    await trio.to_thread.run_sync(executor.entered.wait)
                nursery.start_soon(time_goes_by)
                if raises:
                    raise KeyError
    assert engine.state == "dead"
    executor.go.set()


async def test_the_body_may_turn_death_into_its_own_error() -> None:
    crash = ZeroDivisionError("crash")

    def step(now: float) -> Any:
        raise crash

    async with open_simulation() as other:
        with pytest.raises(LookupError) as caught:  # noqa: PT012
            async with open_simulation() as engine:
                engine._worker.core.step = step  # type: ignore[method-assign]
                try:
                    async with engine.generate([1]) as generation:
                        await anext(generation)
                except (EngineDead, trio.Cancelled) as error:
                    raise LookupError from error
        assert caught.value.__cause__ is not None
        async with other.generate([1], max_tokens=2) as generation:
            assert len([delta async for delta in generation]) == 2


async def test_death_inside_a_nursery_of_the_block() -> None:
    """What the engine's death does to the block's own nursery is not told twice."""

    def step(now: float) -> Any:
        raise ZeroDivisionError

    async def reader(engine: Engine) -> None:
        async with engine.generate([1]) as generation:
            async for _ in generation:
                pass

    with pytest.raises(EngineDead):  # noqa: PT012
        async with open_simulation() as engine:
            engine._worker.core.step = step  # type: ignore[method-assign]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reader, engine)
                nursery.start_soon(reader, engine)
                nursery.start_soon(trio.sleep_forever)


async def test_two_engines(open_fake: OpenFake) -> None:
    models = FakeModel(name="one"), FakeModel(name="two")
    async with open_fake(FakeExecutor(), models[0]) as one, open_fake(FakeExecutor(), models[1]) as two:
        async with one.generate("hello", max_tokens=30) as first, two.generate("hello", max_tokens=30) as second:
            async for _ in first:
                await anext(second)
        assert (one.name, two.name) == ("one", "two")
        assert first.text == second.text
        assert one.statistics().generation_tokens == two.statistics().generation_tokens == 30


def test_a_thread_that_outlives_its_run_ends() -> None:
    """When the Trio run is gone, delivering fails and the worker takes it as Stop."""
    worker = Worker(lambda: EngineCore(FakeExecutor(), EngineSettings()))

    def deliver(report: Report) -> None:
        raise trio.RunFinishedError

    worker.deliver = deliver
    worker.run()
    assert worker.stopped
