"""The figures of the documentation, from results that are made up."""

from __future__ import annotations

from pathlib import Path

import orjson
import plot
import pytest


def results(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    columns = ("output_tokens_per_s", "ttft_p50_ms", "itl_p50_ms")
    peers = {
        name: {
            str(clients): {column: [clients * speed, clients * speed + 1] for column in columns} for clients in (1, 8)
        }
        for name, speed in (("ours", 10.0), ("other", 5.0))
    }
    run = {"the step": 5.0, "kernel": 3.0, "sampling": 2.0, "cores_busy_before": 0.0, "beside it: hand over": 9.0}
    figures = {"prefill_1024": [2000.0, 2100.0], "prefill_4096": [1500.0], "ttft_long_ms": [1.0]}
    for name, each in (("peers", peers), ("step", {"1": [run, run], "8": [run]}), ("long", figures)):
        (directory / f"{name}.json").write_bytes(orjson.dumps({"results": each}))
    return directory


def test_the_same_results_give_the_same_figures(tmp_path: Path) -> None:
    first = plot.draw(results(tmp_path / "results"), tmp_path / "first")
    second = plot.draw(tmp_path / "results", tmp_path / "second")

    assert [path.name for path in first] == ["output.svg", "latency.svg", "step.svg", "prefill.svg"]
    assert [path.read_text() for path in first] == [path.read_text() for path in second]
    assert all(path.read_text().startswith("<?xml") and path.stat().st_size < 60_000 for path in first)
    assert "other" in first[0].read_text() and "hand over" not in first[2].read_text()


def test_what_was_not_measured_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = results(tmp_path / "results")
    (source / "peers.json").unlink()

    assert [path.name for path in plot.draw(source, tmp_path)] == ["step.svg", "prefill.svg"]
    assert "output: there is no peers.json" in capsys.readouterr().out
