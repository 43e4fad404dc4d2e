"""How long requests stay in the core, in steps, and the bound on that which docs/design.md states."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from trio_llm.core.request import Request


@attrs.define(eq=False)
class Stay:
    """A request in the core, in steps."""

    request: Request
    began: int
    running: set[str]
    """Those that ran when it came, when its other choices joined the queue, or when it came back to it by itself."""
    num_preemptions: int = 0
    was_paused: bool = False
    ended: int = 2**31

    @property
    def order(self) -> tuple[int, int]:
        return self.request.priority, self.request.arrival

    @property
    def num_tokens(self) -> int:
        """The most that it may have to compute."""
        assert self.request.params.max_tokens is not None
        length = len(self.request.prompt_token_ids) + self.request.params.max_tokens
        return length * (self.request.params.n + self.num_preemptions)


def check_waits(stays: Mapping[str, Stay]) -> None:
    """Nobody starves: a request stays no more steps than those before it have tokens to compute."""
    for request_id, stay in stays.items():
        if stay.was_paused:
            continue
        before = [
            other
            for other_id, other in stays.items()
            if other.began <= stay.ended
            and other.ended >= stay.began
            and (other.order <= stay.order or other_id in stay.running)
        ]
        assert stay.ended - stay.began <= sum(other.num_tokens for other in before), f"{request_id} starved"
