"""What is installed is what is meant to be, and importing it costs little."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import trio_llm

ROOT = Path(__file__).parents[1]
PACKAGE = Path(trio_llm.__file__).parent

HEAVY = {"torch", "transformers", "tokenizers", "numpy", "quart", "quart_trio", "hypercorn", "openai"}


@pytest.fixture
def distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("trio-llm")
    except metadata.PackageNotFoundError:
        pytest.skip("trio-llm runs from a source tree and is not installed")


def heavy_modules_after(code: str, tmp_path: Path) -> set[str]:
    """Which of the slow modules a fresh interpreter has imported after `code`."""
    report = "import sys, json; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    completed = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return HEAVY & set(json.loads(completed.stdout.splitlines()[-1]))


def test_importing_is_light(tmp_path: Path) -> None:
    assert heavy_modules_after("import trio_llm", tmp_path) == set()


def test_help_is_light(tmp_path: Path) -> None:
    code = """
import sys
sys.argv = ["trio-llm", "--help"]
from trio_llm.cli.main import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""
    assert heavy_modules_after(code, tmp_path) == set()


def test_all_public_names_are_there() -> None:
    assert sorted(trio_llm.__all__) == sorted(set(trio_llm.__all__))
    for name in trio_llm.__all__:
        assert getattr(trio_llm, name) is not None


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_version_is_that_of_the_project(distribution: metadata.Distribution) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert distribution.version == project["version"]


def test_the_wheel_holds_the_package_and_nothing_else(distribution: metadata.Distribution) -> None:
    if distribution.read_text("direct_url.json") and "editable" in str(distribution.read_text("direct_url.json")):
        pytest.skip("an editable install lists no files of the package")
    installed = {path.parts[0] for path in distribution.files or () if path.name != "trio-llm"}

    assert "trio_llm/py.typed" in {path.as_posix() for path in distribution.files or ()}
    assert installed == {"trio_llm", f"trio_llm-{distribution.version}.dist-info"}


def test_licence_is_the_whole_standard_text() -> None:
    licence = (ROOT / "LICENSE").read_text()

    assert "Apache License\n                           Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    private = re.compile(r"/(?:root|home/\w+|Users/\w+|work)/\w")
    here = Path(__file__)
    files = [path for pattern in ("*", ".ci/*") for path in ROOT.glob(pattern) if path.is_file()]
    for directory in ("trio_llm", "tests", "bench", "docs", "newsfragments"):
        files += [path for path in (ROOT / directory).rglob("*") if path.is_file()]
    texts = {".py", ".md", ".toml", ".ini", ".jinja", ".typed", ""}

    named = [path for path in files if path.suffix in texts and path != here and private.search(path.read_text())]

    assert named == []
