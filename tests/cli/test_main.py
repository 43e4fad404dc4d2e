"""The command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trio_llm import config
from trio_llm.cli import main as cli

HEAVY = ("torch", "transformers", "quart", "quart_trio", "hypercorn", "trio", "numpy", "rich", "cattrs", "structlog")


def test_importing_the_command_line_is_light():
    program = f"import sys, trio_llm.cli.main; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_names_every_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a long name is broken in the middle where there is no room for it
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for name in config.SETTINGS:
        assert f"--{name.replace('_', '-')}" in text


def test_help_says_what_kind_of_value_a_flag_takes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag in (
        *("--port INTEGER", "--body-timeout NUMBER", "--max-request-bytes SIZE", "--host TEXT"),
        *("--served-model-name TEXT...", "--compat strict|lenient"),
    ):
        assert flag in text, flag


@pytest.fixture
def served(monkeypatch):
    """What serve would run with."""
    from trio_llm.cli import serve

    seen = []
    monkeypatch.setattr(serve, "run", lambda settings, complain: seen.append(settings) or 0)
    for name in config.SETTINGS:
        monkeypatch.delenv(config.PREFIX + name.upper(), raising=False)
    return seen


def test_flags_reach_the_settings(served, monkeypatch):
    monkeypatch.setenv("TRIO_LLM_HOST", "environment")
    arguments = "serve some.gguf --port 0 --max-num-seqs 3 --kv-cache-memory 1GiB --trust-remote-code"
    arguments += " --no-enable-prefix-caching"
    names = "--served-model-name a --served-model-name b"
    with pytest.raises(SystemExit) as left:
        cli.main([*arguments.split(), *names.split()])
    assert left.value.code == 0
    (settings,) = served
    assert (settings.model, settings.port, settings.host) == ("some.gguf", 0, "environment")
    assert settings.served_model_name == ("a", "b")
    assert settings.engine.max_num_seqs == 3
    assert settings.engine.kv_cache_memory == 2**30
    assert settings.engine.trust_remote_code is True
    assert settings.engine.enable_prefix_caching is False


def test_no_flags_are_the_defaults(served):
    with pytest.raises(SystemExit):
        cli.main(["serve"])
    assert served == [config.ServerSettings()]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["serve", "--wibble"], 2),
        (["wibble"], 2),
        (["serve", "--port", "x"], 2),
        (["serve", "a", "b"], 2),
        (["pull"], 2),
    ],
)
def test_usage_errors_are_one_line(arguments, code, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == code
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_unknown_model_to_pull(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["pull", "nothing"])
    assert left.value.code == 1
    assert "smollm2" in capsys.readouterr().err
