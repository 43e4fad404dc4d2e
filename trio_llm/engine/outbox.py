"""What the worker has made and not handed over yet.

A hand-over wakes Trio's thread, and with it every reader: on a CPU they take a core, and the interpreter, from
the step that runs meanwhile.  What that costs depends little on how much there is to say.  So while many are served the
outputs of some steps go together, and each reader gets a few tokens at a time.  What begins or ends an
answer waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain

from trio_llm.core.step import SequenceOutput

SECONDS_PER_SEQUENCE = 0.0035
"""By which each further sequence lengthens the time between two hand-overs: one alone waits for nothing, and with
thirty a hand-over is a small part of what is computed meanwhile."""


class Outbox:
    """Outputs by sequence, in the order in which they came.

    Args:
        interval: seconds between two hand-overs at most, however many are served.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._held: dict[tuple[str, int], list[SequenceOutput]] = {}
        self._urgent: list[tuple[str, int]] = []
        self._put_at = self._emptied_at = -math.inf
        self._step = 0.0
        """Seconds between the last two that were put in."""

    def put(self, outputs: Iterable[SequenceOutput], now: float) -> None:
        """Keep the outputs of a step."""
        self._step, self._put_at = now - self._put_at, now
        for output in outputs:
            key = output.request_id, output.index
            if output.error is not None:
                # it ends the whole request: what the other choices have made comes before it
                self._urgent += [held for held in self._held if held[0] == output.request_id and held != key]
                self._held[key] = self._held.pop(key, [])
            self._held.setdefault(key, []).append(output)
            if output.is_first or output.finish_reason is not None:
                self._urgent.append(key)

    def is_due(self, num_running: int) -> bool:
        """Whether all that is held is to be handed over now, while so many sequences are served."""
        pace = min(self._interval, SECONDS_PER_SEQUENCE * (num_running - 1))
        # if the next step takes as long as this one, its outputs would come too late to be waited for
        return pace <= 0 or self._put_at + self._step - self._emptied_at > pace

    def take(self, *, everything: bool) -> list[SequenceOutput]:
        """What is to be handed over, those of a sequence joined: all, or what does not wait."""
        if everything:
            self._emptied_at = self._put_at
            taken = list(self._held.values())
            self._held.clear()
        else:
            taken = [self._held.pop(key) for key in self._urgent if key in self._held]
        self._urgent.clear()
        return [output for outputs in taken for output in _joined(outputs)]


def _joined(outputs: list[SequenceOutput]) -> Iterator[SequenceOutput]:
    """The outputs of a sequence as one; an error, which has no tokens, stays by itself."""
    *before, last = outputs
    if last.error is not None:
        if before:
            yield from _joined(before)
        yield last
        return
    if before:
        last = SequenceOutput(
            last.request_id,
            last.index,
            tuple(chain.from_iterable(output.token_ids for output in outputs)),
            last.finish_reason,
            num_cached_tokens=last.num_cached_tokens,
            started_at=last.started_at,
            logprobs=tuple(chain.from_iterable(output.logprobs for output in outputs)),
            prompt_logprobs=outputs[0].prompt_logprobs,
            is_first=outputs[0].is_first,
        )
    yield last
