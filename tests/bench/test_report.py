"""What is said of the machine and of the spread of figures."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import report
from report import arguments, look, machine, note, quiet, repeats, spread, spread_of, write


def looks(*busy: float) -> list[dict[str, float]]:
    return [{"cores_busy_before": value, "load_average_before": 1.5} for value in busy]


def test_an_idle_machine() -> None:
    idle = quiet(looks(0.01, 0.04))

    assert idle == {"is_idle": True, "cores_busy_before": 0.04, "load_average_before": 1.5}
    assert note(idle) == (
        "the machine was idle: other programs used at most 0.04 cores before a run; load average at most 1.50"
    )


def test_a_busy_machine_is_told_aloud() -> None:
    assert note(quiet(looks(0.0, 0.7, 0.0))).startswith("THE MACHINE WAS NOT IDLE, do not trust these figures: ")


def test_a_gpu_is_named_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "gpu" not in machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert machine()["gpu"] == "Some GPU"
    monkeypatch.delitem(sys.modules, "torch")
    assert "gpu" not in machine()


def test_what_cannot_be_known() -> None:
    assert "what other programs did is not known" in note(quiet(looks(math.nan)))


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells")
def test_a_program_that_runs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # the load of a test machine is anything: enough that one more program counts, and this one does not
    monkeypatch.setattr(report, "LOOK", 0.3)
    busy = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            assert look()["cores_busy_before"] > report.BUSY
        finally:
            other.kill()


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == "2.0 [1.0-3.0]"
    assert spread_of([{"a": 1.0}, {"a": 5.0}]) == {"a": {"median": 3.0, "low": 1.0, "high": 5.0}}


def test_five_runs_unless_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = arguments("A program.\n\nMore.")
    assert list(repeats(parser.parse_args([]))) == [0, 1, 2, 3, 4]
    clock = iter([0.0, 7.0, 14.0])
    monkeypatch.setattr(report.time, "monotonic", lambda: next(clock))
    assert list(repeats(parser.parse_args(["--seconds", "10"]))) == [0, 1]


def test_what_is_written(tmp_path: Path) -> None:
    args = arguments("").parse_args(["--json", str(tmp_path / "out.json"), "--label", "x"])
    args.api_key = "secret"

    write(args, {1: math.nan}, idle=quiet(looks(0.0)))

    document = orjson.loads((tmp_path / "out.json").read_bytes())
    assert document["results"] == {"1": None} and document["settings"]["label"] == "x"
    assert document["idle"]["is_idle"] and document["machine"]["cores"] >= 1
    assert b"secret" not in (tmp_path / "out.json").read_bytes()
