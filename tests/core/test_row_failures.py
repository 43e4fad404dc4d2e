"""One sequence whose logits are not finite, or whose processors raise: it fails, and its neighbours do not notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from trio_llm.config import EngineSettings
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.logits import Rewriter
from trio_llm.core.model import PagedModel
from trio_llm.core.request import FinishReason, Request
from trio_llm.core.request import Sequence as TokenSequence
from trio_llm.core.speculation import Speculation
from trio_llm.core.step import Row
from trio_llm.core.step_costs import StepCosts
from trio_llm.core.torch_executor import TorchExecutor

from .helpers import FakeDrafter, is_idle, make_request, run
from .tiny_models import PROMPTS, build, core_of, paged

NAN = float("nan")
VOCAB = 160
POISON = 159
"""A token that breaks the model where a test says so."""
BAD_PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11]
NUM_TOKENS = 20

KINDS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.9, "top_p": 0.9, "logprobs": 1}}
kinds = pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)


class Poisoned(TorchExecutor):
    """Counts forwards; `poison` sees every row that samples with its logits, (drafts + 1, vocab), and may change them."""

    def __init__(self, model: PagedModel, poison: Callable[[Row, Tensor], None] = lambda row, logits: None) -> None:
        super().__init__(model, num_blocks=200, max_model_len=256)
        self.poison = poison
        self.num_forwards = 0

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        self.num_forwards += 1
        logits = super()._forward(rows)
        offset = 0
        for row in rows:
            if row.sample:
                self.poison(row, logits[offset : offset + row.num_drafts + 1])
                offset += row.num_drafts + 1
        return logits


class Oracle(FakeDrafter):
    """Drafts what the sequences are known to give, with `change` made to it."""

    def __init__(self, known: dict[tuple[str, int], list[int]]) -> None:
        super().__init__(self._known)
        self.known = known
        self.change: Callable[[TokenSequence, list[int]], list[int]] = lambda sequence, draft: draft

    def _known(self, sequence: TokenSequence, max_tokens: int) -> Sequence[int]:
        tokens = self.known[sequence.request.id, sequence.index][sequence.num_output_tokens :]
        return self.change(sequence, tokens[:max_tokens])


def core_with(executor: TorchExecutor, drafter: Oracle | None = None, **settings: Any) -> EngineCore:
    speculation = None
    if drafter is not None:
        costs = StepCosts(((1, 1.0), (1000, 1.0)))
        speculation = Speculation(drafter, max_tokens=4, vocab_size=VOCAB, costs=costs)
    return EngineCore(executor, EngineSettings(**{"max_num_seqs": 8, **settings}), speculation)


def requests(fields: dict[str, Any], **bad: Any) -> list[Request]:
    """The bad one stands between its neighbours."""
    made = [
        make_request(str(i), prompt, max_tokens=NUM_TOKENS + 9, seed=i, n=1 + i % 2, **fields)
        for i, prompt in enumerate(PROMPTS)
    ]
    return [
        *made[:2],
        make_request("bad", BAD_PROMPT, **{"max_tokens": NUM_TOKENS, "seed": 9, **fields, **bad}),
        *made[2:],
    ]


def steps_of(core: EngineCore, these: Sequence[Request]) -> tuple[list[dict[tuple[str, int], Any]], list[Any]]:
    """What each step gives each neighbour, and all that the bad one gives."""
    for request in these:
        core.add(request)
    steps, bad = [], []
    while core.has_work():
        outputs = core.step()
        core.check()
        steps.append({(o.request_id, o.index): o.token_ids for o in outputs if o.request_id != "bad"})
        bad += [output for output in outputs if output.request_id == "bad"]
    assert is_idle(core)
    return steps, bad


def tokens_of(outputs: Sequence[Any]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@kinds
@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("place", [0, 1, 7])
def test_nan_logits_of_one_sequence_cost_the_others_nothing(fields: dict[str, Any], drafting: bool, place: int) -> None:
    model = paged(build("llama"), block_size=4, num_blocks=200)
    known, _ = run(core_with(Poisoned(model)), requests(fields))
    well = Poisoned(model)
    core = core_with(well, Oracle(known) if drafting else None)
    expected, _ = steps_of(core, requests(fields))
    assert bool(core.statistics().num_accepted_tokens) == drafting

    def poison(row: Row, logits: Tensor) -> None:
        if row.sequence_id == bad_id and 0 <= place - row.output_index < len(logits):
            logits[place - row.output_index, 5] = NAN

    these = requests(fields)
    bad_id = sum(request.params.n for request in these[:2])
    ill = Poisoned(model, poison)
    core = core_with(ill, Oracle(known) if drafting else None)
    found, bad = steps_of(core, these)
    assert found == expected
    assert ill.num_forwards == well.num_forwards == core.statistics().num_steps
    assert core.statistics().num_failed_steps == 0
    assert tokens_of(bad) == known["bad", 0][:place]
    assert bad[-1].finish_reason is FinishReason.ERROR
    assert isinstance(bad[-1].error.__cause__, FloatingPointError)


@kinds
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mixtral"])
def test_a_wrong_draft_that_breaks_the_model_changes_no_token(architecture: str, fields: dict[str, Any]) -> None:
    """Its keys and values are no numbers, and stand in the sequence's own blocks."""
    fields = {**fields, "logit_bias": {POISON: -100}}
    model = build(architecture)
    model.get_input_embeddings().weight[POISON] = NAN
    ours = paged(model, block_size=4, num_blocks=200)
    known, _ = run(core_with(Poisoned(ours)), requests(fields))
    oracle = Oracle(known)
    poisoned = []

    def change(sequence: TokenSequence, draft: list[int]) -> list[int]:
        if sequence.request.id == "bad" and sequence.num_output_tokens >= 6 and len(draft) > 1:
            poisoned.append(sequence.num_output_tokens)
            return [draft[0], POISON, *draft[2:]]
        return draft

    oracle.change = change
    executor = Poisoned(ours)
    core = core_with(executor, oracle)
    outputs, reasons = run(core, requests(fields))
    assert outputs == known
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert executor.num_forwards == core.statistics().num_steps
    assert len(poisoned) >= 1, "no poison was drafted"


@kinds
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mixtral"])
def test_keys_and_values_that_are_no_numbers_leave_nothing_in_their_blocks(
    architecture: str, fields: dict[str, Any]
) -> None:
    """They fail in a small pool, whose blocks the next ones get."""
    fields = {**fields, "logit_bias": {POISON: -100}}
    model = build(architecture)
    model.get_input_embeddings().weight[POISON] = NAN
    ours = paged(model, block_size=4, num_blocks=200)
    good = [make_request(str(i), p, max_tokens=12, seed=i, n=2, **fields) for i, p in enumerate(PROMPTS)]
    expected, _ = run(core_of(ours, num_blocks=200), good)
    # the pool has hardly more: the poison lies everywhere
    bad = [make_request("bad", [POISON] * 75, max_tokens=3, **fields)]
    core = core_of(ours, num_blocks=20, max_num_seqs=3, max_num_batched_tokens=32)
    _, reasons = run(core, bad)
    assert set(reasons.values()) == {FinishReason.ERROR}
    again = [make_request(str(i), p, max_tokens=12, seed=i, n=2, **fields) for i, p in enumerate(PROMPTS)]
    outputs, reasons = run(core, [*again, make_request("bad", [5, POISON, 7], max_tokens=3, n=2, **fields)])
    assert [reasons.pop(("bad", index)) for index in range(2)] == [FinishReason.ERROR] * 2
    assert {key: tokens for key, tokens in outputs.items() if key[0] != "bad"} == expected
    assert set(reasons.values()) == {FinishReason.LENGTH}


# -- the prefix cache

LONG = list(range(20, 50))


class BrokenForAWhile:
    """A model that computes no numbers while `is_broken`."""

    def __init__(self) -> None:
        model = build("llama")
        self.is_broken = False
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, out: out * NAN if self.is_broken else out
        )
        self.model = paged(model, block_size=4, num_blocks=200)


def greedy_of(model: PagedModel) -> list[int]:
    outputs, _ = run(core_of(model), [make_request("a", LONG, max_tokens=6)])
    return outputs["a", 0]


def finish_all(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    while core.has_work():
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        core.check()
    assert is_idle(core)
    return tokens, reasons


@pytest.mark.parametrize("when", ["after", "meanwhile"])
def test_the_blocks_of_a_failed_sequence_poison_nobody(when: str) -> None:
    """Its first chunk was computed wrongly and can be found; whoever has the same prompt computes it again."""
    broken = BrokenForAWhile()
    expected = greedy_of(broken.model)
    core = core_of(broken.model, max_num_batched_tokens=9)
    core.add(make_request("first", LONG, max_tokens=6))
    broken.is_broken = True
    core.step()
    broken.is_broken = False
    if when == "meanwhile":
        core.add(make_request("second", LONG, max_tokens=6))
        tokens, reasons = finish_all(core)
        assert core.statistics().num_cache_hits > 0, "nothing wrong was found"
    else:
        _, reasons = finish_all(core)
        core.add(make_request("second", LONG, max_tokens=6))
        tokens, later = finish_all(core)
        reasons |= later
        assert core.statistics().num_cache_hits == 0
    assert tokens["second"] == expected
    assert reasons == {"first": FinishReason.ERROR, "second": FinishReason.LENGTH}
    # what was computed again is right, and is found
    core.add(make_request("third", LONG, max_tokens=6))
    before = core.statistics().num_cache_hits
    assert finish_all(core)[0]["third"] == expected
    assert core.statistics().num_cache_hits > before


def test_a_choice_that_forked_from_broken_blocks_computes_its_own() -> None:
    broken = BrokenForAWhile()
    expected = greedy_of(broken.model)
    core = core_of(broken.model, max_num_seqs=4)
    request = make_request("a", LONG, max_tokens=6, n=3)
    core.add(request)
    first = core.step()
    assert [list(output.token_ids) for output in first] == [expected[:1]]
    # the prompt's last full block, which all choices share
    block = request.sequences[0].block_table[5]
    backend = broken.model.backend
    for pages in backend._pages:  # type: ignore[attr-defined]
        pages[block] = NAN
    tokens: dict[int, list[int]] = {index: [] for index in range(3)}
    tokens[0] += expected[:1]
    reasons = {}
    while core.has_work():
        for output in core.step():
            tokens[output.index] += output.token_ids
            reasons[output.index] = output.finish_reason
        core.check()
    assert reasons == {0: FinishReason.ERROR, 1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
    assert tokens == {0: expected[:1], 1: expected, 2: expected}


def test_what_always_fails_ends_though_it_found_blocks() -> None:
    model = build("llama")
    model.get_input_embeddings().weight[POISON] = NAN
    core = core_of(paged(model, block_size=4), max_num_batched_tokens=9)
    core.add(make_request("good", LONG, max_tokens=6))
    assert finish_all(core)[1] == {"good": FinishReason.LENGTH}
    core.add(make_request("bad", [*LONG, POISON], max_tokens=6))
    assert finish_all(core)[1] == {"bad": FinishReason.ERROR}
    assert core.statistics().num_cache_hits > 0
    # with the blocks that it found, at most once more
    assert core.statistics().num_computed_tokens <= len(LONG) + 6 + 2 * len(LONG) + 2


# -- what changes logits


@pytest.mark.parametrize("method", ["edit", "push"])
@pytest.mark.parametrize("drafting", [False, True], ids=["plain", "drafts"])
def test_processors_that_raise_fail_their_own_sequence(
    method: str, drafting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"temperature": 0.8, "frequency_penalty": 0.5, "logprobs": 2}
    model = paged(build("llama"), block_size=4, num_blocks=200)
    known, _ = run(core_with(Poisoned(model)), requests(fields))
    expected, _ = steps_of(core_with(Poisoned(model), Oracle(known) if drafting else None), requests(fields))
    right = getattr(Rewriter, method)

    def wrong(self: Rewriter, *args: Any) -> None:
        if self._tokens[: len(BAD_PROMPT)] == BAD_PROMPT and len(self._tokens) >= len(BAD_PROMPT) + 6:
            raise KeyError("injected")
        right(self, *args)

    monkeypatch.setattr(Rewriter, method, wrong)
    executor = Poisoned(model)
    core = core_with(executor, Oracle(known) if drafting else None)
    found, bad = steps_of(core, requests(fields))
    assert found == expected
    assert executor.num_forwards == core.statistics().num_steps
    assert core.statistics().num_failed_steps == 0
    assert tokens_of(bad) == known["bad", 0][:6]
    assert isinstance(bad[-1].error.__cause__, KeyError)


def test_where_no_token_is_allowed_the_blocks_stay_to_be_found() -> None:
    """Not the model is at fault, but what was asked."""
    core = core_of(paged(build("llama"), block_size=4), max_num_batched_tokens=9)
    core.add(make_request("bad", LONG, max_tokens=5, eos=[7], min_tokens=2, allowed_token_ids=(7,)))
    assert finish_all(core)[1] == {"bad": FinishReason.ERROR}
    core.add(make_request("good", LONG, max_tokens=1))
    finish_all(core)
    assert core.statistics().num_cache_hits == 24, "the first three chunks of nine"


def test_a_step_in_which_all_rows_fail_does_not_end_the_engine() -> None:
    broken = BrokenForAWhile()
    expected = greedy_of(broken.model)
    core = core_of(broken.model)
    broken.is_broken = True
    core.add(make_request("a", LONG, max_tokens=6))
    assert finish_all(core)[1] == {"a": FinishReason.ERROR}
    broken.is_broken = False
    core.add(make_request("b", LONG, max_tokens=6))
    assert finish_all(core)[0]["b"] == expected
