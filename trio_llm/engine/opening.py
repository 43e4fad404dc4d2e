"""An engine for any model, whichever kind it needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from trio_llm.config import EngineSettings
from trio_llm.engine.embedding import Embedder, open_embedder
from trio_llm.engine.engine import Engine
from trio_llm.engine.nursery import open_engine
from trio_llm.models.encoders import task_of


@asynccontextmanager
async def open_model(
    model: str, *, settings: EngineSettings | None = None, name: str | None = None, **overrides: Any
) -> AsyncIterator[Engine | Embedder]:
    """`open_embedder` for an embedding model, `open_engine` for any other; arguments and errors are theirs."""
    task = await trio.to_thread.run_sync(partial(task_of, model, settings=settings), abandon_on_cancel=True)
    if task == "embed":
        async with open_embedder(model, settings=settings, name=name, **overrides) as embedder:
            yield embedder
    else:
        async with open_engine(model, settings=settings, name=name, **overrides) as engine:
            yield engine
