"""Sampling parameters through the whole core, on a real model: whoever is in the batch, whatever happens to a
sequence, the tokens are those of a plain loop over transformers' own logits, and so are the log-probabilities."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.request import FinishReason, Request, Status
from trio_llm.core.step import SequenceOutput, TokenLogprobs
from trio_llm.core.torch_executor import MAX_SCORED_TOKENS

from .helpers import gather, is_idle, make_core, make_request, run
from .tiny_models import PROMPTS, build, core_of, paged

EOS = (17, 91)
NUM_TOKENS = 24

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 1.0},
    "repetition": {"repetition_penalty": 1.4, "logprobs": 2},
    "presence": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "frequency": {"temperature": 0.9, "frequency_penalty": 1.2, "logprobs": 0},
    "bias": {"logit_bias": {5: 6.0, 40: 8.0, 41: 8.0}, "temperature": 0.7, "top_p": 0.8},
    "allowed": {"allowed_token_ids": tuple(range(3, 23)), "temperature": 1.2, "typical_p": 0.7},
    "min_tokens": {"min_tokens": 9, "logit_bias": {17: 100, 91: 99}},
    "bad_words": {"temperature": 0.5, "logprobs": 3},
    "all": {
        "temperature": 1.1, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": 0.1, "logit_bias": {3: -5.0}, "min_tokens": 4, "logprobs": 5,
    },
}  # fmt: skip


@functools.cache
def model(architecture: str = "llama"):
    return paged(build(architecture), block_size=4, num_blocks=400)


def requests() -> list[Request]:
    """One of each kind, with bad words that do come up without being forbidden."""
    made = []
    for index, (kind, fields) in enumerate(KINDS.items()):
        request = make_request(
            kind, PROMPTS[index % len(PROMPTS)], max_tokens=NUM_TOKENS, seed=index, eos=EOS, **fields
        )
        if kind == "bad_words":
            request.bad_words = bad_words()
        made.append(request)
    return made


@functools.cache
def bad_words() -> tuple[tuple[int, ...], ...]:
    """Some of what the request would say: a token, a pair and a triple."""
    index = list(KINDS).index("bad_words")
    fields = {**KINDS["bad_words"], "max_tokens": NUM_TOKENS, "seed": index, "eos": EOS}
    outputs, _ = run(core_of(model(), num_blocks=400), [make_request("x", PROMPTS[index % len(PROMPTS)], **fields)])
    tokens = outputs["x", 0]
    assert len(tokens) >= 8
    return ((tokens[5],), tuple(tokens[0:2]), tuple(tokens[2:5]))


@functools.cache
def alone() -> dict[tuple[str, int], tuple[list[int], list[TokenLogprobs]]]:
    found = {}
    for request in requests():
        found |= run_with_logprobs(core_of(model(), num_blocks=400), [request])
    return found


def run_with_logprobs(core: EngineCore, these: Sequence[Request], before_step=lambda core: None):
    outputs: dict[tuple[str, int], list[int]] = {}
    reasons: dict[tuple[str, int], FinishReason] = {}
    logprobs: dict[tuple[str, int], list[TokenLogprobs]] = {}
    for request in these:
        core.add(request)
    while core.has_work():
        before_step(core)
        step = core.step()
        core.check()
        gather(outputs, reasons, step)
        for output in step:
            logprobs.setdefault((output.request_id, output.index), []).extend(output.logprobs)
            core.acknowledge(output.request_id, output.index, len(output.token_ids))
    assert is_idle(core)
    return {key: (tokens, logprobs[key]) for key, tokens in outputs.items()}


def same(found, wanted) -> None:
    """Tokens equal; log-probabilities equal but for the rounding of another batch."""
    assert {key: tokens for key, (tokens, _) in found.items()} == {key: tokens for key, (tokens, _) in wanted.items()}
    for key, (_, logprobs) in found.items():
        for left, right in zip(logprobs, wanted[key][1], strict=True):
            assert (left.token_id, [token for token, _ in left.top]) == (right.token_id, [t for t, _ in right.top])
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert [p for _, p in left.top] == pytest.approx([p for _, p in right.top], abs=1e-4)


def test_alone_each_does_what_it_was_asked() -> None:
    tokens = {kind: found[0] for (kind, _), found in alone().items()}
    assert len(set(tokens["presence"])) >= 23 > len(set(tokens["greedy"]))
    assert set(tokens["allowed"]) <= set(range(3, 23))
    assert tokens["min_tokens"].index(17) == 9 == len(tokens["min_tokens"]) - 1
    text = tokens["bad_words"]
    for word in bad_words():
        assert all(tuple(text[i : i + len(word)]) != word for i in range(len(text)))
    for (kind, _), (outputs, logprobs) in alone().items():
        wanted = KINDS[kind].get("logprobs")
        assert [entry.token_id for entry in logprobs] == ([] if wanted is None else outputs)
        assert all(len(entry.top) == wanted for entry in logprobs)


LIMITS = {
    "one pass": {"num_blocks": 400, "max_num_seqs": 16},
    "chunked": {"num_blocks": 400, "max_num_seqs": 11, "max_num_batched_tokens": 13},
    "preempted": {"num_blocks": 36, "max_num_seqs": 10, "max_num_batched_tokens": 40},
}


@pytest.mark.parametrize("limits", LIMITS)
def test_a_mixed_batch_gives_each_what_it_gets_alone(limits: str) -> None:
    core = core_of(model(), **LIMITS[limits])
    same(run_with_logprobs(core, requests()), alone())
    assert (core.statistics().num_preemptions > 0) == (limits == "preempted")


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("limits", LIMITS)
def test_drafts_change_nothing(limits: str, share: float) -> None:
    """Penalties, bad words and min_tokens count the drafts before a row, and forget those that were wrong."""
    generator = random.Random(3)
    these = requests()
    right = {key: tokens for key, (tokens, _) in alone().items()}

    def draft(core: EngineCore) -> None:
        for request in these:
            (sequence,) = request.sequences
            if sequence.status is Status.RUNNING:
                rest = right[request.id, 0][sequence.num_output_tokens :][: generator.randrange(7)]
                sequence.draft_token_ids = [
                    token if generator.random() < share else generator.randrange(160) for token in rest
                ]

    core = core_of(model(), **LIMITS[limits])
    same(run_with_logprobs(core, these, draft), alone())


def test_steps_that_fail_half_way_change_nothing() -> None:
    """The step's tokens are chosen and counted, and then it raises: the rows come again, one by one."""
    core = core_of(model(), num_blocks=400, max_num_seqs=16)
    collect = core.executor.collect
    generator = random.Random(1)

    def fail(handle):
        result = collect(handle)
        if len(handle.plan.rows) > 1 and generator.random() < 0.5:
            raise OSError("after all was done")
        return result

    core.executor.collect = fail  # type: ignore[method-assign]
    same(run_with_logprobs(core, requests()), alone())


def test_a_request_that_leaves_no_token_to_choose_fails_alone() -> None:
    impossible = make_request("bad", [1, 2, 3], max_tokens=5, eos=[7], min_tokens=2, allowed_token_ids=(7,))
    core = core_of(model(), num_blocks=400, max_num_seqs=16)
    outputs, reasons = run(core, [*requests(), impossible])
    assert reasons["bad", 0] is FinishReason.ERROR
    assert outputs.pop(("bad", 0)) == []
    assert outputs == {key: tokens for key, (tokens, _) in alone().items()}
    assert is_idle(core)


# -- against transformers


def own_logits(architecture: str, tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return build(architecture)(torch.tensor([list(tokens)])).logits[0].float()


def own_logprobs(architecture: str, tokens: Sequence[int]) -> Tensor:
    return own_logits(architecture, tokens).log_softmax(-1)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
def test_greedy_under_all_processors_is_transformers_own_loop(architecture: str) -> None:
    prompt, bad = PROMPTS[0], [[9], [30, 31]]
    request = make_request(
        "x", prompt, max_tokens=30, eos=EOS, repetition_penalty=1.2, min_tokens=30, presence_penalty=0.4,
        frequency_penalty=0.3, logprobs=20,
    )  # fmt: skip
    request.bad_words = ((9,), (30, 31))
    ((tokens, logprobs),) = run_with_logprobs(core_of(model(architecture), num_blocks=400), [request]).values()
    processors = [
        RepetitionPenaltyLogitsProcessor(1.2),
        NoBadWordsLogitsProcessor(bad),
        MinNewTokensLengthLogitsProcessor(len(prompt), 30, list(EOS)),
    ]
    text = list(prompt)
    for token, entry in zip(tokens, logprobs, strict=True):
        raw = own_logits(architecture, text)[-1]
        scores = raw[None].clone()
        scores = processors[0](torch.tensor([text]), scores)
        output = text[len(prompt) :]
        for other in set(output):
            scores[0, other] -= 0.3 * output.count(other) + 0.4
        for processor in processors[1:]:
            scores = processor(torch.tensor([text]), scores)
        best = scores[0].topk(2)
        assert token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < 1e-4
        # reported is what was there before any of it
        wanted = raw.log_softmax(-1)
        assert entry.logprob == pytest.approx(float(wanted[token]), abs=1e-4)
        assert [p for _, p in entry.top] == pytest.approx(wanted.topk(20).values.tolist(), abs=1e-4)
        assert [float(wanted[other]) for other, _ in entry.top] == pytest.approx([p for _, p in entry.top], abs=1e-4)
        text.append(token)
    assert len(set(tokens)) > 20


@pytest.mark.parametrize("kind", [kind for kind, fields in KINDS.items() if "logprobs" in fields])
def test_logprobs_are_those_of_a_plain_forward(kind: str) -> None:
    request = next(request for request in requests() if request.id == kind)
    tokens, logprobs = alone()[kind, 0]
    wanted = own_logprobs("llama", [*request.prompt_token_ids, *tokens])[len(request.prompt_token_ids) - 1 : -1]
    for row, entry in zip(wanted, logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        best = row.topk(len(entry.top))
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


# -- the prompt's


def prompt_logprobs(core: EngineCore, these: Sequence[Request]) -> dict[str, list[SequenceOutput]]:
    """The outputs that carry them, by request."""
    found: dict[str, list[SequenceOutput]] = {}
    for request in these:
        core.add(request)
    while core.has_work():
        for output in core.step():
            core.acknowledge(output.request_id, output.index, len(output.token_ids))
            if output.prompt_logprobs is not None:
                found.setdefault(output.request_id, []).append(output)
        core.check()
    assert is_idle(core)
    return found


LONG = [(7 * i * i + 3 * i) % 150 + 3 for i in range(MAX_SCORED_TOKENS * 2 + 5)]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 11}, {"num_blocks": 60, "max_num_seqs": 4}])
def test_prompt_logprobs_are_those_of_a_plain_forward(architecture: str, limits: dict[str, int]) -> None:
    prompts = {"long": LONG, "one": [5], "two": [5, 9], "piece": LONG[:MAX_SCORED_TOKENS], "odd": LONG[:33]}
    these = [
        make_request(name, prompt, max_tokens=12, prompt_logprobs=3, n=1 + (name == "odd"))
        for name, prompt in prompts.items()
    ]
    plain = [make_request(f"plain {name}", prompt, max_tokens=12) for name, prompt in prompts.items()]
    core = core_of(model(architecture), **{"num_blocks": 400, **limits})
    found = prompt_logprobs(core, [request for pair in zip(plain, these, strict=True) for request in pair])
    assert found.keys() == prompts.keys()
    for name, prompt in prompts.items():
        (output,) = found[name]  # once, with the first token
        assert len(output.token_ids) >= 1
        assert output.prompt_logprobs is not None
        assert [entry.token_id for entry in output.prompt_logprobs] == prompt[1:]
        for row, entry in zip(own_logprobs(architecture, prompt)[:-1], output.prompt_logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert [p for _, p in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_prompt_logprobs_change_no_token() -> None:
    fields = {"max_tokens": 12, "temperature": 0.8, "repetition_penalty": 1.2}
    plain, _ = run(core_of(model(), num_blocks=400), [make_request("x", LONG, n=2, **fields)])
    core = core_of(model(), num_blocks=400, max_num_batched_tokens=70)
    scored, _ = run(core, [make_request("x", LONG, n=2, prompt_logprobs=0, **fields)])
    assert scored == plain


def test_logits_of_a_prompt_are_never_all_there_at_once() -> None:
    sizes: list[int] = []
    paged_model = model()
    forward = paged_model.forward

    def watch(inputs, wanted):
        sizes.append(len(wanted))
        return forward(inputs, wanted)

    paged_model.forward = watch  # type: ignore[method-assign]
    try:
        these = [make_request(str(index), LONG, max_tokens=2, prompt_logprobs=20) for index in range(3)]
        prompt_logprobs(core_of(paged_model, num_blocks=400), these)
    finally:
        del paged_model.forward  # type: ignore[method-assign]
    assert sum(sizes) >= 3 * len(LONG)
    assert max(sizes) == MAX_SCORED_TOKENS


def test_prompt_logprobs_read_nothing_from_the_cache_but_leave_it_filled() -> None:
    core = core_of(model(), num_blocks=400)
    run(core, [make_request("first", LONG, max_tokens=2)])
    run(core, [make_request("scored", LONG, max_tokens=2, prompt_logprobs=1)])
    assert core.statistics().num_cache_hits == 0
    run(core, [make_request("last", LONG, max_tokens=2)])
    assert core.statistics().num_cache_hits > len(LONG) - 8


def test_prompt_logprobs_survive_preemption_and_the_end_of_their_leader() -> None:
    core = core_of(model(), num_blocks=60, max_num_batched_tokens=9)
    request = make_request("x", LONG[:90], n=2, max_tokens=4, prompt_logprobs=1)
    core.add(request)
    for _ in range(3):
        core.step()
    core.queues.preempt(request.sequences[0])
    for _ in range(5):
        core.step()
    core.finish("x", 0)
    (output,) = prompt_logprobs(core, [])["x"]
    assert output.index == 1
    row = own_logprobs("llama", LONG[:90])
    assert output.prompt_logprobs is not None
    assert [entry.logprob for entry in output.prompt_logprobs] == pytest.approx(
        [float(row[place, token]) for place, token in enumerate(LONG[1:90])], abs=1e-4
    )


# -- without a model


def test_end_tokens_do_not_end_what_has_not_min_tokens() -> None:
    info = ExecutorInfo(num_blocks=64, block_size=4, vocab_size=40, max_model_len=128)
    core = make_core(FakeExecutor(info=info, next_token=lambda context, index: 7))
    outputs, reasons = run(core, [make_request("x", [1], max_tokens=9, min_tokens=3, eos=[7])])
    assert outputs == {("x", 0): [7] * 4}
    assert reasons == {("x", 0): FinishReason.STOP}
