"""What is measured when all is, with programs that are not."""

from __future__ import annotations

import sys
from pathlib import Path

import all as bench
import pytest


def test_every_program_takes_its_arguments(tmp_path: Path) -> None:
    args = bench.parse([str(tmp_path), "--texts", "text.txt", "--repeats", "2", "--openvino", sys.executable])
    tasks = dict(bench.tasks(args))

    assert next(iter(tasks)) == "peers"
    for name, (program, *rest) in tasks.items():
        assert (bench.HERE / program).exists(), name
        module = __import__(program.removesuffix(".py"))
        if hasattr(module, "parse"):
            parsed = module.parse(rest)
            assert parsed.repeats == 2 and parsed.json is None


def test_tables_are_kept_and_failures_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("plot", ["plot.py", "--help"], tmp_path)
    assert not bench.run("serve", ["serve.py", "--no-such-option"], tmp_path)
    assert "usage:" in (tmp_path / "plot.txt").read_text()
    assert "exit code 2" in capsys.readouterr().out
