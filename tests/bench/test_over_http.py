"""The program that asks one engine in process and over HTTP, on an engine that needs no weights."""

from __future__ import annotations

import over_http
import protocol_streams

from trio_llm.config import ServerSettings
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.registry import Registry
from trio_llm.engine.simulation import FakeModel
from trio_llm.server.app import create_app

INFO = ExecutorInfo(num_blocks=512, block_size=16, vocab_size=256, max_model_len=4096)


async def test_both_ways_ask_for_as_much_and_for_nothing_twice() -> None:
    executor = FakeExecutor(INFO, next_token=lambda context, index: ord("a"))
    args = over_http.parse(
        [
            "--model",
            "fake",
            "--concurrency",
            "2",
            "--requests",
            "4",
            "--max-tokens",
            "5",
            "--prompt-tokens",
            "40",
            "--repeats",
            "2",
        ]
    )
    async with open_engine(FakeModel(), executor=executor) as engine:
        app = create_app(ServerSettings(log_level="error"), registry=Registry({"fake": engine}))
        async with protocol_streams.served(app) as port:
            results = await over_http.measure(engine, port, args)
        statistics = engine.statistics()
    (row,) = results
    assert [len(row["repeats"]), row["clients"]] == [2, 2]
    assert all(pair["http"] > 0 and pair["ratio"] == pair["http"] / pair["in_process"] for pair in row["repeats"])
    # three pairs of four requests each, and over HTTP two that warm up
    assert statistics.generation_tokens == 3 * 5 * (4 + 4 + 2)
    assert statistics.core.num_cache_hits < 0.5 * statistics.core.num_cache_queries
    assert "| 2 |" in over_http.table(results)
