"""Structured output through a model's logits: each row by itself, with all that a request may ask for beside it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trio_llm.core.draft_model import DraftModel
from trio_llm.core.drafter import NgramDrafter
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.grammar import Grammar, GrammarCompiler
from trio_llm.core.logits import Edits, Rewriter
from trio_llm.core.model import PagedModel
from trio_llm.core.request import FinishReason, Request
from trio_llm.core.sampling_params import SamplingParams, StructuredOutput
from trio_llm.core.speculation import Speculation
from trio_llm.core.step import SamplingTask
from trio_llm.core.step_costs import StepCosts
from trio_llm.core.torch_executor import TorchExecutor
from trio_llm.errors import RequestFailed

from . import tokenizers
from .helpers import is_idle, make_request, run
from .schemas import validate
from .tiny_models import build, core_of, paged

VOCAB_SIZE = 320
"""More than the tokenizer has tokens."""
EOS = frozenset({tokenizers.END})
COMPILER = GrammarCompiler(tokenizers.byte_level(), vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
NUM_BLOCKS = 200

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "list": {"type": "array", "items": {"enum": ["aaaa", "bbbb", "é"]}, "minItems": 6, "maxItems": 12},
        "text": {"type": "string", "maxLength": 8},
    },
    "required": ["on", "list", "text"],
    "additionalProperties": False,
}
SOURCES = {
    "schema": StructuredOutput("json_schema", json.dumps(SCHEMA)),
    "choice": StructuredOutput("choice", '["red", "green", "greenish", "日本"]'),
    "regex": StructuredOutput("regex", "(ab|cd){10,20}!"),
    "lark": StructuredOutput("lark", 'start: "<" %json {"enum": [true, [1, 2], "x"]} ">"'),
}
GREEDY = {"temperature": 0.0}
RANDOM = {"temperature": 1.0}


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return paged(build("llama", vocab_size=VOCAB_SIZE), block_size=4, num_blocks=NUM_BLOCKS)


def text(tokens: Iterable[int]) -> str:
    return tokenizers.byte_level().decode([token for token in tokens if token not in EOS])


def check(kind: str, found: str) -> None:
    """That a complete text is of its form."""
    match kind:
        case "schema":
            validate(SCHEMA, json.loads(found))
        case "choice":
            assert found in ("red", "green", "greenish", "日本")
        case "regex":
            assert re.fullmatch("(ab|cd){10,20}!", found)
        case "lark":
            assert re.fullmatch(r'<(true|\[1, ?2\]|"x")>', found)


def request(request_id: str, structure: StructuredOutput | None, *, max_tokens: int = 150, **fields: Any) -> Request:
    made = make_request(request_id, [5, 6, 7], max_tokens=max_tokens, eos=EOS, structured_output=structure, **fields)
    made.grammar = None if structure is None else COMPILER.compile(structure)
    return made


def one_of_each(**fields: Any) -> list[Request]:
    return [request(kind, structure, seed=7, **fields) for kind, structure in SOURCES.items()]


def core(model: PagedModel, **limits: int) -> EngineCore:
    return core_of(model, **{"num_blocks": NUM_BLOCKS, **limits})


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01}])
def test_each_text_is_of_its_form_and_ends(model: PagedModel, sampling: dict[str, Any]) -> None:
    neighbour = request("free", None, max_tokens=60, ignore_eos=True, **sampling)
    engine = core(model)
    outputs, reasons = run(engine, [*one_of_each(**sampling), neighbour])
    for kind in SOURCES:
        assert outputs[kind, 0][-1] in EOS
        assert reasons[kind, 0] is FinishReason.STOP
        check(kind, text(outputs[kind, 0]))
    alone, _ = run(core(model), [request("free", None, max_tokens=60, ignore_eos=True, **sampling)])
    assert outputs["free", 0] == alone["free", 0]
    assert is_idle(engine)


def test_each_choice_of_a_request_follows_its_own_text(model: PagedModel) -> None:
    outputs, reasons = run(core(model, max_num_seqs=16), one_of_each(n=6, **RANDOM))
    assert set(reasons.values()) == {FinishReason.STOP}
    for (kind, _), tokens in outputs.items():
        check(kind, text(tokens))
    assert len({tuple(outputs["schema", index]) for index in range(6)}) > 1


def test_max_tokens_cuts_a_text_before_it_is_complete(model: PagedModel) -> None:
    outputs, reasons = run(core(model), [request("a", SOURCES["schema"], max_tokens=9, **RANDOM)])
    assert reasons["a", 0] is FinishReason.LENGTH
    assert len(outputs["a", 0]) == 9
    assert text(outputs["a", 0]).startswith('{"on":')


# -- drafts, preemption, faults


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_texts_with_ngram_drafts_are_the_texts_without(model: PagedModel, sampling: dict[str, Any]) -> None:
    plain_core = core(model)
    plain, _ = run(plain_core, one_of_each(n=2, **sampling))
    # drafts as if they cost nothing: right and wrong ones are many
    speculation = Speculation(
        NgramDrafter(max_n=3, min_n=1), max_tokens=6, vocab_size=VOCAB_SIZE, costs=StepCosts(((1, 1.0), (2, 1.0)))
    )
    engine = core(model)
    engine.speculation = speculation
    drafted, _ = run(engine, one_of_each(n=2, **sampling))
    assert drafted == plain
    statistics = engine.statistics()
    assert 0 < statistics.num_accepted_tokens < statistics.num_draft_tokens
    assert statistics.num_steps < plain_core.statistics().num_steps


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
def test_a_draft_model_guesses_within_the_grammar(model: PagedModel, sampling: dict[str, Any]) -> None:
    """The target's double is always right, which it could not be if it knew no grammar, and one of another
    vocabulary size changes nothing."""
    plain, _ = run(core(model), one_of_each(n=2, **sampling))
    free = StepCosts(((1, 1.0), (1000, 1.0)))
    for other in (
        build("llama", vocab_size=VOCAB_SIZE),
        build("llama", seed=1, vocab_size=400),
        build("llama", seed=1, vocab_size=300),
    ):
        draft = paged(other, block_size=4, num_blocks=NUM_BLOCKS)
        executor = TorchExecutor(draft, num_blocks=NUM_BLOCKS, max_model_len=256, vocab_size=VOCAB_SIZE)
        drafter = DraftModel(
            executor, vocab_size=draft.vocab_size, max_tokens=64, costs=StepCosts(((1, 0.1), (2, 0.1)))
        )
        drafter.prior = (0.9,)
        engine = core(model)
        engine.speculation = Speculation(drafter, max_tokens=5, vocab_size=VOCAB_SIZE, costs=free)
        drafted, _ = run(engine, one_of_each(n=2, **sampling))
        assert drafted == plain
        statistics = engine.statistics()
        if draft.vocab_size == VOCAB_SIZE:
            assert statistics.num_accepted_tokens >= 0.99 * statistics.num_draft_tokens > 0
        else:
            assert 0 < statistics.num_accepted_tokens < statistics.num_draft_tokens
        assert is_idle(engine)


def test_texts_are_the_same_however_often_they_are_preempted(model: PagedModel) -> None:
    plain, _ = run(core(model), one_of_each(n=2, **RANDOM))
    small = core(model, num_blocks=52)
    assert run(small, one_of_each(n=2, **RANDOM))[0] == plain
    assert small.statistics().num_preemptions > 0


def test_a_step_that_failed_leaves_no_trace(model: PagedModel) -> None:
    plain, _ = run(core(model), one_of_each(**RANDOM))
    engine = core(model)
    collect = engine.executor.collect
    num_calls = 0

    def fail_after_the_work(handle: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        result = collect(handle)
        if num_calls % 5 == 0:
            raise RuntimeError("can't allocate memory")
        return result

    engine.executor.collect = fail_after_the_work  # type: ignore[method-assign]
    assert run(engine, one_of_each(**RANDOM))[0] == plain
    assert engine.statistics().num_failed_steps > 3


# -- beside other parameters


def test_penalties_and_biases_stay_inside_the_form(model: PagedModel) -> None:
    fields = {
        "presence_penalty": 2.0,
        "frequency_penalty": -2.0,
        "repetition_penalty": 3.0,
        "logit_bias": dict.fromkeys(range(0, VOCAB_SIZE, 3), 100.0),
    }
    outputs, reasons = run(core(model), one_of_each(**RANDOM, **fields))
    plain, _ = run(core(model), one_of_each(**RANDOM))
    assert outputs != plain
    for kind in SOURCES:
        assert reasons[kind, 0] is FinishReason.STOP
        check(kind, text(outputs[kind, 0]))


@pytest.mark.parametrize(
    "fields", [{"min_tokens": 100}, {"ignore_eos": True}, {"allowed_token_ids": range(3, VOCAB_SIZE)}]
)
def test_where_the_form_allows_nothing_more_the_text_ends(model: PagedModel, fields: dict[str, Any]) -> None:
    fields = {key: tuple(value) if isinstance(value, range) else value for key, value in fields.items()}
    outputs, reasons = run(core(model), one_of_each(**RANDOM, **fields))
    for kind in SOURCES:
        assert reasons[kind, 0] is FinishReason.STOP
        assert outputs[kind, 0][-1] in EOS
        check(kind, text(outputs[kind, 0]))


def test_where_the_form_may_go_on_min_tokens_makes_it(model: PagedModel) -> None:
    structure = StructuredOutput("regex", "[a-c]*")
    lengths = {}
    for name, fields in {"plain": {}, "min": {"min_tokens": 30}, "ignore": {"ignore_eos": True}}.items():
        # an end token that would come at once
        bias = {tokenizers.END: 100}
        outputs, reasons = run(core(model), [request("a", structure, max_tokens=50, logit_bias=bias, **fields)])
        assert re.fullmatch("[a-c]*", text(outputs["a", 0]))
        lengths[name] = len(outputs["a", 0]), reasons["a", 0].value
    assert lengths == {"plain": (1, "stop"), "min": (31, "stop"), "ignore": (50, "length")}


def test_reported_log_probabilities_are_the_models_own(model: PagedModel) -> None:
    """The first token's are those of the same place without a grammar."""
    found: dict[str, Any] = {}
    for name, structure in {"free": None, "bound": SOURCES["choice"]}.items():
        engine = core(model)
        engine.add(request(name, structure, logprobs=20))
        (output,) = engine.step()
        found[name] = output.logprobs[0]
    assert found["free"].top == found["bound"].top
    assert found["bound"].token_id != found["free"].token_id
    assert found["bound"].logprob < found["free"].logprob


def test_stop_tokens_end_a_text_where_the_form_lets_them_come(model: PagedModel) -> None:
    (stop,) = tokenizers.byte_level().encode("b")
    outputs, reasons = run(
        core(model), [request("a", SOURCES["regex"], stop_token_ids=(stop,), min_tokens=9, **RANDOM)]
    )
    found = text(outputs["a", 0])
    assert reasons["a", 0] is FinishReason.STOP
    # before min_tokens it ends nothing, and comes only where nothing else may
    assert re.fullmatch("(ab|cd)*ab|(ab|cd){10,20}!", found)
    assert len(outputs["a", 0]) > 9


# -- who cannot go on


def failures(engine: EngineCore, requests: list[Request]) -> tuple[dict[str, RequestFailed], dict[str, str]]:
    """The errors and the texts, by request."""
    errors: dict[str, RequestFailed] = {}
    texts: dict[str, list[int]] = {}
    for one in requests:
        engine.add(one)
    while engine.has_work():
        for output in engine.step():
            texts.setdefault(output.request_id, []).extend(output.token_ids)
            if output.error is not None:
                assert isinstance(output.error, RequestFailed)
                errors[output.request_id] = output.error
        engine.check()
    assert is_idle(engine)
    return errors, {name: text(tokens) for name, tokens in texts.items()}


@pytest.mark.parametrize("fields", [{"allowed_token_ids": (40, 41)}, {"bad_words": ("red", "green", "日")}])
def test_parameters_that_leave_no_token_fail_that_request_alone(model: PagedModel, fields: dict[str, Any]) -> None:
    bad = request("bad", SOURCES["choice"], **fields)
    encode = tokenizers.byte_level().encode
    bad.bad_words = tuple(tuple(encode(word)[:1]) for word in fields.get("bad_words", ()))
    errors, texts = failures(core(model), [bad, *one_of_each()])
    assert errors.keys() == {"bad"}
    assert errors["bad"].message.startswith("structured_output and what else is asked")
    for kind in SOURCES:
        check(kind, texts[kind])


def test_a_grammar_that_breaks_fails_its_request_alone(model: PagedModel) -> None:
    source = StructuredOutput("lark", "start: x{1000}\nx: y{1000}\ny: z{1000}\nz: /[s]/")
    errors, texts = failures(core(model), [request("bad", source), *one_of_each()])
    assert errors.keys() == {"bad"}
    assert errors["bad"].message.startswith("structured_output failed: ")
    for kind in SOURCES:
        check(kind, texts[kind])


def test_an_output_that_is_not_the_grammars_is_an_error() -> None:
    rewriter = Rewriter(SamplingTask(SamplingParams(), eos_token_ids=EOS, grammar=COMPILER.compile(SOURCES["choice"])))
    rewriter.push(tokenizers.byte_level().encode("x")[0])
    with pytest.raises(RequestFailed, match="none of its texts"):
        rewriter.rewind(1)


# -- cost


class _Count(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_many_rows_of_many_grammars_are_masked_at_once() -> None:
    grammars: list[Grammar] = [COMPILER.compile(structure) for structure in SOURCES.values()]
    counts = []
    for num_rows in (1, 32):
        edits = Edits()
        for row in range(num_rows):
            task = SamplingTask(SamplingParams(), eos_token_ids=EOS, grammar=grammars[row % len(grammars)])
            Rewriter(task).edit(2 * row, edits)
        logits = torch.randn(64, VOCAB_SIZE)
        before = logits.clone()
        with _Count() as count:
            edits.apply(logits)
        del count.calls["aten.view.default"]  # moves nothing
        counts.append(count.calls)
        for row in range(64):
            kept = logits[row] == before[row]
            if row % 2 or row >= 2 * num_rows:
                assert kept.all()
            else:
                words = grammars[row // 2 % len(grammars)].start().allowed()
                assert [bool(words[token // 32] >> (token % 32) & 1) for token in range(VOCAB_SIZE)] == kept.tolist()
                assert logits[row][~kept].isneginf().all()
    assert counts[0] == counts[1]
    assert counts[0].total() < 20
