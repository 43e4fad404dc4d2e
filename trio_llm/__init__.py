"""trio_llm: an inference engine whose every request is a structured-concurrency scope.

The names below are the public interface; everything else may move.  They are imported
when first used, so that `import trio_llm` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trio_llm import errors
    from trio_llm.config import EngineSettings, ServerSettings
    from trio_llm.core.executor import Executor
    from trio_llm.core.sampling_params import SamplingParams
    from trio_llm.engine.engine import Engine, open_engine
    from trio_llm.engine.generation import Delta, Generation
    from trio_llm.server.app import create_app
    from trio_llm.server.serve import serve

__all__ = [
    "Delta",
    "Engine",
    "EngineSettings",
    "Executor",
    "Generation",
    "SamplingParams",
    "ServerSettings",
    "create_app",
    "errors",
    "open_engine",
    "serve",
]

_HOMES = {
    "Delta": "trio_llm.engine.generation",
    "Engine": "trio_llm.engine.engine",
    "EngineSettings": "trio_llm.config",
    "Executor": "trio_llm.core.executor",
    "Generation": "trio_llm.engine.generation",
    "SamplingParams": "trio_llm.core.sampling_params",
    "ServerSettings": "trio_llm.config",
    "create_app": "trio_llm.server.app",
    "open_engine": "trio_llm.engine.engine",
    "serve": "trio_llm.server.serve",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("trio_llm.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
