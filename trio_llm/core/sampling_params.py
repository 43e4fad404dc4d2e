"""What a request asks of the sampler and of its own end."""

from __future__ import annotations

import math
from typing import Any

import attrs

from trio_llm.errors import InvalidRequest

MAX_STOP_STRINGS = 4
MAX_CHOICES = 128


def _number(low: float, high: float, *, above: bool = False) -> Any:
    """A validator: a finite number in [low, high], or in (low, high] when `above`."""

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None:
            return
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not math.isfinite(value) or not low <= value <= high or (above and value == low):
            interval = f"{'above' if above else 'at least'} {low:g} and at most {high:g}"
            raise InvalidRequest(f"{attribute.name} must be {interval}, got {value!r}", field=attribute.name)

    return check


def _integer(low: int, high: int, *, optional: bool = True) -> Any:
    """A validator: an integer (not a bool) in [low, high]."""

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            message = f"{attribute.name} must be an integer from {low} to {high}, got {value!r}"
            raise InvalidRequest(message, field=attribute.name)

    return check


def _strings(value: Any) -> Any:
    """None, one string or several, as a tuple; what is none of these is left to the validator."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else _tuple(value)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How to choose tokens and when to end.

    `None` means the model's own default (its generation_config), or, for
    `max_tokens`, whatever is left of the context.

    Raises:
        InvalidRequest: a value is out of its range; `field` names it.
    """

    n: int = attrs.field(default=1, validator=_integer(1, MAX_CHOICES, optional=False))
    """Choices (independent continuations) to make of one prompt."""
    temperature: float | None = attrs.field(default=None, validator=_number(0, 2))
    """0 is greedy."""
    top_p: float | None = attrs.field(default=None, validator=_number(0, 1, above=True))
    top_k: int | None = attrs.field(default=None, validator=_integer(-1, 2**31 - 1))
    """-1 or 0 keeps the whole vocabulary."""
    min_p: float | None = attrs.field(default=None, validator=_number(0, 1))
    seed: int | None = attrs.field(default=None, validator=_integer(-(2**63), 2**64 - 1))
    """Same seed, same tokens, whoever else is in the batch.  None draws one."""
    max_tokens: int | None = attrs.field(default=None, validator=_integer(1, 2**31 - 1))
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    """Texts that end a choice; they are not part of its text."""
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_tuple)
    ignore_eos: bool = attrs.field(default=False)
    """Go on past the model's end tokens (for benchmarks)."""

    @stop.validator
    def _check_stop(self, _: Any, value: Any) -> None:
        if not isinstance(value, tuple) or not all(isinstance(text, str) and text for text in value):
            raise InvalidRequest("stop takes a string or several, none of them empty", field="stop")
        if len(value) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(value)}", field="stop")

    @stop_token_ids.validator
    def _check_stop_token_ids(self, _: Any, value: Any) -> None:
        if not isinstance(value, tuple) or not all(type(token) is int and token >= 0 for token in value):
            raise InvalidRequest("stop_token_ids takes integers of at least 0", field="stop_token_ids")

    @ignore_eos.validator
    def _check_ignore_eos(self, _: Any, value: Any) -> None:
        if not isinstance(value, bool):
            raise InvalidRequest(f"ignore_eos must be true or false, got {value!r}", field="ignore_eos")

    def resolved(self, defaults: SamplingParams, *, max_tokens: int, seed: int) -> SamplingParams:
        """These params with every None filled in, first from `defaults` (the model's own),
        then from the neutral value."""

        def pick(name: str, neutral: Any) -> Any:
            value = getattr(self, name)
            if value is None:
                value = getattr(defaults, name)
            return neutral if value is None else value

        return attrs.evolve(
            self,
            temperature=pick("temperature", 1.0),
            top_p=pick("top_p", 1.0),
            top_k=pick("top_k", 0),
            min_p=pick("min_p", 0.0),
            max_tokens=max_tokens if self.max_tokens is None else min(self.max_tokens, max_tokens),
            seed=seed if self.seed is None else self.seed,
        )
