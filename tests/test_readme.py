"""The README's commands and programs are what it says they are."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trio_llm

ROOT = Path(__file__).parents[1]


def blocks(language: str) -> list[str]:
    """The fenced blocks of that language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def shell(script: str) -> str:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
    ).stdout


def test_it_starts_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    serving, testing = blocks("sh")

    assert text.index("```") == text.index("```sh")
    assert "trio-llm serve smollm2" in serving
    assert testing == "python3 -m venv .venv && .venv/bin/pip install tox && .venv/bin/tox\n"


@pytest.mark.parametrize("command", blocks("sh"))
@pytest.mark.parametrize("program", ["sh", "bash"])
def test_commands_are_well_formed(command: str, program: str) -> None:
    subprocess.run([program, "-n", "-c", command], check=True)


def test_the_request_is_json() -> None:
    body = re.search(r"-d '(.*?)'", blocks("sh")[0], re.DOTALL)

    assert body is not None
    assert json.loads(body[1])["model"] == "smollm2"


def test_ci_runs_the_second_command_word_for_word() -> None:
    [extraction] = re.findall(r"^tests=\$\(.*\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)

    assert shell(f'{extraction}; printf "%s" "$tests"') == blocks("sh")[1].rstrip("\n")


@pytest.mark.parametrize("program", blocks("python"))
def test_programs_import_what_there_is(program: str, tmp_path: Path) -> None:
    imports = [node for node in ast.parse(program).body if isinstance(node, ast.Import | ast.ImportFrom)]

    exec(compile(ast.Module(imports, type_ignores=[]), "README.md", "exec"), {})


def test_the_library_program_answers(tmp_path: Path) -> None:
    [program] = [program for program in blocks("python") if "open_engine" in program]
    environment = os.environ | {"PYTHONPATH": str(Path(trio_llm.__file__).parents[1])}

    completed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=240,
    )

    answer, _, ending = completed.stdout.rstrip("\n").rpartition("\n")
    assert answer.strip()
    assert re.fullmatch(r"\[(stop|length), \d+ tokens\]", ending)
