"""Pace: how much of prompts a step computes beside those who decode.

Who decodes waits for the whole step, so what bounds the prompts' part is time.  Tokens would not do: those deep
in a context attend to all before them, and take many times as long as those at its beginning.  What steps take
depends on the model and the machine, and is therefore learned from the steps themselves.
"""

from __future__ import annotations

import math

import attrs

from trio_llm.core.step import StepPlan

LEARNING_RATE = 1 / 2
"""How far an estimate moves towards the newest measurement."""

MAX_GROWTH = 2.0
"""By how much a step may have taken longer than it was estimated, for that to be believed: what else happens on
the machine adds to a step's time."""

CONTEXT_UNIT = 1000
"""Tokens of context that cost a prompt's token about as much as it costs without them ..."""

DECODE_UNIT = 16
"""... and sequences that decode for about as much as a step costs without them.  That need not be right: it
only has both parts of an estimate learned equally fast."""

MAX_MIXED_STEPS = 16
"""After so many steps with prompts in all of them one goes without, so that it is known what that takes."""

MIN_TOKENS = 16
"""What the first of the prompts has in any other step, so that it gets on."""


@attrs.define
class Estimate:
    """Something that grows with two other things, learned from one measurement after another.

    Each moves the estimate of what was measured a part of the way (normalised least mean squares): the two
    coefficients share the correction, the larger of x and y having the larger part, and none falls below 0.
    """

    coefficients: tuple[float, float] | None = None
    """None until something was measured."""

    def __call__(self, x: float, y: float) -> float:
        """The estimate; 0 where nothing was measured yet."""
        a, b = self.coefficients or (0.0, 0.0)
        return a * x + b * y

    def learn(self, x: float, y: float, measured: float) -> None:
        """At `x` and `y`, not both 0, it was `measured`; the first time is believed altogether."""
        rate = 1.0 if self.coefficients is None else LEARNING_RATE
        step = rate * (measured - self(x, y)) / (x * x + y * y)
        a, b = self.coefficients or (0.0, 0.0)
        self.coefficients = max(0.0, a + step * x), max(0.0, b + step * y)


@attrs.define
class PromptShare:
    """What prompts may have of one step; they take of it one after another."""

    tokens: int
    """At most."""
    seconds: float = math.inf
    costs: Estimate = attrs.field(factory=Estimate)
    """Seconds by tokens and by units of context."""
    min_tokens: int = 0
    """What the first has whatever it costs."""
    whole: int = 0
    """Prompts of up to so many tokens are not cut for what they cost."""

    def most(self, start: int, end: int) -> int:
        """Tokens that a sequence of `end` tokens may have from `start` on."""
        if end <= self.whole:
            return self.tokens
        each = self.costs(1, (start + self.tokens / 2) / CONTEXT_UNIT)
        if each * self.tokens <= self.seconds:
            return self.tokens
        return min(self.tokens, max(self.min_tokens, int(self.seconds / each)))

    def take(self, start: int, count: int) -> None:
        """A prompt has `count` tokens from a place on."""
        self.tokens = max(0, self.tokens - count)
        self.min_tokens = 0
        self.seconds -= self.costs(count, count * (start + count / 2) / CONTEXT_UNIT)


class Pace:
    """What steps take, and what of them prompts may take.

    Args:
        max_ratio: how long a step with prompts may take, by one without; None leaves the tokens as the only bound.
        max_tokens: of prompts in a step beside others who decode.
    """

    def __init__(self, *, max_ratio: float | None, max_tokens: int) -> None:
        self.max_ratio = max_ratio
        self.max_tokens = max_tokens
        self._decode = Estimate()
        """Time of a step without prompts, by 1 and by units of tokens in it."""
        self._prompt = Estimate()
        """Time that prompts add, by their tokens and by their units of context."""
        self._num_mixed_steps = 0
        """Since the last without prompts."""

    def share(self, num_decoding: int, num_prompts: int) -> PromptShare:
        """What prompts may have of a step in which others decode.

        Args:
            num_decoding: sequences that decode in it; at least one.
            num_prompts: sequences that wait for their first token and could have a row.
        """
        if self.max_ratio is None:
            return PromptShare(self.max_tokens)
        if self._decode.coefficients is None or self._num_mixed_steps >= MAX_MIXED_STEPS:
            return PromptShare(0)
        # where more wait for their first token than for their next, theirs counts for more
        weight = max(1.0, num_prompts / num_decoding)
        seconds = weight * (self.max_ratio - 1) * self._decode(1, num_decoding / DECODE_UNIT)
        return PromptShare(self.max_tokens, seconds, self._prompt, MIN_TOKENS, whole=self.max_tokens)

    def learn(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """A step took so long.

        Args:
            num_tokens: of the plan.
        """
        num_prompt_tokens, context = 0, 0.0
        if num_tokens > len(plan.rows):
            for row in plan.rows:
                count = len(row.token_ids) - row.num_drafts
                if count > 1:
                    num_prompt_tokens += count
                    context += count * (row.start + count / 2)
        num_decoding = num_tokens - num_prompt_tokens
        if not num_prompt_tokens:
            self._num_mixed_steps = 0
            known = self._decode(1, num_decoding / DECODE_UNIT)
            believed = min(seconds, MAX_GROWTH * known) if known else seconds
            self._decode.learn(1, num_decoding / DECODE_UNIT, believed)
            return
        self._num_mixed_steps += num_decoding > 0
        added = max(0.0, seconds - self._decode(1, num_decoding / DECODE_UNIT))
        self._prompt.learn(num_prompt_tokens, context / CONTEXT_UNIT, added)
