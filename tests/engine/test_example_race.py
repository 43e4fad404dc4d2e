"""The embedding example of the documentation, run with models that cost nothing."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trio_llm.core.executor import FakeExecutor
from trio_llm.engine.engine import Engine
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.simulation import FakeModel


@pytest.fixture
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "example_race.py"
    spec = importlib.util.spec_from_file_location("example_race", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_race(example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs, is_over = threading.Event(), threading.Event()

    def open_fake(model: str, *, name: str, **settings: Any) -> AbstractAsyncContextManager[Engine]:
        def next_token(_: list[int], index: int) -> int:
            if model == "bore":
                runs.set()
                # however the threads are scheduled, it is still at it when the other is done
                assert index < 8 or is_over.wait(30)
                return ord(".")
            assert runs.wait(30)  # or the other might still be at its prompt when this one is done
            return b"Hello!\n"[index]

        executor = FakeExecutor(next_token=next_token)
        return open_engine(FakeModel(eos_token_ids={ord("\n")}), executor=executor, name=name, **settings)

    async def report_at_last(engines: Sequence[Engine]) -> None:
        is_over.set()
        await report(engines)

    report = example.report
    monkeypatch.setattr(example, "report", report_at_last)
    monkeypatch.setattr(example, "open_engine", open_fake)
    await example.main("Hi", ["bore", "terse"])
    assert capsys.readouterr().out.splitlines() == [
        "2:terse won: Hello!",
        "1:bore: 1 abort; 64 of 64 KV blocks free",
        "2:terse: 1 stop; 64 of 64 KV blocks free",
    ]
