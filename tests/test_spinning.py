"""Threads of tensor operations sleep soon, unless the environment wants otherwise."""

from __future__ import annotations

import os
import runpy

import pytest

from trio_llm.spinning import SPIN_COUNT, spin_shortly


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_it_is_set(environment: pytest.MonkeyPatch) -> None:
    spin_shortly()

    assert os.environ["GOMP_SPINCOUNT"] == str(SPIN_COUNT)


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "1"), ("OMP_WAIT_POLICY", "ACTIVE")])
def test_the_environment_comes_first(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    environment.setenv(name, value)

    spin_shortly()

    assert os.environ.get("GOMP_SPINCOUNT") == (value if name == "GOMP_SPINCOUNT" else None)


def test_hypercorn_s_command_sets_it_too(environment: pytest.MonkeyPatch) -> None:
    runpy.run_module("trio_llm.hypercorn_config")

    assert os.environ["GOMP_SPINCOUNT"] == str(SPIN_COUNT)
