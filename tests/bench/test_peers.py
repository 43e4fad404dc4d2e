"""What is made of several servers' figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peers
import pytest
from peers import OURS, Peer, combine, parse, table
from processes import DoesNotServe


def result(concurrency: int, *speeds: float) -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "repeats": [
            {"output_tokens_per_s": speed, "ttft_p50_ms": 100, "itl_p50_ms": 10, "errors": 0} for speed in speeds
        ],
    }


def test_rounds_are_put_together_and_ratios_are_of_medians() -> None:
    ours = combine([[result(1, 10, 30), result(8, 80)], [result(1, 20), result(8, 100)]])
    other = combine([[result(1, 5), result(8, 180)]])

    text = table({OURS: ours, "other": other})

    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert rows == [
        [OURS, "1", "3", "20.0 [10.0-30.0]", "", "100", "10.0", "0"],
        [OURS, "8", "2", "90.0 [80.0-100.0]", "", "100", "10.0", "0"],
        ["other", "1", "1", "5.0 [5.0-5.0]", "4.00 times", "100", "10.0", "0"],
        ["other", "8", "1", "180.0 [180.0-180.0]", "0.50 times", "100", "10.0", "0"],
    ]


def test_only_who_is_named_and_there_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "weights.gguf"
    arguments = ["--gguf", str(weights), "--concurrency", "1", "4"]

    assert [peer.name for peer in peers.peers(parse([*arguments, "--vllm", "/no/such/vllm"]))] == [OURS]
    said = capsys.readouterr().err
    assert "--openvino (not named)" in said and "--vllm (there is no program /no/such/vllm)" in said

    names = ("openvino", "llama-server", "transformers", "vllm")
    everyone = peers.peers(
        parse([*arguments, "--directory", "d", *(word for name in names for word in (f"--{name}", sys.executable))])
    )
    assert [peer.name for peer in everyone] == [OURS, "openvino-genai", "llama.cpp", "transformers serve", "vllm"]
    assert str(weights) in everyone[1].command and str(weights) in everyone[2].command
    assert everyone[2].command[list(everyone[2].command).index("-np") + 1] == "4"
    assert capsys.readouterr().err == ""


def test_a_program_measures_itself(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, pathlib, sys\n"
        "arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "pathlib.Path(arguments['--json']).write_text(json.dumps({'results': [arguments['--seed']]}))\n"
    )
    peer = Peer("own", [sys.executable, str(program)])

    assert peer.measure(parse(["--seed", "7", "--concurrency", "1"])) == ["7"]


def test_a_server_that_does_not_come_up_says_why() -> None:
    peer = Peer("broken", [sys.executable, "-c", "raise SystemExit('no such model')"], port=1, model="m")

    with pytest.raises(DoesNotServe, match="no such model"):
        peer.measure(parse(["--concurrency", "1"]))


def test_a_program_that_fails_is_not_measured() -> None:
    with pytest.raises(DoesNotServe, match="could not be measured"):
        Peer("broken", [sys.executable, "-c", "raise SystemExit(3)"]).measure(parse(["--concurrency", "1"]))
