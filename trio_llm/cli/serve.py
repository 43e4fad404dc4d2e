"""`trio-llm serve`: the process around serve(), and its exit codes."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
from collections.abc import Callable

import trio

from trio_llm.cli.main import EXIT_ENGINE_DIED, EXIT_FAILED
from trio_llm.config import ServerSettings
from trio_llm.errors import EngineDead, TrioLLMError
from trio_llm.server import logs
from trio_llm.server.http import App
from trio_llm.server.lifecycle import OpenEngine, root_error
from trio_llm.server.serve import serve
from trio_llm.spinning import spin_shortly

HEARTBEAT = 5.0
"""Seconds between proofs that the interpreter still runs."""


def run(settings: ServerSettings, *, complain: Callable[[str], None], open_engine: OpenEngine | None = None) -> int:
    """Serve in this process until it is told to stop.

    Args:
        open_engine: opens the engine, in place of one for `settings.model`.
        complain: tells people in one line why it failed.

    Returns:
        The exit code.
    """
    logs.configure(settings)
    # imports make half a million objects that stay; to look for garbage among them takes a fifth of the start
    gc.disable()
    try:
        if open_engine is None:
            _fetch(settings.model)
        _set_process(settings)
        trio.run(_main, settings, open_engine)
    except BaseException as error:
        return _exit_code(root_error(error), complain)
    finally:
        gc.enable()
    complain("drained, good bye")
    return 0


def _exit_code(error: BaseException, complain: Callable[[str], None]) -> int:
    match error:
        case EngineDead():
            complain(f"the engine died: {error.message}")
            # its thread may hang, and an orderly exit would wait for it
            logging.shutdown()
            sys.stdout.flush()
            os._exit(EXIT_ENGINE_DIED)
        case TrioLLMError():
            complain(error.message)
            return EXIT_FAILED
        case KeyboardInterrupt():  # before the signals were ours
            complain("interrupted")
            return EXIT_FAILED
        case _:
            raise error


def _fetch(model: str) -> None:
    from trio_llm.models.catalogue import CATALOGUE, find

    if model in CATALOGUE and find(CATALOGUE[model]) is None:
        from trio_llm.cli.pull import pull

        pull(model)


def _set_process(settings: ServerSettings) -> None:
    spin_shortly()
    if settings.switch_interval is not None:
        sys.setswitchinterval(settings.switch_interval)
    if settings.num_threads is not None:
        import torch

        torch.set_num_threads(settings.num_threads)


async def _main(settings: ServerSettings, open_engine: OpenEngine | None) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_beat, settings.engine.step_timeout + settings.engine.step_grace)
        await serve(settings, open_engine=open_engine, on_ready=_begin)
        nursery.cancel_scope.cancel(reason="served to the end")


async def _beat(limit: float) -> None:
    """Have the interpreter end the process, with a dump of all threads, when nobody can: a thread that
    hangs with the interpreter's lock stops every watchdog that is written in Python."""
    try:
        while True:
            faulthandler.dump_traceback_later(limit, exit=True)
            await trio.sleep(HEARTBEAT)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _begin(url: str, app: App) -> None:
    # what was made until now is never looked at again: a look at all of it holds up everybody for a fifth of a second
    gc.freeze()
    gc.enable()
    _announce(url, app)


def _announce(url: str, app: App) -> None:
    (name, engine), *_ = app.registry.items()
    address = f"--unix-socket {app.settings.uds} http://localhost" if app.settings.uds else url
    key = " -H 'Authorization: Bearer ...'" if app.access.required else ""
    if engine.task == "embed":
        what, path, fields = "texts of up to", "embeddings", '"input": "Hello!"'
    else:
        what, path, fields = "a context of", "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
    print(f"{name} is ready at {url}, with {what} {engine.max_model_len} tokens. Try:")
    print(
        f"  curl {address}/v1/{path}{key} -H 'Content-Type: application/json' "
        f"""-d '{{"model": "{name}", {fields}}}'""",
        flush=True,
    )
