from __future__ import annotations

import pytest

from trio_llm.core.kernels import Kernels, load


@pytest.fixture
def kernels() -> Kernels:
    return load() or pytest.skip("there is no C++ compiler here")
