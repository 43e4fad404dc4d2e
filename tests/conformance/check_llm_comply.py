"""llm-comply's own cases, one test each; formats that are not served yet are skipped."""

from __future__ import annotations

from pathlib import Path

import llm_comply.specs
import pytest
from llm_comply.cli import _SPEC_FILES
from llm_comply.config import ComplianceConfig
from llm_comply.result import TestStatus as Status
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import SpecLoader
from llm_comply.tests import get_tests

from tests.conformance.server import MODEL, base_url, serves

PATHS = {
    "openai-chat": "/v1/chat/completions",
    "open-responses": "/v1/responses",
    "anthropic": "/v1/messages",
}
NEEDS = {"chat-tool-calling": "tools", "tool-calling": "tools"}
"""Fields without which a case cannot pass."""
IMAGES = ["chat-image-input", "image-input", "anth-image-input"]
WEAK = dict.fromkeys(IMAGES, "it reads no images, and says so with a 400")
"""What the model cannot do."""
CASES = [(name, case) for name in PATHS for case in get_tests(name)]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name} {case.id}" for name, case in CASES])
def check(name, case, record_property):
    if not serves(PATHS[name]):
        pytest.skip(f"{PATHS[name]} is not served yet")
    field = NEEDS.get(case.id)
    if field is not None and not serves(PATHS[name], field):
        pytest.skip(f"{field} is not supported yet")
    config = ComplianceConfig(base_url=f"{base_url()}/v1", api_key="none", model=MODEL, timeout=300)
    spec = SpecLoader(str(Path(llm_comply.specs.__path__[0]) / _SPEC_FILES[name]))
    result = Runner(config, [case], spec).run_one(case)
    for warning in result.warnings:
        record_property("note", warning)
    if result.status is Status.SKIPPED:
        pytest.skip("; ".join(result.errors))
    problems = "; ".join(result.errors)
    if problems and case.id in WEAK:
        pytest.xfail(f"{WEAK[case.id]} ({problems})")
    if problems:
        pytest.fail(problems, pytrace=False)
