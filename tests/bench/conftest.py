"""No test waits to see what else the machine does."""

from __future__ import annotations

import pytest
import report


@pytest.fixture(autouse=True)
def a_short_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LOOK", 0.0)
