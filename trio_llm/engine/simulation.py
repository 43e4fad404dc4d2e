"""An engine without a model, and one without a thread.

For tests of what is built on the engine, and for simulations: with FakeModel and a
FakeExecutor everything but the model is real, and `drive_in_task` runs the worker as a
Trio task, so that trio.testing.MockClock governs it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import attrs
import trio

from trio_llm.config import EngineSettings
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import Executor, FakeExecutor
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.engine.engine import Engine
from trio_llm.engine.nursery import run_engine
from trio_llm.engine.worker import Report, Worker


@attrs.define(eq=False)
class ByteTokenizer:
    """One token for each byte of UTF-8.

    Chat messages become one line each, "role: content", and a last line "assistant: ".
    """

    chat_template: str | None = "lines"
    all_special_ids: Sequence[int] = ()

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def apply_chat_template(self, conversation: Sequence[Any], *, tokenize: bool = True, **_: Any) -> Any:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in conversation) + "assistant: "
        return self.encode(text) if tokenize else text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        hidden = self.all_special_ids if skip_special_tokens else ()
        return bytes(token for token in token_ids if token not in hidden).decode(errors="replace")


@attrs.define
class FakeModel:
    """Stands for a loaded model where a FakeExecutor runs the steps."""

    name: str = "fake"
    tokenizer: Any = attrs.field(factory=ByteTokenizer)
    defaults: SamplingParams = attrs.field(factory=SamplingParams)
    eos_token_ids: Collection[int] = ()
    max_model_len: int = 2**20


@attrs.define
class FakeEmbeddingModel:
    """Stands for a loaded embedding model where a FakeEncoder makes the vectors."""

    name: str = "fake"
    tokenizer: Any = attrs.field(factory=ByteTokenizer)
    max_model_len: int = 64
    dimensions: Collection[int] | None = ()
    load_seconds: float = 0.0
    import_seconds: float = 0.0


@attrs.define
class FakeEncoder:
    """Vectors that tell what they were made of: a text's first token, last token, length and sum.

    Args:
        on_step: called with the texts of each step, in its thread, before they are computed.
    """

    on_step: Callable[[Sequence[Sequence[int]]], object] = lambda texts: None
    hidden_size: int = 4
    vocab_size: int = 256

    def embed(self, texts: Sequence[Sequence[int]], dimensions: Sequence[int | None] | None = None) -> list[Any]:
        self.on_step(texts)
        vectors = [[float(value) for value in (text[0], text[-1], len(text), sum(text))] for text in texts]
        return [array("f", vector[:size]) for vector, size in zip(vectors, dimensions or [None], strict=True)]


def open_simulation(
    model: FakeModel | None = None,
    *,
    executor: Executor | None = None,
    settings: EngineSettings | None = None,
    seconds_per_turn: float = 0.0,
    **overrides: Any,
) -> AbstractAsyncContextManager[Engine]:
    """`open_engine` with the worker as a Trio task in place of a thread.

    Args:
        seconds_per_turn: time on Trio's clock that a turn takes.
    """
    settings = attrs.evolve(settings or EngineSettings(), **overrides)
    model = model or FakeModel()
    executor = executor or FakeExecutor()
    drive = partial(drive_in_task, seconds_per_turn=seconds_per_turn)
    return run_engine(lambda: (model, EngineCore(executor, settings)), settings, drive=drive, clock=trio.current_time)


async def drive_in_task(worker: Worker, deliver: Callable[[Report], None], *, seconds_per_turn: float = 0.0) -> None:
    """Run a worker as a task: the same turns as in a thread, but each at a point that Trio's clock decides."""
    posted = trio.Event()

    def wake() -> None:
        posted.set()

    worker.deliver = deliver
    worker.on_post = wake
    worker.load()
    try:
        while not worker.stopped:
            if not worker.pump():
                await posted.wait()
                posted = trio.Event()
            await trio.sleep(seconds_per_turn)
    finally:
        worker.close()
