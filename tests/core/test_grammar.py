"""Grammars without a model: random walks through what they allow, on each kind of tokenizer; and what is refused."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_llm.core.grammar import MAX_GRAMMARS, Grammar, GrammarCompiler, Words, without, words_of
from trio_llm.core.sampling_params import StructuredOutput
from trio_llm.engine.simulation import ByteTokenizer
from trio_llm.errors import InvalidRequest, RequestFailed

from . import tokenizers
from .schemas import schemas, texts, validate

TOKENIZERS: dict[str, tuple[Callable[[], Any], frozenset[int]]] = {
    "byte level": (tokenizers.byte_level, frozenset({tokenizers.END})),
    "sentencepiece": (tokenizers.sentencepiece, frozenset({tokenizers.END})),
    "smollm2": (tokenizers.smollm2, frozenset({0, 2})),
}
EVERY_TOKENIZER = pytest.mark.parametrize("name", TOKENIZERS)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "日本", '"', "\\", "🎉"]}, "maxItems": 3},
        "home": {"type": "object", "properties": {}, "additionalProperties": False},
        "pet": {"anyOf": [{"type": "null"}, {"const": {"kind": ["cat", 1.5, True]}}]},
    },
    "required": ["name", "age", "tags", "home", "pet"],
    "additionalProperties": False,
}


@functools.cache
def compiler(name: str, padding: int = 0) -> GrammarCompiler:
    make, eos_token_ids = TOKENIZERS[name]
    return GrammarCompiler(make(), vocab_size=len(make()) + padding, eos_token_ids=eos_token_ids)


def schema(value: Any) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(value, ensure_ascii=False))


def bits_of(words: Words) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def ids_of(words: Words) -> list[int]:
    return bits_of(words).tolist()


def text_of(name: str, token_ids: list[int]) -> str:
    """As a generation's text: what is decoded after something else."""
    tokenizer = TOKENIZERS[name][0]()
    before = tokenizer.encode("x", add_special_tokens=False)
    text: str = tokenizer.decode([*before, *token_ids], clean_up_tokenization_spaces=False)
    return text.removeprefix("x")


Choose = Callable[[npt.NDArray[np.int64]], int]


def walk(name: str, grammar: Grammar, choose: Choose, *, limit: int = 2000) -> str:
    """A text of tokens that the grammar allows, to its end."""
    state, tokens = grammar.start(), []
    for _ in range(limit):
        token = int(choose(bits_of(state.allowed())))
        if token in TOKENIZERS[name][1]:
            return text_of(name, tokens)
        tokens.append(token)
        state.push(token)
    raise AssertionError(f"no end after {limit} tokens: {text_of(name, tokens[:200])!r}")


def random_walk(name: str, structure: StructuredOutput, seed: int) -> str:
    return walk(name, compiler(name).compile(structure), Random(seed).choice)


# -- every kind


@EVERY_TOKENIZER
@pytest.mark.parametrize("seed", range(8))
def test_a_schema_is_kept_to(name: str, seed: int) -> None:
    validate(PERSON, json.loads(random_walk(name, schema(PERSON), seed)))


@EVERY_TOKENIZER
@settings(max_examples=40, deadline=None)
@given(value=schemas(), seed=st.integers(0, 2**32))
def test_any_schema_is_kept_to(name: str, value: Any, seed: int) -> None:
    validate(value, json.loads(random_walk(name, schema(value), seed)))


@EVERY_TOKENIZER
def test_any_object_is_an_object(name: str) -> None:
    grammar = compiler(name).compile(StructuredOutput("json_object"))
    random = Random(0)
    closers = {token for end in '}]"' for token in TOKENIZERS[name][0]().encode(end, add_special_tokens=False)}
    ending = sorted(closers | TOKENIZERS[name][1])

    def choose(allowed: Any) -> int:
        """Random, but with an inclination to come to an end."""
        ends = np.intersect1d(allowed, ending)
        return random.choice(ends if len(ends) and random.random() < 0.5 else allowed)

    for _ in range(10):
        assert isinstance(json.loads(walk(name, grammar, choose)), dict)


@EVERY_TOKENIZER
@settings(max_examples=60, deadline=None)
@given(
    choices=st.lists(texts(min_size=1, max_size=6), min_size=1),
    seed=st.integers(),
)
def test_a_choice_is_one_of_the_choices(name: str, choices: list[str], seed: int) -> None:
    assert random_walk(name, StructuredOutput("choice", json.dumps(choices)), seed) in choices


@EVERY_TOKENIZER
def test_every_choice_can_come(name: str) -> None:
    choices = ["a", "ab", "abc", "日本", "🎉", 'say "no"\n', "\\d+", "a|b", " yes", "/x/"]
    found = {random_walk(name, StructuredOutput("choice", json.dumps(choices)), seed) for seed in range(300)}
    assert found == set(choices)


@EVERY_TOKENIZER
@pytest.mark.parametrize(
    "expression",
    [r"\d{3}-\d{2}", r"[ab]{2,5}|c", r"(?i)yes|no", r"a/b\.c", r"[a-zé]{1,4}( [A-Z][a-z]{0,5}){0,2}", r"x{0,3}", '"q"', "[日本🎉]{2}"],
)  # fmt: skip
def test_an_expression_matches_the_whole_text(name: str, expression: str) -> None:
    for seed in range(10):
        text = random_walk(name, StructuredOutput("regex", expression), seed)
        assert re.fullmatch(expression, text), text


@EVERY_TOKENIZER
def test_a_lark_grammar(name: str) -> None:
    source = (
        'start: "<call>" call "</call>"\ncall: NAME "(" %json {"type": "integer"} ")"\nNAME: /[a-z]{1,5}/  // a name'
    )
    for seed in range(10):
        text = random_walk(name, StructuredOutput("lark", source), seed)
        assert re.fullmatch(r"<call>[a-z]{1,5}\(-?\d+\)</call>", text), text


# -- white space


SPACED = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2, "minItems": 2},
        "b": {
            "type": "object",
            "properties": {"c": {"type": "null"}},
            "required": ["c"],
            "additionalProperties": False,
        },
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@EVERY_TOKENIZER
@pytest.mark.parametrize(
    "structure",
    [
        schema(SPACED),
        schema({**SPACED, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": "[ \n]+"}}),
        StructuredOutput("lark", f"// %json {{\nstart: %json {json.dumps(SPACED)}"),
    ],
    ids=["schema", "schema that asks for more", "lark"],
)
def test_who_says_blanks_wherever_possible_comes_to_an_end_all_the_same(name: str, structure: StructuredOutput) -> None:
    blank = {token for token in range(len(TOKENIZERS[name][0]())) if text_of(name, [token]).isspace()}

    def choose(allowed: Any) -> int:
        return next((token for token in allowed if token in blank), allowed[-1])

    text = walk(name, compiler(name).compile(structure), choose, limit=100)
    validate(SPACED, json.loads(text))
    assert re.sub(r"(?<=[,:]) ", "", text) == json.dumps(json.loads(text), separators=(",", ":"))
    assert ": " in text


def test_a_lark_grammar_may_ask_for_its_own_white_space_and_may_write_of_schemas_in_texts() -> None:
    own = 'start: "%json {" %json {"x-guidance": {"item_separator": "  ,", "whitespace_flexible": false}, "enum": [[1, 2]]} /%json \\{\\}/'
    assert random_walk("byte level", StructuredOutput("lark", own), 0) == "%json {[1  ,2]%json {}"
    assert json.loads(
        random_walk("byte level", StructuredOutput("lark", 'start: %json {"const": 1} | %json { "const": {} }'), 1)
    ) in (1, {})


# -- what is refused

REFUSED: dict[str, tuple[StructuredOutput, str]] = {
    "unknown type": (schema({"type": "not-a-type"}), "not-a-type"),
    "a schema that is only itself": (schema({"$ref": "#"}), "no text can have this form"),
    "two that are each other": (
        schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        "no text can have this form",
    ),
    "a reference to nothing": (schema({"$ref": "#/$defs/a"}), "a"),
    "a reference to elsewhere": (schema({"$ref": "https://example.com/schema.json"}), "example.com"),
    "unsupported keyword": (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "unsupported keyword inside": (schema({"properties": {"a": {"not": {}}}}), "not"),
    "unsupported keyword, taken lightly": (schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
    "unknown format": (schema({"type": "string", "format": "frob"}), "frob"),
    "an ambiguous oneOf": (
        schema({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "x-guidance": {"coerce_one_of": True}}),
        "oneOf",
    ),
    "contradiction": (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    "pattern that is none": (schema({"type": "string", "pattern": "("}), "unclosed group"),
    "explosion": (schema({"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(12)]}), "too large"),
    "expression that is none": (StructuredOutput("regex", "("), "unclosed group"),
    "look-ahead": (StructuredOutput("regex", "(?=a)b"), "look-ahead"),
    "back reference": (StructuredOutput("regex", r"(a)\1"), "backreferences"),
    "deep expression": (StructuredOutput("regex", "(" * 5000 + "a" + ")" * 5000), "invalid regex"),
    "expression of nothing": (StructuredOutput("regex", r"[^\s\S]"), "no text can have this form"),
    "too much to look at": (schema({"type": "integer", "multipleOf": 10**9 + 7}), "fuel exhausted"),
    "unknown rule": (StructuredOutput("lark", "start: foo"), "foo"),
    "rule that is itself": (StructuredOutput("lark", "start: start"), "no text can have this form"),
    "deep grammar": (StructuredOutput("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
    "no grammar": (StructuredOutput("lark", "hello"), "Expected token"),
}  # fmt: skip


@pytest.mark.parametrize(("structure", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_compiled_is_refused_with_the_compilers_words(structure: StructuredOutput, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as caught:
        compiler("byte level").compile(structure)
    assert caught.value.field == "structured_output"
    assert len(caught.value.message) < 1100
    assert "verbose" not in caught.value.message
    # the next is served
    assert random_walk("byte level", StructuredOutput("choice", '["a"]'), 0) == "a"


def test_a_tuple_as_draft_7_writes_it_is_kept_to() -> None:
    draft = {"type": "array", "items": [{"const": 1}, {"const": "a"}], "minItems": 2, "maxItems": 2}
    for value in (draft, {**draft, "$schema": "http://json-schema.org/draft-07/schema#"}):
        assert json.loads(random_walk("byte level", schema(value), 3)) == [1, "a"]


@pytest.mark.parametrize(
    "keyword",
    [
        "contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "propertyNames", "dependentRequired",
        "dependentSchemas", "unevaluatedProperties", "if", "then", "else", "not", "$dynamicRef", "$recursiveRef",
    ],
)  # fmt: skip
def test_no_keyword_of_the_specification_is_passed_over(keyword: str) -> None:
    values = {
        "$dynamicRef": "#a",
        "uniqueItems": True,
        "minContains": 2,
        "maxContains": 2,
        "dependentRequired": {"a": ["b"]},
    }
    with pytest.raises(InvalidRequest, match=re.escape(keyword)):
        compiler("byte level").compile(schema({keyword: values.get(keyword, {})}))


def test_a_schema_may_be_recursive() -> None:
    value = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    for seed in range(5):
        found = json.loads(random_walk("byte level", schema(value), seed))
        while found is not None:
            assert found.keys() == {"next"}
            found = found["next"]


def test_a_model_without_an_end_token_has_no_structured_output() -> None:
    bare = GrammarCompiler(tokenizers.byte_level(), vocab_size=300, eos_token_ids=frozenset())
    with pytest.raises(InvalidRequest, match="no end token"):
        bare.compile(StructuredOutput("json_object"))


def test_characters_that_the_tokenizer_cannot_spell_are_refused() -> None:
    """SmolLM2 has no token for the first byte of this one."""
    for structure in (
        StructuredOutput("choice", '["a\U00040000"]'),
        schema({"const": "\U00040000"}),
        StructuredOutput("json_schema", '{"properties": {"\\ud8c0\\udc00": {}}}'),
        StructuredOutput("regex", "\U00040000"),
    ):
        with pytest.raises(InvalidRequest, match="no tokens"):
            compiler("smollm2").compile(structure)
        compiler("byte level").compile(structure)


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    bare = GrammarCompiler(ByteTokenizer(), vocab_size=256, eos_token_ids=frozenset({0}))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="tokenizer cannot be used"):
            bare.compile(StructuredOutput("json_object"))


def conjunctions(number: int) -> dict[str, StructuredOutput]:
    """What must match so many expressions at once."""
    definitions = {f"a{place}": {"$ref": f"#/$defs/a{place + 1}", "pattern": f"a{place}"} for place in range(number)}
    return {
        "lark": StructuredOutput(
            "lark", "start: A\nA: " + " & ".join(f"/.*a{place}&.*/" for place in range(number + 1))
        ),
        "allOf": schema({"type": "string", "allOf": [{"pattern": f"a{place}"} for place in range(number)]}),
        "$ref": schema({"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{number}": {"type": "string"}}}),
        "lark with a schema": StructuredOutput(
            "lark", "start: %json " + json.dumps({"allOf": [{"pattern": f"a{place}"} for place in range(number)]})
        ),
    }


@pytest.mark.parametrize("kind", ["lark", "allOf", "$ref", "lark with a schema"])
def test_expressions_that_would_take_for_ever_together_are_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest, match="more than 16 expressions"):
        compiler("byte level").compile(conjunctions(40)[kind])
    compiler("byte level").compile(conjunctions(3)[kind])


def test_many_patterns_that_stand_apart_are_no_matter() -> None:
    properties = {f"p{number}": {"type": "string", "pattern": "^a$"} for number in range(40)}
    value = {"properties": {**properties, "allOf": {"allOf": [{"const": 1}]}}}
    compiler("byte level").compile(schema(value))


def long_chains() -> dict[str, StructuredOutput]:
    """Rules and references that lead to one another, as many as a source may hold."""
    rules = "\n".join(f"r{number}: r{number + 1}" for number in range(15000))
    tokens = rules.replace("r", "R")
    references = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(7000)}
    nested = {f"a{number}": {"anyOf": [{"items": {"$ref": f"#/$defs/a{number + 1}"}}]} for number in range(3500)}
    return {
        "rules": StructuredOutput("lark", f'start: r0\n{rules}\nr15000: "a"'),
        "tokens": StructuredOutput("lark", f'start: R0\n{tokens}\nR15000: "a"'),
        "references": schema({"$ref": "#/$defs/a0", "$defs": {**references, "a7000": {"const": 1}}}),
        "schemas": schema({"$ref": "#/$defs/a0", "$defs": {**nested, "a3500": {"const": 1}}}),
    }


@pytest.mark.parametrize("kind", ["rules", "tokens", "references", "schemas"])
def test_a_long_chain_does_not_end_the_process(kind: str) -> None:
    grammar = compiler("byte level").compile(long_chains()[kind])
    assert grammar.start().allowed().any()
    assert threading.stack_size() == 0


def test_a_compiler_that_panics_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        """As a panic in Rust comes to Python."""

    def panic(*_: object) -> None:
        raise PanicError

    broken = GrammarCompiler(tokenizers.byte_level(), vocab_size=300, eos_token_ids=frozenset({tokenizers.END}))
    monkeypatch.setattr(broken, "_make_tokenizer", panic)
    with pytest.raises(InvalidRequest, match="gave up"):
        broken.compile(StructuredOutput("json_object"))


# -- the vocabulary


@pytest.mark.parametrize("padding", [1, 31, 64, 1000])
def test_ids_beyond_the_tokenizers_are_never_allowed(padding: int) -> None:
    number = len(tokenizers.byte_level())
    state = compiler("byte level", padding).compile(StructuredOutput("regex", "(?s:.*)")).start()
    allowed = state.allowed()
    assert len(allowed) == -(-(number + padding) // 32)
    assert max(ids_of(allowed)) < number


def test_a_model_with_fewer_logits_than_the_tokenizer_has_tokens() -> None:
    number = len(tokenizers.byte_level())
    few = GrammarCompiler(tokenizers.byte_level(), vocab_size=number - 40, eos_token_ids=frozenset({tokenizers.END}))
    allowed = few.compile(StructuredOutput("regex", "(?s:.*)")).start().allowed()
    assert len(allowed) == -(-(number - 40) // 32)
    assert max(ids_of(allowed)) < number - 40
    assert (
        max(ids_of(compiler("byte level").compile(StructuredOutput("regex", "(?s:.*)")).start().allowed()))
        == number - 1
    )


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_are_no_text(name: str) -> None:
    allowed = ids_of(compiler(name).compile(StructuredOutput("regex", "(?s:.*)")).start().allowed())
    ends = TOKENIZERS[name][1]
    assert set(allowed) & set(TOKENIZERS[name][0]().all_special_ids) == ends
    assert ends < set(allowed)


@given(st.sets(st.integers(0, 299)), st.sets(st.integers(0, 319)), st.sets(st.integers(320, 10**6)))
def test_sets_of_tokens(some: set[int], others: set[int], beyond: set[int]) -> None:
    words = words_of(some | beyond, 300)
    assert set(ids_of(words)) == some
    assert set(ids_of(without(words, np.array(sorted(others | beyond), dtype=np.int64)))) == some - others
    assert set(ids_of(words)) == some


# -- following a text


@EVERY_TOKENIZER
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_state_that_went_astray_and_back_is_where_it_was(name: str, data: st.DataObject) -> None:
    grammar = compiler(name).compile(schema(PERSON))
    random = Random(data.draw(st.integers()))
    size = len(TOKENIZERS[name][0]())
    state, tokens = grammar.start(), []
    for _ in range(30):
        allowed = ids_of(state.allowed())
        for count in (random.randrange(4), random.randrange(4)):
            for _ in range(count):
                # allowed or not, and ends among them
                pool = allowed if random.random() < 0.7 else [*range(size)]
                state.push(random.choice(pool))
                if not state.is_outside:
                    allowed = ids_of(state.allowed())
            state.pop(count)
            assert not state.is_outside
        fresh = grammar.start()
        for token in tokens:
            fresh.push(token)
        assert np.array_equal(state.allowed(), fresh.allowed())
        token = random.choice(ids_of(state.allowed()))
        if token in grammar.eos_token_ids:
            break
        tokens.append(token)
        state.push(token)


def test_a_complete_text_allows_nothing_but_the_end() -> None:
    state = compiler("smollm2").compile(StructuredOutput("choice", '["ab"]')).start()
    for token in tokenizers.smollm2().encode("ab"):
        assert 0 not in ids_of(state.allowed())
        state.push(token)
    assert ids_of(state.allowed()) == [0, 2]
    state.push(0)
    assert state.is_outside
    state.pop(1)
    assert ids_of(state.allowed()) == [0, 2]


def test_texts_do_not_disturb_one_another() -> None:
    grammar = compiler("byte level").compile(StructuredOutput("choice", '["abc", "xyz"]'))
    states = [grammar.start(), grammar.start()]
    for tokens in zip(*(tokenizers.byte_level().encode(text) for text in ("abc", "xyz")), strict=True):
        for state, token in zip(states, tokens, strict=True):
            assert token in ids_of(state.allowed())
            state.push(token)
    assert all(ids_of(state.allowed()) == [tokenizers.END] for state in states)


def test_a_grammar_that_grows_too_large_on_its_way_fails_without_showing_the_text() -> None:
    source = "start: x{1000}\nx: y{1000}\ny: z{1000}\nz: /[s]/"
    state = compiler("byte level").compile(StructuredOutput("lark", source)).start()
    (letter,) = tokenizers.byte_level().encode("s")
    for _ in range(5):
        state.push(letter)
    with pytest.raises(RequestFailed, match=r"structured_output failed: .*limit") as caught:
        state.allowed()
    assert caught.value.field == "structured_output"
    assert "sss" not in caught.value.message and "⟦" not in caught.value.message


# -- the cache


def test_what_was_compiled_lately_is_kept() -> None:
    bounded = GrammarCompiler(tokenizers.byte_level(), vocab_size=300, eos_token_ids=frozenset({tokenizers.END}))
    structures = [StructuredOutput("choice", json.dumps([str(number)])) for number in range(MAX_GRAMMARS + 1)]
    assert bounded.find(structures[0]) is None
    grammars = [bounded.compile(structure) for structure in structures[:-1]]
    assert bounded.compile(structures[0]) is grammars[0] is bounded.find(structures[0])
    bounded.compile(structures[-1])
    assert bounded.find(structures[1]) is None
    assert bounded.find(structures[0]) is grammars[0]
    assert bounded.find(StructuredOutput("regex", structures[0].value)) is None


def test_many_threads_may_compile() -> None:
    shared = GrammarCompiler(tokenizers.byte_level(), vocab_size=300, eos_token_ids=frozenset({tokenizers.END}))
    texts: list[str] = []

    def work() -> None:
        for number in range(20):
            grammar = shared.compile(StructuredOutput("choice", json.dumps([str(number)])))
            texts.append(walk("byte level", grammar, Random(0).choice))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == sorted(4 * list(map(str, range(20))))


def test_llguidance_is_not_imported_before_a_grammar_is_compiled() -> None:
    program = """
import sys, trio
from trio_llm.core import grammar, logits, torch_executor
from trio_llm.engine.simulation import open_simulation
async def main():
    async with open_simulation() as engine:
        async with engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True) as generation:
            async for delta in generation: pass
    assert len(generation.choices[0].token_ids) == 4
trio.run(main)
assert "llguidance" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
