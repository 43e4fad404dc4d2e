"""Other people's programs against a real server: `tox run -e conformance`.

Starts `trio-llm serve smollm2`, runs every suite, and writes docs/conformance.md from what they said.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .report import Outcome, outcomes, report
from .server import running_server

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "conformance.md"
SUITES = {
    "llm_comply": "llm-comply",
    "langchain": "langchain-openai, by langchain-tests' standard suite",
    "lm_eval": "lm-eval, against transformers",
    "sdk": "The openai package for Python",
    "node": "The openai package for Node",
    "browser": "The page at /docs in Chromium",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[[], *SUITES], help="only these, and no page is written")
    parser.add_argument("--url", help="of a server that runs already, and serves smollm2")
    options = parser.parse_args()
    found: dict[str, list[Outcome]] = {}
    with running_server(options.url) as url:
        for name in options.suites or SUITES:
            found[name] = run_suite(name, url)
    if not options.suites:
        PAGE.write_text(report({SUITES[name]: suite for name, suite in found.items()}), encoding="utf-8")
        print(f"wrote {PAGE}")
    return int(any(outcome.result == "failed" for suite in found.values() for outcome in suite))


def run_suite(name: str, url: str) -> list[Outcome]:
    """One suite, in a pytest of its own."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.toml"), f"--rootdir={HERE}"]
        command += ["-q", "-rA", "--tb=short", f"--junitxml={results}", str(HERE / f"check_{name}.py")]
        environment = {**os.environ, "TRIO_LLM_CONFORMANCE_URL": url, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
        return outcomes(results)


if __name__ == "__main__":
    sys.exit(main())
