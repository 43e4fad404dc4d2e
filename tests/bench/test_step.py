"""The parts of a step add up to it."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import step as bench


def test_own_times_leave_out_what_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    parts = bench.Parts()
    with parts.time("outer"), parts.time("inner"):
        pass
    assert dict(parts.seconds) == {"inner": 2.0, "outer": 5.0}


def test_an_engine_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "out.json"
    arguments = [
        "--scheduler",
        "--batch",
        "1",
        "5",
        "--context",
        "20",
        "--steps",
        "6",
        "--repeats",
        "2",
        "--json",
        str(report),
    ]

    results = bench.run(bench.parse(arguments))

    assert list(results) == [1, 5]
    parts = {"schedule", "commit", "between the parts", "the step", "beside it: hand over"}
    for runs in results.values():
        assert len(runs) == 2
        for figures in runs:
            assert parts <= figures.keys()
            assert all(figures[name] > 0 for name in parts)
    assert "| the step |" in capsys.readouterr().out
    document = orjson.loads(report.read_bytes())
    assert document["results"]["5"] == results[5]
    assert document["idle"]["cores_busy_before"] >= 0
