"""What an engine counts on the Trio side, and who may listen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs
import structlog

from trio_llm.core.request import FinishReason
from trio_llm.core.step import CoreStatistics

logger = structlog.get_logger(__name__)


class Observer(Protocol):
    """Hears of events as they happen.  Called on the Trio thread; must be quick, never awaits.

    An exception from an observer is logged and goes no further.
    """

    def first_token(self, seconds: float) -> None:
        """A request gave its first token, that long after it was admitted."""

    def inter_token(self, seconds: float, count: int) -> None:
        """A choice gave so many tokens, each that long after the one before: the mean of those that came together."""

    def finished(self, reason: str, prompt_tokens: int, completion_tokens: int) -> None:
        """A request ended; called once for each that was admitted."""


@attrs.frozen(kw_only=True)
class Statistics:
    """A snapshot; counters since the engine was opened."""

    core: CoreStatistics
    """As of the last step that was handed over: at most `stream_interval` and a step ago."""
    num_requests: int
    """In flight: entered and not ended."""
    num_waiting: int
    """Choices in flight that are not in the batch: from the moment they are accepted."""
    admitted: int
    """Requests that were let in: those that ended and those that have not."""
    prompt_tokens: int
    """Of requests that gave a token."""
    generation_tokens: int
    """Tokens that requests kept."""
    wasted_tokens: int
    """Tokens that the core computed beyond a request's end."""
    finished: Mapping[str, int]
    """Requests by how they ended: stop, length, abort, error."""


@attrs.define
class Counters:
    """The running counters behind Statistics; each event is counted here and nowhere else."""

    admitted: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    wasted_tokens: int = 0
    finished: dict[FinishReason, int] = attrs.field(factory=lambda: dict.fromkeys(FinishReason, 0))
    observers: list[Observer] = attrs.field(factory=list)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        for observer in self.observers:
            try:
                observer.first_token(seconds)
            except Exception:
                logger.exception("observer failed")

    def inter_token(self, seconds: float, count: int) -> None:
        for observer in self.observers:
            try:
                observer.inter_token(seconds, count)
            except Exception:
                logger.exception("observer failed")

    def request_finished(self, reason: FinishReason, prompt_tokens: int, completion_tokens: int) -> None:
        self.finished[reason] += 1
        for observer in self.observers:
            try:
                observer.finished(reason.value, prompt_tokens, completion_tokens)
            except Exception:
                logger.exception("observer failed")

    def snapshot(self, core: CoreStatistics, num_requests: int, num_choices: int) -> Statistics:
        return Statistics(
            core=core,
            num_requests=num_requests,
            num_waiting=max(0, num_choices - core.num_running),
            admitted=self.admitted,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            wasted_tokens=self.wasted_tokens,
            finished={reason.value: count for reason, count in self.finished.items()},
        )
