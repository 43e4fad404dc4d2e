"""Where the server stands between loading and the end, and the task that runs its engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import attrs
import structlog
import trio

from trio_llm.engine.embedding import Embedder
from trio_llm.engine.engine import Engine
from trio_llm.engine.registry import Registry
from trio_llm.errors import EngineDead, ModelLoadError, ShuttingDown, TrioLLMError
from trio_llm.server.openai.error_bodies import NotReady

logger = structlog.get_logger(__name__)

OpenEngine = Callable[[], AbstractAsyncContextManager[Engine | Embedder]]
"""What opens the server's engine."""


def root_error(error: BaseException) -> BaseException:
    """The one error that people should hear of: out of a group, ours before others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    roots = [root_error(part) for part in error.exceptions]
    return next((root for root in roots if isinstance(root, TrioLLMError)), roots[0])


@attrs.define(eq=False)
class Lifecycle:
    """The server's state: loading while the registry is empty, then ready, then draining."""

    registry: Registry
    leaving: bool = False
    """Unready, so that load balancers turn away, though requests are still taken."""
    draining: bool = False
    """No new request is taken."""
    failure: TrioLLMError | None = None
    """Why there is no engine any more, or never was."""
    opened: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set when the engine is there, or will never be."""
    failed: trio.Event = attrs.field(factory=trio.Event, init=False)
    stopping: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set to have the engine closed."""
    stopped: trio.Event = attrs.field(factory=trio.Event, init=False)

    def refusal(self) -> TrioLLMError | None:
        """Why no request can be taken now; None when one can."""
        if self.failure is not None:
            return EngineDead(f"there is no engine: {self.failure.message}")
        if self.draining:
            return ShuttingDown("the server is shutting down")
        if not self.registry:
            return NotReady("the model is still being loaded")
        return None

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.leaving = self.draining = True
        for engine in self.registry.engines():
            engine.drain()

    async def run_engine(self, open_engine: OpenEngine, names: tuple[str, ...]) -> None:
        """Keep an engine open until `stopping`; its failure is recorded and not raised, because the
        nursery that this runs in holds the connections, which have error answers to write.

        Args:
            open_engine: opens it.
            names: what clients call it; none is its own name.
        """
        try:
            async with open_engine() as engine:
                logger.info(
                    "model loaded",
                    model=engine.name,
                    load_seconds=round(engine.load_seconds, 2),
                    import_seconds=round(engine.import_seconds, 2),
                    **({"batch_exact": engine.batch_exact} if isinstance(engine, Engine) else {}),
                )
                for name in names or (engine.name,):
                    self.registry[name] = engine
                self.opened.set()
                await self.stopping.wait()
        except* Exception as group:
            error = root_error(group)
            if not isinstance(error, TrioLLMError):
                logger.error("the engine failed", exc_info=error)
                what = f"{type(error).__name__}: {error}"
                if self.opened.is_set():
                    error = EngineDead(f"the engine failed: {what}")
                else:
                    error = ModelLoadError(f"the model could not be loaded: {what}")
            self.failure = error
            self.failed.set()
        finally:
            self.opened.set()
            self.stopped.set()
