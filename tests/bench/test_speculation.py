"""The comparison of an engine that drafts and one that does not, on engines that need no weights."""

from __future__ import annotations

import pytest
import speculation as bench

from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.simulation import open_simulation


def executor() -> FakeExecutor:
    info = ExecutorInfo(num_blocks=1024, block_size=16, vocab_size=128, max_model_len=1024)
    return FakeExecutor(info, next_token=lambda context, index: ord("a") + index % 3)


async def test_both_engines_do_the_same_work_in_turns() -> None:
    order = []
    executors = executor(), executor()
    for name, each in zip(("off", "on"), executors, strict=True):
        each.on_launch = lambda plan, name=name: order.append(name)
    options = bench.parse(["--repeats", "2", "--concurrency", "1", "2", "--max-tokens", "30", "--texts", "repetitive"])
    async with (
        open_simulation(executor=executors[0], seconds_per_turn=1e-5) as off,
        open_simulation(executor=executors[1], seconds_per_turn=1e-5, speculative_method="ngram") as on,
    ):
        results = await bench.measure(off, on, options)
    assert [(row["text"], row["clients"], len(row["repeats"])) for row in results] == [
        ("repetitive", 1, 2),
        ("repetitive", 2, 2),
    ]
    changes = [name for place, name in enumerate(order) if place == 0 or order[place - 1] != name]
    # who goes first alternates, so between two pairs nobody changes, but for the next number of clients
    assert changes == ["on", "off"] * 4
    for row in results:
        assert row["drafted"]["low"] > 0 and row["accepted"]["low"] > 0
        assert row["steps"]["high"] < 30 <= row["off_steps"]["low"]
        assert row["off_drafted"]["high"] == 0
        assert row["ratio"]["low"] > 0
    assert len(bench.table(results).splitlines()) == 4


@pytest.mark.parametrize("name", bench.TEXTS)
def test_prompts_are_as_long_as_asked_and_do_not_begin_alike(name: str) -> None:
    text = bench.TEXTS[name]
    prompts = [text.prompt(number, 100) for number in range(20)]
    assert len({prompt[:10] for prompt in prompts}) == 20
    assert all(50 < len(prompt.split()) < 150 for prompt in prompts)
    assert prompts == [text.prompt(number, 100) for number in range(20)]
