"""From the name of a model to a core that runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from trio_llm.config import EngineSettings
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import Executor
from trio_llm.core.sampling_params import SamplingParams


class Model(Protocol):
    """What an engine must know of a model beside its executor; a LoadedModel is one."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def defaults(self) -> SamplingParams: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    @property
    def max_model_len(self) -> int: ...


Load = Callable[[], tuple[Model, EngineCore]]
"""Makes the core and says what it runs; called in the thread that will own it."""


def load_core(model: str | Model, executor: Executor | None, settings: EngineSettings) -> tuple[Model, EngineCore]:
    """Load a model, unless it is loaded already, and put a core around it or around `executor`.

    Torch is imported here and in nothing that is imported above.

    Raises:
        ModelLoadError: the model could not be found or loaded, or is not supported.
        ConfigurationError: a setting does not fit it.
    """
    if isinstance(model, str):
        from trio_llm.models.loader import load_model

        model = load_model(model, settings=settings)
    if executor is not None:
        return model, EngineCore(executor, settings)
    from trio_llm.core.build import build_core
    from trio_llm.models.draft import load_draft_model
    from trio_llm.models.loader import LoadedModel

    assert isinstance(model, LoadedModel), "a model that is not a LoadedModel comes with its own executor"
    draft = load_draft_model(model, settings) if settings.speculative_method == "draft_model" else None
    return model, build_core(model, settings, draft)
