"""serve(): the process.  Listener, engine, signals and the drain, in one nursery."""

from __future__ import annotations

import logging
import os
import signal
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import structlog
import trio
from hypercorn.config import Config

from trio_llm.config import ServerSettings, resolve
from trio_llm.engine.registry import Registry
from trio_llm.errors import ConfigurationError, ShuttingDown
from trio_llm.server.app import create_app
from trio_llm.server.connection import serve_connections
from trio_llm.server.http import App
from trio_llm.server.lifecycle import OpenEngine

logger = structlog.get_logger(__name__)

LAST_WORDS = 2.0
"""Seconds that requests which are cut off have to write why."""
BACKLOG = 1024


def _leave(code: int) -> None:
    """Leave the process without waiting for its threads."""
    os._exit(code)


async def serve(
    settings: ServerSettings | None = None,
    *,
    open_engine: OpenEngine | None = None,
    on_ready: Callable[[str, App], object] = lambda url, app: None,
    leave: Callable[[int], object] = _leave,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Load a model and serve it until SIGTERM or SIGINT, then drain.

    It listens before it loads: a busy port fails at once, and while the model is being loaded
    /health/live answers 200 and everything else 503.

    On the first signal readiness turns to 503; after `drain_delay` new requests get 503 and those
    in flight go on for up to `shutdown_timeout`, then get an error.  A second signal ends the
    waiting at once.

    Args:
        settings: None reads the environment, and the file that TRIO_LLM_CONFIG names.
        open_engine: opens the engine, in place of one for `settings.model`.
        on_ready: called with the URL and the application when requests are taken.
        leave: ends the process with an exit code; called only where to go on would be to wait for a
            thread that cannot be interrupted (a model that is being loaded, a step that hangs).
        task_status: started with the URL when requests are taken.

    Raises:
        ConfigurationError: a setting is wrong, or the address cannot be listened on.
        ModelLoadError: the model could not be loaded.
        EngineDead: the engine broke or hung; the requests in flight were told so.
    """
    settings = settings or resolve()
    app = create_app(settings, registry=Registry())
    tls = _tls(settings)
    listeners, url = await _listen(settings)
    lifecycle = app.lifecycle
    terminate, hurry, closed = trio.Event(), trio.Event(), trio.Event()
    async with trio.open_nursery() as listening:
        await listening.start(_receive_signals, terminate, hurry)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(
                    serve_connections,
                    app,
                    listeners,
                    config=_hypercorn_config(settings),
                    write_timeout=settings.write_timeout,
                    tls=tls,
                    stop=closed.wait,
                    grace=LAST_WORDS,
                )
            )
            nursery.start_soon(lifecycle.run_engine, open_engine or app.open_engine, settings.served_model_name)
            await first(terminate.wait, lifecycle.opened.wait)
            if not lifecycle.opened.is_set():
                logger.warning("told to stop while the model was being loaded")
                leave(0)
            elif lifecycle.failure is None:
                task_status.started(url)
                on_ready(url, app)
                await first(terminate.wait, lifecycle.failed.wait)
                await _drain(app, hurry)
            closed.set()
            lifecycle.stopping.set()
            await first(lifecycle.stopped.wait, partial(_after, hurry, LAST_WORDS))
            if not lifecycle.stopped.is_set():
                leave(0)
        listening.cancel_scope.cancel(reason="all is closed")
    if settings.uds is not None:
        await trio.Path(settings.uds).unlink(missing_ok=True)
    if lifecycle.failure is not None:
        raise lifecycle.failure
    logger.info("drained")


async def _drain(app: App, hurry: trio.Event) -> None:
    """Let what is in flight finish, or tell it why not."""
    settings, lifecycle = app.settings, app.lifecycle
    if lifecycle.failure is None:
        logger.info("draining", in_flight=len(app.exchanges))
        lifecycle.leaving = True
        with trio.move_on_after(settings.drain_delay):
            await first(hurry.wait, lifecycle.failed.wait)
        lifecycle.drain()
        with trio.move_on_after(settings.shutdown_timeout):
            await first(app.all_left, hurry.wait, lifecycle.failed.wait)
    if app.exchanges:
        logger.warning("requests are cut off", count=len(app.exchanges))
    for exchange in list(app.exchanges):
        exchange.fail(ShuttingDown("the server shut down before the request was done"))
    with trio.move_on_after(LAST_WORDS):
        await app.all_left()


async def first(*waits: Callable[[], Awaitable[object]]) -> None:
    """Return when the first of several waits does."""

    async def wait(one: Callable[[], Awaitable[object]]) -> None:
        await one()
        nursery.cancel_scope.cancel(reason="another wait was first")

    async with trio.open_nursery() as nursery:
        for one in waits:
            nursery.start_soon(wait, one)


async def _after(event: trio.Event, seconds: float) -> None:
    await event.wait()
    await trio.sleep(seconds)


async def _receive_signals(
    terminate: trio.Event, hurry: trio.Event, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            if terminate.is_set():
                hurry.set()
            terminate.set()


def _hypercorn_config(settings: ServerSettings) -> Config:
    config = Config()
    config.errorlog = logging.getLogger("hypercorn.error")  # the handlers are ours
    config.accesslog = None
    config.keep_alive_timeout = settings.keep_alive_timeout
    config.include_server_header = False
    return config


def _tls(settings: ServerSettings) -> ssl.SSLContext | None:
    if settings.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        files = " and ".join(filter(None, (settings.ssl_certfile, settings.ssl_keyfile)))
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"no certificate with its key in {files}: {reason}", field="ssl_certfile") from error
    return context


def _no_password() -> str:
    """OpenSSL would ask for it on the terminal."""
    raise ValueError("the key is encrypted")


async def _listen(settings: ServerSettings) -> tuple[list[trio.SocketListener], str]:
    """Bind, before anything that takes long; and the URL that it can be reached by."""
    if settings.uds is not None:
        return [_listen_unix(settings.uds)], f"unix:{settings.uds}"
    try:
        listeners = await trio.open_tcp_listeners(settings.port, host=settings.host, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(f"cannot listen on {settings.host}:{settings.port}: {reason}", field="port") from error
    port = listeners[0].socket.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return listeners, f"{'http' if settings.ssl_certfile is None else 'https'}://{host}:{port}"


def _listen_unix(path: str) -> trio.SocketListener:
    sock = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).exists() and stat.S_ISSOCK(Path(path).stat().st_mode) and not _answers(path):
            Path(path).unlink()  # left behind by a process that is gone
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigurationError(f"cannot listen on {path}: {error.strerror or error}", field="uds") from error
    return trio.SocketListener(trio.socket.from_stdlib_socket(sock))


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0
