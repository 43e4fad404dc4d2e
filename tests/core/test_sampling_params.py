"""SamplingParams: every bad value is refused by its field's name, and how defaults are filled in."""

from __future__ import annotations

import math

import attrs
import pytest

from trio_llm.core.sampling_params import SamplingParams, StructuredOutput
from trio_llm.errors import InvalidRequest

NAN, INFINITY = math.nan, math.inf
BAD: dict[str, list[object]] = {
    "n": [0, -1, 129, 10**6, 1.0, 1.5, "1", True, [1], None],
    "temperature": [-0.1, 2.0001, NAN, INFINITY, -INFINITY, "0.5", True, False, [1.0], 1 + 0j],
    "top_p": [0, 0.0, -0.1, 1.01, NAN, INFINITY, "1", True, {}],
    "top_k": [-2, 1.0, 2**31, "5", True, NAN],
    "min_p": [-0.01, 1.01, NAN, INFINITY, "0", False],
    "seed": [-(2**63) - 1, 2**64, 1.0, "7", True],
    "max_tokens": [-1, 2**31, "5", 1.5, True],
    "stop": ["", ("a", ""), ("a",) * 5, (1,), b"ab"],
    "stop_token_ids": ["12", (1.5,), (-1,), ("1",)],
    "ignore_eos": ["yes"],
    "structured_output": ["json", {"type": "object"}, ("regex", "a"), True],
    "typical_p": [0, -0.1, 1.01, NAN, "1", True],
    "presence_penalty": [-2.01, 2.01, NAN, INFINITY, "0", True, None],
    "frequency_penalty": [-2.01, 2.01, NAN, -INFINITY, "0", False, None],
    "repetition_penalty": [0, -1, 100.1, NAN, INFINITY, "1"],
    "logit_bias": [
        {"5": 1},
        {5: 101},
        {5: -100.5},
        {5: NAN},
        {5: "1"},
        {5: True},
        {-1: 1},
        {1.0: 1},
        {True: 1},
        7,
        "a",
        [1],
        [(1, 2, 3)],
        [(1, 2), (1, 3)],
        dict.fromkeys(range(1025), 1),
    ],
    "allowed_token_ids": [(), [], 5, "12", (1.5,), (-1,), (True,)],
    "bad_words": ["", ("a", ""), ("a",) * 1025, (1,), b"ab", 5],
    "min_tokens": [-1, 1.0, 2**31, "5", True, None],
    "include_stop_str_in_output": ["yes", 1, None],
    "skip_special_tokens": ["yes", 0, None],
    "keep_special_tokens": ["12", (1.5,), (-1,), (True,), 5, None],
    "logprobs": [-1, 21, 1.0, True, "5"],
    "prompt_logprobs": [-1, 21, 1.0, False, "5"],
}


@pytest.mark.parametrize(
    ("field", "value"), [pytest.param(f, v, id=f"{f}={v!r}"[:40]) for f, values in BAD.items() for v in values]
)
def test_a_bad_value_is_refused_by_its_fields_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert field in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stop_token_ids", [3, -1], "got -1"),
        ("allowed_token_ids", [1.5], "got 1.5"),
        ("keep_special_tokens", 5, "got 5"),
        ("logit_bias", {-1: 1}, "got -1"),
    ],
)
def test_of_several_values_the_wrong_one_is_shown(field: str, value: object, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.message.endswith(words)


GOOD: dict[str, list[object]] = {
    "n": [1, 128],
    "temperature": [None, 0, 0.0, -0.0, 1, 2.0, 5e-324],
    "top_p": [None, 1, 1.0, 1e-9],
    "top_k": [None, -1, 0, 1, 2**31 - 1],
    "min_p": [None, 0, 0.0, 1],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "max_tokens": [None, 0, 1, 2**31 - 1],
    "stop": [None, (), "a", ["a"], ("a", "b", "c", "d"), " ", "\n"],
    "stop_token_ids": [(), [1, 2], (0,)],
    "ignore_eos": [True, False],
    "structured_output": [None, StructuredOutput("regex", "a+"), StructuredOutput("json_object")],
    "typical_p": [None, 1, 1e-9],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2.0, 0, 2],
    "repetition_penalty": [None, 1e-9, 1, 100],
    "logit_bias": [None, {}, {0: -100, 7: 100.0}, ((3, 1),), dict.fromkeys(range(1024), 1)],
    "allowed_token_ids": [None, (0,), [5, 5]],
    "bad_words": [None, (), "a", ["a", " b"], ("a",) * 1024],
    "min_tokens": [0, 2**31 - 1],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "keep_special_tokens": [(), [1, 2], (0,), frozenset([3])],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in GOOD.items() for v in values], ids=repr)
def test_the_limits_themselves_are_allowed(field: str, value: object) -> None:
    SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_every_field_is_attacked() -> None:
    assert {field.name for field in attrs.fields(SamplingParams)} == BAD.keys() == GOOD.keys()


def test_a_single_stop_string_is_one() -> None:
    assert SamplingParams(stop="abc").stop == ("abc",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()


def test_the_request_goes_before_the_models_defaults_and_those_before_neutral_values() -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.95)
    resolved = SamplingParams(top_p=0.5).resolved(defaults, max_tokens=100, seed=9)
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.min_p) == (0.6, 0.5, 0, 0.0)
    assert (resolved.max_tokens, resolved.seed) == (100, 9)
    neutral = SamplingParams().resolved(SamplingParams(), max_tokens=1, seed=0)
    assert (neutral.temperature, neutral.top_p, neutral.top_k, neutral.min_p) == (1.0, 1.0, 0, 0.0)


def test_values_that_are_false_are_still_values() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, min_p=0.1, seed=5)
    resolved = SamplingParams(temperature=0, top_k=0, min_p=0.0, seed=0).resolved(defaults, max_tokens=8, seed=77)
    assert (resolved.temperature, resolved.top_k, resolved.min_p, resolved.seed) == (0, 0, 0.0, 0)


@pytest.mark.parametrize(("asked", "left", "wanted"), [(None, 10, 10), (3, 10, 3), (30, 10, 10), (10, 10, 10)])
def test_max_tokens_is_never_more_than_is_left(asked: int | None, left: int, wanted: int) -> None:
    assert SamplingParams(max_tokens=asked).resolved(SamplingParams(), max_tokens=left, seed=0).max_tokens == wanted


def test_resolving_keeps_the_rest_and_leaves_the_original() -> None:
    params = SamplingParams(n=3, stop=("x",), stop_token_ids=(4,), ignore_eos=True)
    resolved = params.resolved(SamplingParams(n=2, stop=("y",), temperature=0.1), max_tokens=5, seed=1)
    assert (resolved.n, resolved.stop, resolved.stop_token_ids, resolved.ignore_eos) == (3, ("x",), (4,), True)
    assert params == SamplingParams(n=3, stop=("x",), stop_token_ids=(4,), ignore_eos=True)


def test_min_tokens_is_not_above_max_tokens_nor_above_what_is_left() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.field == "min_tokens"
    assert SamplingParams(min_tokens=5, max_tokens=9).resolved(SamplingParams(), max_tokens=3, seed=0).min_tokens == 3


def test_a_bias_is_kept_as_pairs_and_stays_what_it_was() -> None:
    params = SamplingParams(logit_bias={5: 1, 6: -2.5})
    assert params.logit_bias == ((5, 1), (6, -2.5))
    assert attrs.evolve(params, n=2).logit_bias == params.logit_bias
    assert hash(params) == hash(SamplingParams(logit_bias={5: 1, 6: -2.5}))


def test_the_models_own_typical_p_and_repetition_penalty() -> None:
    defaults = SamplingParams(typical_p=0.9, repetition_penalty=1.1)
    resolved = SamplingParams().resolved(defaults, max_tokens=1, seed=0)
    assert (resolved.typical_p, resolved.repetition_penalty) == (0.9, 1.1)
    neutral = SamplingParams(repetition_penalty=1).resolved(SamplingParams(), max_tokens=1, seed=0)
    assert (neutral.typical_p, neutral.repetition_penalty) == (1.0, 1)


BAD_STRUCTURES: dict[str, tuple[object, object, str]] = {
    "unknown kind": ("grammar", "start: 'a'", "knows the kinds json_schema"),
    "no text": ("regex", None, "as a text"),
    "bytes": ("regex", b"a", "as a text"),
    "half a character": ("regex", "a\ud800", "surrogate"),
    "too large": ("regex", "é" * 2**17 + "a", "at most 262144 bytes, got 262145"),
    "empty expression": ("regex", "", "empty text"),
    "empty grammar": ("lark", "", "empty text"),
    "source for any object": ("json_object", "{}", "no source"),
    "schema that is no JSON": ("json_schema", "{'type': 'object'}", "must be JSON"),
    "schema with NaN": ("json_schema", '{"const": NaN}', "must be JSON"),
    "schema that is an array": ("json_schema", "[]", "JSON object"),
    "schema that is true": ("json_schema", "true", "JSON object"),
    "deep schema": ("json_schema", '{"not":' * 64 + "{}" + "}" * 64, "64 levels"),
    "deep array": ("json_schema", '{"enum":' + "[" * 64 + "]" * 64 + "}", "64 levels"),
    "very deep schema": ("json_schema", '{"not":' * 20000 + "{}" + "}" * 20000, "must be JSON"),
    "no choices": ("choice", "[]", "array of texts"),
    "a choice": ("choice", '"yes"', "array of texts"),
    "a number": ("choice", "[1, 2]", "array of texts"),
    "an empty choice": ("choice", '["a", ""]', "none of them empty"),
    "many choices": ("choice", str([f"{number}" for number in range(1025)]).replace("'", '"'), "at most 1024"),
}


@pytest.mark.parametrize(("kind", "value", "message"), BAD_STRUCTURES.values(), ids=BAD_STRUCTURES.keys())
def test_a_structure_that_is_not_of_its_kind_or_too_large_is_refused(kind: str, value: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        StructuredOutput(kind, value)  # type: ignore[arg-type]
    assert caught.value.field == "structured_output"
    assert len(caught.value.message) < 300


def test_structures_at_their_limits_pass() -> None:
    StructuredOutput("json_schema", '{"not":' * 63 + "{}" + "}" * 63)
    StructuredOutput("regex", "é" * 2**17)
    StructuredOutput("choice", str([f"{number}" for number in range(1024)]).replace("'", '"'))
    StructuredOutput("json_object")
    assert StructuredOutput("choice", '["b", "a", "b", "\\u00e9"]').choices == ["b", "a", "é"]
