from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from trio_llm.core.executor import FakeExecutor
from trio_llm.engine.engine import Engine
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.simulation import FakeModel, open_simulation

OpenFake = Callable[..., AbstractAsyncContextManager[Engine]]


@pytest.fixture(params=["thread", "task"])
def open_fake(request: pytest.FixtureRequest) -> OpenFake:
    """open_fake(executor=..., model=..., **settings): an engine in a thread, and once more in a task."""

    def open_(
        executor: FakeExecutor | None = None, model: FakeModel | None = None, **settings: Any
    ) -> AbstractAsyncContextManager[Engine]:
        if request.param == "task":
            return open_simulation(model, executor=executor, **settings)
        return open_engine(model or FakeModel(), executor=executor or FakeExecutor(), **settings)

    return open_


CheckFree = Callable[[Engine], Any]


@pytest.fixture
def check_free() -> CheckFree:
    """await check_free(engine): nothing is in flight and every block is free."""

    async def check(engine: Engine) -> None:
        core = await engine.settled()
        engine._worker.core.check()
        assert (core.num_running, core.num_waiting) == (0, 0)
        assert core.num_free_blocks == core.num_blocks
        assert engine.statistics().num_requests == 0
        assert engine._num_choices == 0
        assert not engine._worker.core.executor.sequences  # type: ignore[attr-defined]

    return check
