"""docs/server.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trio_llm import config
from trio_llm.server.openai.error_bodies import FAILURES, HTTP_FAILURES

TEXT = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")


def test_every_flag_has_a_row():
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| (\S+(?: MiB`)?) \|", TEXT, re.MULTILINE))
    assert list(rows) == [name.replace("_", "-") for name in config.SETTINGS]
    for name, field in config.SETTINGS.items():
        said = rows[name.replace("_", "-")].strip("`")
        if name in config.SIZES and said != "-":
            assert config.parse_size(said) == field.default
        elif said == "-":
            assert field.default in (None, ())
        else:
            assert config.parse_setting(name, said) == field.default


@pytest.mark.parametrize("failure", [*FAILURES.values(), HTTP_FAILURES[404], HTTP_FAILURES[405], HTTP_FAILURES[413]])
def test_every_code_has_a_row(failure):
    if failure.code == "reader_stalled":  # only ever inside a stream
        assert f"`{failure.code}`" in TEXT
        return
    assert re.search(rf"^\| {failure.status} \| `{failure.type}` \|.*`{failure.code}`", TEXT, re.MULTILINE)
