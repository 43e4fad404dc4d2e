"""What a request asks of the sampler and of its own end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs
import orjson

from trio_llm.errors import InvalidRequest

MAX_STOP_STRINGS = 4
MAX_STRING = 4096
"""Characters of a stop string or a bad word: each token's text is compared with them."""
MAX_CHOICES = 128
MAX_LOGPROBS = 20
"""Alternatives that may be asked for beside each token."""
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_STRUCTURE_BYTES = 2**18
"""Of the source of a structured output, in UTF-8."""
MAX_SCHEMA_DEPTH = 64
"""Objects and arrays of a JSON schema that stand in one another."""
MAX_STRUCTURE_CHOICES = 1024
"""Texts among which a structured output may choose."""


@attrs.frozen
class Number:
    """A validator: a finite number in [low, high], or in (low, high] when `above`."""

    low: float
    high: float
    above: bool = False
    optional: bool = True

    def __call__(self, _: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and self.optional:
            return
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not math.isfinite(value) or not self._holds(value):
            interval = f"{'above' if self.above else 'at least'} {self.low:g} and at most {self.high:g}"
            raise InvalidRequest(f"{attribute.name} must be {interval}, got {value!r}", field=attribute.name)

    def _holds(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high


@attrs.frozen
class Integer:
    """A validator: an integer (not a bool) in [low, high]."""

    low: int
    high: int
    optional: bool = True

    def __call__(self, _: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and self.optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            message = f"{attribute.name} must be an integer from {self.low} to {self.high}, got {value!r}"
            raise InvalidRequest(message, field=attribute.name)


def _boolean(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A validator: true or false."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{attribute.name} must be true or false, got {value!r}", field=attribute.name)


def _token_ids(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A validator: token ids; whether the model has them is known only at admission."""
    if value is None and attribute.default is None:
        return
    is_several = isinstance(value, tuple)
    wrong = [token for token in value if type(token) is not int or token < 0] if is_several else [value]
    if wrong:
        message = f"{attribute.name} takes token ids (integers of at least 0), got {_short(wrong[0])}"
        raise InvalidRequest(message, field=attribute.name)


@attrs.frozen
class Strings:
    """A validator: at most so many strings, none of them empty or very long."""

    most: int

    def __call__(self, _: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        name = attribute.name
        if not isinstance(value, tuple) or not all(isinstance(text, str) and text for text in value):
            raise InvalidRequest(f"{name} takes a string or several, none of them empty", field=name)
        if len(value) > self.most:
            raise InvalidRequest(f"{name} takes at most {self.most} strings, got {len(value)}", field=name)
        longest = max(map(len, value), default=0)
        if longest > MAX_STRING:
            message = f"{name} takes strings of at most {MAX_STRING} characters, got one of {longest}"
            raise InvalidRequest(message, field=name, limit=MAX_STRING)


def _logit_bias(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A validator: pairs of a token id and a number from -100 to 100, no id twice."""
    name = attribute.name
    if not isinstance(value, tuple):
        raise InvalidRequest(f"{name} takes a mapping of token ids to numbers, got {_short(value)}", field=name)
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"{name} takes at most {MAX_LOGIT_BIAS} tokens, got {len(value)}", field=name)
    for pair in value:
        if not isinstance(pair, tuple) or len(pair) != 2 or type(pair[0]) is not int or pair[0] < 0:
            token = pair[0] if isinstance(pair, tuple) and pair else pair
            message = f"{name} must map token ids (integers of at least 0) to numbers, got {_short(token)}"
            raise InvalidRequest(message, field=name)
        bias = pair[1]
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            message = f"{name} must be at least -100 and at most 100 for each token, got {_short(bias)}"
            raise InvalidRequest(message, field=name)
    if len({token for token, _ in value}) != len(value):
        raise InvalidRequest(f"{name} names a token twice", field=name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _as_strings(value: Any) -> Any:
    """None, one string or several, as a tuple; what is none of these is left to the validator."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else _tuple(value)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else value


def _pairs(value: Any) -> Any:
    """A mapping as its pairs, which are immutable; None as none."""
    if value is None:
        return ()
    return tuple(value.items()) if isinstance(value, Mapping) else _tuple(value)


StructureKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@attrs.frozen
class StructuredOutput:
    """What form the whole text of each choice must have.

    Args:
        kind: "json_schema", JSON that the schema describes, with at most one blank after a comma or a
            colon; "json_object", any JSON object, the same way; "regex", text that the
            expression (Rust's syntax, without look-around) matches as a whole; "choice", one of several
            texts; "lark", text of a grammar in llguidance's dialect of Lark.
        value: the schema as JSON; nothing for "json_object"; the expression; the texts as a
            JSON array of strings; the grammar.

    Raises:
        InvalidRequest: it is not of its kind, or larger than its limit; `field` is
            "structured_output".  Whether it can be served is known only when it is compiled,
            when the request is admitted.
    """

    kind: StructureKind
    value: str = ""

    def __attrs_post_init__(self) -> None:
        if self.kind not in get_args(StructureKind):
            raise _bad_structure(f"knows the kinds {', '.join(get_args(StructureKind))}, got {_short(self.kind)}")
        if not isinstance(self.value, str):
            raise _bad_structure(f"takes its source as a text, got {_short(self.value)}")
        try:
            size = len(self.value.encode())
        except UnicodeEncodeError:
            raise _bad_structure("has half a surrogate pair, which is no text") from None
        if size > MAX_STRUCTURE_BYTES:
            message = f"takes at most {MAX_STRUCTURE_BYTES} bytes, got {size}"
            raise _bad_structure(message, limit=MAX_STRUCTURE_BYTES)
        if self.kind == "json_object":
            if self.value:
                raise _bad_structure("of the kind json_object takes no source")
        elif self.kind == "json_schema":
            self._check_schema()
        elif self.kind == "choice":
            self._check_choices()
        elif not self.value:
            raise _bad_structure(f"of the kind {self.kind} needs a source, got an empty text")

    @property
    def choices(self) -> list[str]:
        """The texts of a "choice", each once."""
        return list(dict.fromkeys(self._parsed()))

    def _check_schema(self) -> None:
        schema = self._parsed()
        if not isinstance(schema, dict):
            raise _bad_structure(f"of the kind json_schema must be a JSON object, got {_short(schema)}")
        depth = 0
        level: list[Any] = [schema]
        while level:
            depth += 1
            if depth > MAX_SCHEMA_DEPTH:
                message = f"takes a schema that is at most {MAX_SCHEMA_DEPTH} levels deep"
                raise _bad_structure(message, limit=MAX_SCHEMA_DEPTH)
            inner = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
            level = [item for item in inner if isinstance(item, dict | list)]

    def _check_choices(self) -> None:
        choices = self._parsed()
        if not isinstance(choices, list) or not choices or not all(isinstance(t, str) and t for t in choices):
            raise _bad_structure("of the kind choice must be a JSON array of texts, none of them empty")
        if len(choices) > MAX_STRUCTURE_CHOICES:
            message = f"takes at most {MAX_STRUCTURE_CHOICES} choices, got {len(choices)}"
            raise _bad_structure(message, limit=MAX_STRUCTURE_CHOICES)

    def _parsed(self) -> Any:
        try:
            return orjson.loads(self.value)
        except orjson.JSONDecodeError as error:
            raise _bad_structure(f"of the kind {self.kind} must be JSON: {error}") from None


def _bad_structure(message: str, **details: Any) -> InvalidRequest:
    return InvalidRequest(f"structured_output {message}", field="structured_output", **details)


def _structured_output(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A validator: a StructuredOutput or None."""
    if value is not None and not isinstance(value, StructuredOutput):
        message = f"{attribute.name} takes a StructuredOutput, got {_short(value)}"
        raise InvalidRequest(message, field=attribute.name)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How to choose tokens and when to end.

    `None` means the model's own default (its generation_config), or, for
    `max_tokens`, whatever is left of the context.

    Raises:
        InvalidRequest: a value is out of its range; `field` names it.
    """

    n: int = attrs.field(default=1, validator=Integer(1, MAX_CHOICES, optional=False))
    """Choices (independent continuations) to make of one prompt."""
    temperature: float | None = attrs.field(default=None, validator=Number(0, 2))
    """0 is greedy."""
    top_p: float | None = attrs.field(default=None, validator=Number(0, 1, above=True))
    top_k: int | None = attrs.field(default=None, validator=Integer(-1, 2**31 - 1))
    """-1 or 0 keeps the whole vocabulary."""
    min_p: float | None = attrs.field(default=None, validator=Number(0, 1))
    typical_p: float | None = attrs.field(default=None, validator=Number(0, 1, above=True))
    """Keep the tokens whose surprise is nearest to the expected one, up to this mass."""
    presence_penalty: float = attrs.field(default=0.0, validator=Number(-2, 2, optional=False))
    """Taken from the logit of each token that the output has already."""
    frequency_penalty: float = attrs.field(default=0.0, validator=Number(-2, 2, optional=False))
    """The same, for each time that the output has it."""
    repetition_penalty: float | None = attrs.field(default=None, validator=Number(0, 100, above=True))
    """Divides a positive logit, and multiplies a negative one, of each token of prompt and output."""
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_pairs, validator=_logit_bias)
    """Added to the logits of tokens: a mapping from token id to a number from -100 to 100, kept as pairs."""
    allowed_token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_tuple, validator=_token_ids)
    """Choose from these tokens only; None is all."""
    bad_words: tuple[str, ...] = attrs.field(default=(), converter=_as_strings, validator=Strings(MAX_BAD_WORDS))
    """Words whose last token is never chosen where it would complete the word."""
    seed: int | None = attrs.field(default=None, validator=Integer(-(2**63), 2**64 - 1))
    """Same seed, same tokens, whoever else is in the batch.  None draws one."""
    min_tokens: int = attrs.field(default=0, validator=Integer(0, 2**31 - 1, optional=False))
    """End tokens cannot be chosen, and stop strings do not end a choice, before it has so many tokens."""
    max_tokens: int | None = attrs.field(default=None, validator=Integer(0, 2**31 - 1))
    """0 computes the prompt and nothing else, which `prompt_logprobs` is for."""
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_strings, validator=Strings(MAX_STOP_STRINGS))
    """Texts that end a choice; they are not part of its text."""
    include_stop_str_in_output: bool = attrs.field(default=False, validator=_boolean)
    """Let the text of what ended a choice (a stop string, an end token) be part of its text."""
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_tuple, validator=_token_ids)
    ignore_eos: bool = attrs.field(default=False, validator=_boolean)
    """Go on past the model's end tokens (for benchmarks)."""
    structured_output: StructuredOutput | None = attrs.field(default=None, validator=_structured_output)
    """Allow only tokens that lead to a text of this form.  When it is complete the choice ends: where the
    form allows nothing more, neither `min_tokens` nor `ignore_eos` nor `allowed_token_ids` keeps it going."""
    skip_special_tokens: bool = attrs.field(default=True, validator=_boolean)
    """Leave the tokenizer's special tokens out of the text."""
    keep_special_tokens: tuple[int, ...] = attrs.field(default=(), converter=_tuple, validator=_token_ids)
    """Special tokens that stay in the text even so: markers that a parser of the text needs."""
    logprobs: int | None = attrs.field(default=None, validator=Integer(0, MAX_LOGPROBS))
    """Give each token's log-probability, and those of so many of the likeliest tokens beside it.

    They are the model's own, before anything above was applied."""
    prompt_logprobs: int | None = attrs.field(default=None, validator=Integer(0, MAX_LOGPROBS))
    """The same for the prompt's tokens after the first."""

    def __attrs_post_init__(self) -> None:
        if self.allowed_token_ids == ():
            raise InvalidRequest("allowed_token_ids must name at least one token", field="allowed_token_ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})"
            raise InvalidRequest(message, field="min_tokens", limit=self.max_tokens)

    def resolved(self, defaults: SamplingParams, *, max_tokens: int, seed: int) -> SamplingParams:
        """These params with every None filled in, first from `defaults` (the model's own),
        then from the neutral value."""

        def pick(name: str, neutral: Any) -> Any:
            value = getattr(self, name)
            if value is None:
                value = getattr(defaults, name)
            return neutral if value is None else value

        limit = max_tokens if self.max_tokens is None else min(self.max_tokens, max_tokens)
        return attrs.evolve(
            self,
            temperature=pick("temperature", 1.0),
            top_p=pick("top_p", 1.0),
            top_k=pick("top_k", 0),
            min_p=pick("min_p", 0.0),
            typical_p=pick("typical_p", 1.0),
            repetition_penalty=pick("repetition_penalty", 1.0),
            max_tokens=limit,
            # the context may have no room for more
            min_tokens=min(self.min_tokens, limit),
            seed=seed if self.seed is None else self.seed,
        )
