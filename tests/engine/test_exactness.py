"""What the executor knows of its exactness, the engine says."""

from __future__ import annotations

import attrs
import pytest

from trio_llm.core.executor import FakeExecutor


@pytest.mark.parametrize("batch_exact", [False, True])
async def test_the_engine_publishes_batch_exact(open_fake, batch_exact: bool) -> None:
    executor = FakeExecutor()
    executor.info = attrs.evolve(executor.info, batch_exact=batch_exact)
    async with open_fake(executor=executor) as engine:
        assert engine.batch_exact is batch_exact
