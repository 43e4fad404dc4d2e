"""The table of architectures in docs/models.md is what docs/architectures.py writes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trio_llm.core.attention import SdpaBackend

DOCS = Path(__file__).parents[2] / "docs"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architectures", DOCS / "architectures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # attrs looks its classes' module up
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


architectures = load()
TEXT = architectures.DOCUMENT.read_text(encoding="utf-8")
TABLE = TEXT.partition(architectures.BEGIN)[2].partition(architectures.END)[0]
ROWS = {line.split("|")[1].strip(): line for line in TABLE.splitlines() if line.startswith("| ")}

SOME = [
    *("cohere2", "deepseek_v3", "gemma2", "gpt2", "gpt_oss", "mimo_v2_flash", "mistral", "phi", "qwen3_moe"),
    *("bloom", "diffllama", "falcon_h1", "llama with dynamic rope", "llama4_text", "qwen3_next"),
]  # fmt: skip


@pytest.mark.parametrize("architecture", SOME)
def test_the_row_is_what_a_run_gives(architecture: str) -> None:
    assert str(architectures.run(architecture)) == ROWS[architecture]


def test_every_decoder_of_transformers_is_there() -> None:
    _, _, rest = TABLE.partition(architectures.NOT_RUN)
    not_run = rest.strip().removesuffix(".").split(", ")
    expected = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *architectures.VARIANTS]
    assert sorted([*(name for name in ROWS if name != "Architecture"), *not_run]) == sorted(expected)


def test_the_versions_are_those_that_are_installed() -> None:
    """With others the table must be made anew."""
    assert f"Run with transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}:" in TABLE


def test_what_is_let_in_and_runs_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is one too wide, which the probe's short sequences do not reach."""
    right = SdpaBackend.reaches
    monkeypatch.setattr(architectures, "WINDOW", 16)
    monkeypatch.setattr(SdpaBackend, "reaches", lambda self, window: right(self, window and window + 1))
    assert architectures.run("mistral").result == "wrong"
    assert architectures.main(["mistral"]) == 1
