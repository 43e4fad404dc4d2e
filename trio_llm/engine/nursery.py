"""The nursery that an engine lives in: its thread, its watchdog, and the caller's block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import trio

from trio_llm.config import EngineSettings
from trio_llm.core.executor import Executor
from trio_llm.engine.engine import Engine
from trio_llm.engine.loading import Load, Model, load_core
from trio_llm.engine.worker import Drive, drive_in_thread
from trio_llm.errors import EngineDead


@asynccontextmanager
async def open_engine(
    model: str | Model,
    *,
    executor: Executor | None = None,
    settings: EngineSettings | None = None,
    name: str | None = None,
    **overrides: Any,
) -> AsyncIterator[Engine]:
    """Load a model and run an engine for it as long as the block runs.

    Args:
        model: a catalogue name, a Hugging Face directory or name, a .gguf file, or a model
            that is loaded already.
        executor: runs the steps in place of the model.
        settings: limits; `overrides` replace single fields of it.
        name: what the engine is called; by default the model's name.

    Yields:
        The engine, ready.  At the end of the block every request that still runs ends.

    Raises:
        ModelLoadError: the model could not be found or loaded.
        ConfigurationError: a setting is wrong.
        EngineDead: the engine broke or hung; the block was cancelled.
    """
    settings = attrs.evolve(settings or EngineSettings(), **overrides)
    async with run_engine(partial(load_core, model, executor, settings), settings, name=name) as engine:
        yield engine


@asynccontextmanager
async def run_engine(
    load: Load,
    settings: EngineSettings,
    *,
    name: str | None = None,
    drive: Drive = drive_in_thread,
    **worker_options: Any,
) -> AsyncIterator[Engine]:
    """The nursery of an engine; `open_engine` with its parts exchangeable.

    The worker and the watchdog are shielded: whatever happens to the block, the worker is
    told to stop and waited for, and only the watchdog gives up on it.  Exceptions of the
    block leave as they are; a broken engine leaves as one EngineDead.
    """
    engine = Engine(load, settings, name, **worker_options)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine._work, drive)
        nursery.start_soon(engine._watch)
        try:
            await engine._wait_until_loaded()
            with engine._body_scope:
                yield engine
        except BaseException as error:
            failure = error
        finally:
            nursery.cancel_scope.shield = True
            engine._close()
    try:
        if engine._death is not None and (failure is None or is_echo(failure)):
            raise engine._death
        if failure is not None:
            raise failure
    finally:
        del failure  # it would be in its own traceback, a cycle that keeps everything in it alive


def is_echo(error: BaseException) -> bool:
    """Whether an exception is only what a dead engine makes of those who used it."""
    if isinstance(error, BaseExceptionGroup):
        return error.split((trio.Cancelled, EngineDead))[1] is None
    return isinstance(error, trio.Cancelled | EngineDead)
