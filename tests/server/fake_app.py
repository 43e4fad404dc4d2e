"""A server without a model, for tests that start it as a program."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from trio_llm.config import resolve
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.step import StepPlan
from trio_llm.engine.engine import Engine
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.simulation import FakeModel
from trio_llm.errors import ModelLoadError
from trio_llm.server.app import create_app
from trio_llm.server.http import App

INFO = ExecutorInfo(num_blocks=512, block_size=4, vocab_size=256, max_model_len=1024)


def _pace(plan: StepPlan) -> None:
    time.sleep(0.005)  # so that a stream lasts some seconds


def fake_engine() -> AbstractAsyncContextManager[Engine]:
    """An engine that takes 5 ms a step, and breaks on a prompt of one "!"."""

    def next_token(context: list[int], index: int) -> int:
        if context[:1] == [ord("!")]:
            raise RuntimeError("broken on purpose")
        return ord("a") + index % 26

    past_help = RuntimeError("broken on purpose")
    executor = FakeExecutor(INFO, on_launch=_pace, next_token=next_token, broken=past_help)
    return open_engine(FakeModel(), executor=executor)


def create() -> App:
    """For `hypercorn -k trio 'fake_app:create()'`."""
    app = create_app()
    app.open_engine = fake_engine
    return app


def create_without_model() -> App:
    """An application whose model cannot be loaded."""

    @asynccontextmanager
    async def no_engine() -> AsyncIterator[Engine]:
        raise ModelLoadError("there is no such model")
        yield

    app = create_app()
    app.open_engine = no_engine
    return app


def main() -> None:
    """As `trio-llm serve`, with settings from the environment."""
    from trio_llm.cli.serve import run

    def complain(line: str) -> None:
        sys.stderr.write(f"trio-llm: {line}\n")

    sys.exit(run(resolve(), complain=complain, open_engine=fake_engine))


if __name__ == "__main__":
    main()
