"""What `trio-llm serve` adds to serve()."""

from __future__ import annotations

import faulthandler
import gc

import pytest
import trio

from trio_llm.cli import serve
from trio_llm.config import ServerSettings
from trio_llm.errors import ConfigurationError, EngineDead, ModelLoadError


async def test_the_interpreter_is_told_that_it_lives(monkeypatch, autojump_clock):
    calls = []

    def arm(limit, **options):
        calls.append((limit, options))

    monkeypatch.setattr(faulthandler, "dump_traceback_later", arm)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("cancelled"))
    with trio.move_on_after(3 * serve.HEARTBEAT - 1):
        await serve._beat(120)
    assert calls == [(120, {"exit": True})] * 3 + ["cancelled"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelLoadError("no model"), 1),
        (ConfigurationError("no port"), 1),
        (ExceptionGroup("", [ValueError(), ModelLoadError("no model")]), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_exit_codes(monkeypatch, error, code):
    lines = []

    def run(*_):
        raise error

    monkeypatch.setattr(trio, "run", run)
    monkeypatch.setattr(serve.logs, "configure", lambda settings: None)
    monkeypatch.setattr(serve, "_fetch", lambda model: None)
    assert serve.run(ServerSettings(), complain=lines.append) == code
    assert len(lines) == 1


def test_a_dead_engine_leaves_without_waiting(monkeypatch):
    left = []

    def run(*_):
        raise EngineDead("it hangs")

    def leave(code):
        left.append(code)
        raise SystemExit

    monkeypatch.setattr(trio, "run", run)
    monkeypatch.setattr(serve.os, "_exit", leave)
    monkeypatch.setattr(serve.logs, "configure", lambda settings: None)
    monkeypatch.setattr(serve, "_fetch", lambda model: None)
    with pytest.raises(SystemExit):
        serve.run(ServerSettings(), complain=lambda line: None)
    assert left == [3]


def test_process_settings(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # leaves the environment as it is
    seen = []
    monkeypatch.setattr(serve.sys, "setswitchinterval", seen.append)
    serve._set_process(ServerSettings())
    assert seen == []
    serve._set_process(ServerSettings(switch_interval=0.001))
    assert seen == [0.001]


def test_threads_spin_only_shortly(monkeypatch):
    called = []
    monkeypatch.setattr(serve, "spin_shortly", lambda: called.append(True))
    serve._set_process(ServerSettings())
    assert called == [True]


def test_garbage_is_not_looked_for_until_it_serves(monkeypatch):
    seen = []

    def run(main, *arguments):
        seen.append(gc.isenabled())
        before = gc.get_freeze_count()
        serve._begin("http://127.0.0.1:1", None)
        seen.extend([gc.isenabled(), gc.get_freeze_count() > before])

    monkeypatch.setattr(trio, "run", run)
    monkeypatch.setattr(serve.logs, "configure", lambda settings: None)
    monkeypatch.setattr(serve, "_fetch", lambda model: None)
    monkeypatch.setattr(serve, "_announce", lambda url, app: None)
    monkeypatch.setattr(serve, "spin_shortly", lambda: None)
    try:
        assert serve.run(ServerSettings(), complain=lambda line: None) == 0
        assert seen == [False, True, True]
    finally:
        gc.unfreeze()


def test_garbage_is_looked_for_again_after_a_failed_start(monkeypatch):
    monkeypatch.setattr(serve.logs, "configure", lambda settings: None)

    def fetch(model):
        assert not gc.isenabled()
        raise ModelLoadError("no network")

    monkeypatch.setattr(serve, "_fetch", fetch)
    assert serve.run(ServerSettings(), complain=lambda line: None) == 1
    assert gc.isenabled()
