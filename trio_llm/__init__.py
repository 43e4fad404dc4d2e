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
    from trio_llm.core.sampling_params import SamplingParams, StructuredOutput
    from trio_llm.engine.choice import Delta
    from trio_llm.engine.embedding import Embedder, Embeddings, open_embedder
    from trio_llm.engine.engine import Engine
    from trio_llm.engine.generation import Generation
    from trio_llm.engine.nursery import open_engine
    from trio_llm.engine.registry import Registry
    from trio_llm.prompt.chat_template import Conversation
    from trio_llm.prompt.truncation import Truncation
    from trio_llm.server.http import App
    from trio_llm.server.serve import serve

__all__ = [
    "Conversation",
    "Delta",
    "Embedder",
    "Embeddings",
    "Engine",
    "EngineSettings",
    "Executor",
    "Generation",
    "SamplingParams",
    "ServerSettings",
    "StructuredOutput",
    "Truncation",
    "create_app",
    "errors",
    "open_embedder",
    "open_engine",
    "serve",
]

_HOMES = {
    "Conversation": "trio_llm.prompt.chat_template",
    "Delta": "trio_llm.engine.choice",
    "Embedder": "trio_llm.engine.embedding",
    "Embeddings": "trio_llm.engine.embedding",
    "Engine": "trio_llm.engine.engine",
    "EngineSettings": "trio_llm.config",
    "Executor": "trio_llm.core.executor",
    "Generation": "trio_llm.engine.generation",
    "SamplingParams": "trio_llm.core.sampling_params",
    "ServerSettings": "trio_llm.config",
    "Truncation": "trio_llm.prompt.truncation",
    "StructuredOutput": "trio_llm.core.sampling_params",
    "open_embedder": "trio_llm.engine.embedding",
    "open_engine": "trio_llm.engine.nursery",
    "serve": "trio_llm.server.serve",
}


def create_app(settings: ServerSettings | str | None = None, *, registry: Registry | None = None) -> App:
    """The application, for `hypercorn -k trio 'trio_llm:create_app()'` or for an embedding program.

    A function of its own, since Hypercorn looks in this module's dictionary and asks no `__getattr__`.

    Args:
        settings: ServerSettings, or the path of a TOML file; None reads the environment and the
            file that TRIO_LLM_CONFIG names.
        registry: engines that are open already, or will be put in later; the application then opens
            and closes none.  Without it the application opens an engine of its own for as long as
            it is served.

    Raises:
        ConfigurationError: a setting is wrong.
    """
    from trio_llm.server.app import create_app

    return create_app(settings, registry=registry)


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("trio_llm.errors")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
