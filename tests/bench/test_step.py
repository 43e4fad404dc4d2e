"""The parts of a step add up to it, and what it must read is what its shape says."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import random_model
import step as bench
import torch


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


class Event:
    """What a GPU's event tells, by a clock that counts the calls."""

    now = 0

    def record(self) -> None:
        Event.now += 1
        self.at = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_times_of_a_device_are_between_its_events() -> None:
    class Owner:
        def launch(self, depth: int) -> int:
            return depth and self.launch(depth - 1) + 1

    parts, owner = bench.Parts(), Owner()
    parts.watch_device(owner, "launch", "device", Event)
    assert owner.launch(1) == 1
    assert owner.launch(0) == 0
    # from 1 to 4 with 2 to 3 inside, and from 5 to 6
    assert parts.device_times() == {"device": 3 + 1 + 1}
    assert not parts.device_times()
    assert not parts.seconds


def test_a_random_model_reads_what_its_shape_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(random_model.COPIED, "cpu", 2**16)
    report = tmp_path / "out.json"
    command = ["--random", "tiny", "--batch", "1", "3", "--context", "20", "--steps", "5", "--repeats", "2", "--json"]

    results = bench.run(bench.parse([*command, str(report), "--settings", '{"device": "cpu"}']))

    # width 32, 4 heads of 8, 2 of them for keys and values, 48 in the MLP, two norms; 2 layers
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32
    # the last norm and the head of 512 tokens; float32
    weights = 4 * (2 * layer + 32 + 512 * 32)
    assert weights == 127_616
    # keys and values of 2 heads of 8 in 2 layers
    token = 4 * 2 * 2 * 2 * 8
    for batch, runs in results.items():
        for figures in runs:
            # a token of the step with the prompts and four more, then the third of five steps
            assert figures["bytes_read"] == weights + batch * (20 + 5 + 2) * token
            assert figures["bytes_per_second"] * figures["the step"] / 1e3 == pytest.approx(
                figures["bytes_read"], rel=0.5
            )
            assert figures["share_of_copy_speed"] > 0
    printed = capsys.readouterr().out
    assert "| GB that a step must read | 0.00 | 0.00 |" in printed
    assert "bytes" not in printed
    assert orjson.loads(report.read_bytes())["results"]["3"] == results[3]


def test_the_share_is_of_what_a_copy_reads_and_writes() -> None:
    reading = random_model.Reading(weights=1000, per_token=10, copy_speed=8000.0)
    assert reading.figures(100, 0.5) == {
        "bytes_read": 2000,
        "bytes_per_second": 4000.0,
        "share_of_copy_speed": 0.5,
    }


def test_the_large_shape_is_an_8b_llama() -> None:
    model = random_model.build("llama-8b", torch.device("meta"), torch.bfloat16)
    assert sum(weight.numel() for weight in model.parameters()) == 8_030_261_248
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert random_model.weight_bytes(model) == 2 * (8_030_261_248 - 128_256 * 4096)
    assert torch.get_default_dtype() is torch.float32
