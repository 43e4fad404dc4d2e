"""What the suites said, as a page of the documentation."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree as ET

import attrs

from .server import MODEL

PACKAGES = (
    *("trio-llm", "llm-comply", "langchain-openai", "langchain-core", "langchain-tests", "lm-eval", "openai"),
    *("transformers", "torch", "playwright"),
)
RESULTS = ("passed", "failed", "model", "skipped")


@attrs.frozen
class Outcome:
    """How one test ended."""

    name: str
    result: str
    """passed, failed, skipped, or model: it failed through the model's own weakness, as was expected."""
    reason: str = ""
    notes: tuple[str, ...] = ()
    """What was not right but no failure."""


def outcomes(path: Path) -> list[Outcome]:
    """The tests of a JUnit file."""
    if not path.exists():
        return [Outcome("the suite itself", "failed", "it wrote no results")]
    return [_outcome(case) for case in ET.parse(path).iter("testcase")]


def _outcome(case: ET.Element) -> Outcome:
    notes = tuple(item.get("value", "") for item in case.iter("property") if item.get("name") == "note")
    name = case.get("name", "")
    for kind in ("failure", "error"):
        if (part := case.find(kind)) is not None:
            return Outcome(name, "failed", _first_line(part.get("message", "")), notes)
    if (part := case.find("skipped")) is not None:
        result = "model" if part.get("type") == "pytest.xfail" else "skipped"
        return Outcome(name, result, _first_line(part.get("message", "")), notes)
    return Outcome(name, "passed", notes=notes)


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0]


def report(suites: Mapping[str, Sequence[Outcome]]) -> str:
    """The page."""
    lines = [
        "# Conformance",
        "",
        f"What other people's programs say of `trio-llm serve` with `{MODEL}`, which is given a chat template that shows",
        "tools to it and is greedy by default. This page is written by `tox run -e conformance`, which runs them all;",
        "it is not part of the tests that every change must pass.",
        "",
        "*Model too weak* counts what fails by what a model of 135 million parameters says, or cannot read, each with its",
        "reason below; an error that the server should not give is never counted there.",
        "",
        "| Suite | passed | failed | model too weak | skipped |",
        "|---|---|---|---|---|",
    ]
    for title, suite in suites.items():
        counts = Counter(outcome.result for outcome in suite)
        lines.append(f"| {title} | " + " | ".join(str(counts[result]) for result in RESULTS) + " |")
    lines += ["", "Versions: " + ", ".join(_versions()) + "."]
    for title, suite in suites.items():
        lines += ["", f"## {title}", ""]
        lines += [_line(outcome) for outcome in suite if outcome.result != "passed" or outcome.notes]
        passed = [f"`{outcome.name}`" for outcome in suite if outcome.result == "passed"]
        lines += [*([""] if lines[-1] else []), f"Passed: {', '.join(passed) or 'none'}."]
    return "\n".join([*lines, ""])


def _line(outcome: Outcome) -> str:
    words = {"failed": "**failed**", "model": "the model is too weak", "skipped": "skipped", "passed": "passed"}
    text = f"* `{outcome.name}`: {words[outcome.result]}"
    details = [detail for detail in (outcome.reason, *outcome.notes) if detail]
    return text + "".join(f"; {detail}" for detail in details)


def _versions() -> list[str]:
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} from its source tree" if package == "trio-llm" else f"{package} not installed")
    node = shutil.which("node")
    if node is not None:
        found.append(
            "Node " + subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        )
    return found
