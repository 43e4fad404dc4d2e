"""The in-process load, on an engine that needs no weights."""

from __future__ import annotations

from typing import Any

import attrs
import engine as bench
import pytest
from answers import table
from load import Load

from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.simulation import open_simulation

LOAD = Load(
    model="fake",
    prompt_tokens=20,
    max_tokens=6,
    seed=0,
    shared_prefix=False,
    timeout=60,
    extra_body={},
    api_key=None,
)


def executor() -> FakeExecutor:
    info = ExecutorInfo(num_blocks=1024, block_size=16, vocab_size=128, max_model_len=1024)
    return FakeExecutor(info, next_token=lambda context, index: ord("a"))


async def test_every_client_asks_for_its_share_and_all_is_counted() -> None:
    fake = executor()
    async with open_simulation(executor=fake) as engine:
        options = bench.parse(["--concurrency", "1", "4", "--requests", "8", "--repeats", "2"])
        results = await bench.measure_engine(engine, LOAD, options)

    assert [result["concurrency"] for result in results] == [1, 4]
    for result in results:
        assert result["errors"] == {"median": 0, "low": 0, "high": 0}
        assert result["requests"]["median"] == 8
        assert result["output_tokens"]["median"] == 6
        assert result["step_ms"]["low"] > 0
    # warm-up and two runs of each
    assert max(len(plan.rows) for plan in fake.plans[: 17 * 6]) == 1
    assert max(len(plan.rows) for plan in fake.plans) in (2, 3, 4)
    assert len(table(results).splitlines()) == 4
    assert not fake.sequences, "everything was released"


async def test_a_request_that_is_refused_ends_the_measurement() -> None:
    async with open_simulation(executor=executor()) as engine:
        options: Any = bench.parse(["--concurrency", "1", "--requests", "1", "--repeats", "1"])
        with pytest.raises(SystemExit, match="ContextLengthExceeded"):
            await bench.measure_engine(engine, attrs.evolve(LOAD, max_tokens=100_000), options)
