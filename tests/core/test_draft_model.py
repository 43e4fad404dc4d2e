"""A draft model: the same tokens in fewer steps, its pages true to its word, and next to no work where it is no use."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import attrs
import pytest

from trio_llm.config import EngineSettings
from trio_llm.core.draft_model import DraftModel
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.speculation import Speculation, speculation_for
from trio_llm.core.step import StepPlan, StepResult
from trio_llm.core.step_costs import StepCosts
from trio_llm.errors import ConfigurationError

from .helpers import is_idle, make_request, run
from .traffic import VOCAB, NextToken, expected, play_traffic, prompt_of

SIZE = 4

TARGET = StepCosts(((1, 10.0), (1000, 10.0)))
"""Drafts cost nothing to verify ..."""
CHEAP = StepCosts(((1, 0.5), (1001, 10.5)))
"""... and a twentieth of a step to make."""


def noise(context: Sequence[int], output_index: int) -> int:
    return zlib.crc32(repr((list(context), output_index)).encode())


def target_token(context: list[int], output_index: int) -> int:
    return noise(context, output_index) % VOCAB


def wrong_token(context: list[int], output_index: int) -> int:
    return (target_token(context, output_index) + 1) % VOCAB


def mixed_token(context: list[int], output_index: int) -> int:
    """Right four times out of five."""
    return (target_token(context, output_index) + (noise(context, output_index) // VOCAB % 5 == 0)) % VOCAB


class DraftedCore(EngineCore):
    """A core whose draft model is checked after each step."""

    def __init__(
        self, draft_token: NextToken, *, num_blocks: int = 400, max_model_len: int = 1000, prior: float | None = 0.9,
        draft_costs: StepCosts = CHEAP, draft_vocab: int = VOCAB, draft_model_len: int | None = None,
        draft_executor: type[FakeExecutor] = FakeExecutor, **fields: object,
    ) -> None:  # fmt: skip
        info = ExecutorInfo(num_blocks=num_blocks, block_size=SIZE, vocab_size=VOCAB, max_model_len=max_model_len)
        settings = EngineSettings(
            **{
                "speculative_method": "draft_model",
                "speculative_model": "fake",
                "max_num_seqs": 8,
                "credit_window": 1000,
                **fields,
            }
        )
        self.target = FakeExecutor(info, target_token)
        info = attrs.evolve(info, max_model_len=draft_model_len or max_model_len)
        self.draft = draft_executor(info, draft_token)
        self.drafter = DraftModel(
            self.draft, vocab_size=draft_vocab, max_tokens=settings.max_num_batched_tokens, costs=draft_costs
        )
        if prior is not None:
            self.drafter.prior = (prior,)
        super().__init__(self.target, settings, speculation_for(settings, VOCAB, TARGET, self.drafter))

    def check(self) -> None:
        super().check()
        for block, content in self.drafter._contents.items():
            held = tuple(self.draft._slots[block * SIZE + offset] for offset in range(len(content.token_ids)))
            assert held == content.token_ids, f"block {block} does not hold what the draft model believes"
        assert set(self.drafter._tasks) == set(self.speculation._records) == self.queues.live_ids()
        assert set(self.drafter._states) <= self.queues.live_ids() and set(self.draft.sequences) <= set(
            self.drafter._states
        )

    @property
    def num_drafted(self) -> int:
        """Tokens that went through the draft model."""
        return sum(plan.num_tokens for plan in self.draft.plans)

    def cost(self, draft_costs: StepCosts = CHEAP) -> float:
        return sum(TARGET(plan.num_tokens) for plan in self.target.plans) + sum(
            draft_costs(plan.num_tokens) for plan in self.draft.plans
        )


def test_a_draft_model_that_is_the_target_is_always_right() -> None:
    core = DraftedCore(target_token)
    requests = [make_request(str(seed), prompt_of(30, seed), max_tokens=100) for seed in range(4)]
    outputs, _ = run(core, requests)
    statistics = core.statistics()
    assert all(outputs[request.id, 0] == expected(request, target_token) for request in requests)
    assert statistics.num_accepted_tokens == statistics.num_draft_tokens > 300
    assert statistics.num_steps < 100 / 5
    # one forward a drafted position, for all sequences together, and none beside
    assert len(core.draft.plans) <= statistics.num_steps * core.speculation.max_tokens
    assert statistics.num_draft_tokens > 3 * len(core.draft.plans)
    # each token once: of the last guess the keys and values are not made
    assert core.num_drafted <= 4 * (30 + 100 + statistics.num_steps)


def test_one_that_begins_cold_shows_by_probes_what_it_can_do() -> None:
    core = DraftedCore(target_token, prior=None)
    request = make_request("r", prompt_of(30), max_tokens=300)
    outputs, _ = run(core, [request])
    assert outputs["r", 0] == expected(request, target_token)
    assert core.statistics().num_steps < 300 / 5
    assert core.statistics().num_accepted_tokens == core.statistics().num_draft_tokens


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("draft_costs", [CHEAP, StepCosts(((1, 3.0), (1001, 13.0))), StepCosts(((1, 30.0), (2, 31.0)))])
def test_one_that_is_always_wrong_costs_next_to_nothing(draft_costs: StepCosts, num_requests: int) -> None:
    core = DraftedCore(wrong_token, prior=None, draft_costs=draft_costs, num_blocks=1000)
    requests = [make_request(str(seed), prompt_of(40, seed), max_tokens=300) for seed in range(num_requests)]
    outputs, _ = run(core, requests)
    assert all(outputs[request.id, 0] == expected(request, target_token) for request in requests)
    statistics = core.statistics()
    assert statistics.num_accepted_tokens == 0
    plain = sum(TARGET(plan.num_tokens) for plan in core.target.plans)
    assert core.cost(draft_costs) <= 1.03 * plain
    # nothing is gained, so as many steps as without; probes go on to the end, each one small
    assert statistics.num_steps == 300
    assert all(len(plan.rows) == 1 for plan in core.draft.plans)


def test_one_that_becomes_right_is_noticed() -> None:
    def turning(context: list[int], output_index: int) -> int:
        return wrong_token(context, output_index) if output_index < 300 else target_token(context, output_index)

    core = DraftedCore(turning, prior=None)
    request = make_request("r", prompt_of(30), max_tokens=900)
    outputs, _ = run(core, [request])
    assert outputs["r", 0] == expected(request, target_token)
    assert core.statistics().num_steps < 300 + 600 / 4


def test_one_that_becomes_wrong_is_left_alone() -> None:
    def turning(context: list[int], output_index: int) -> int:
        return target_token(context, output_index) if output_index < 100 else wrong_token(context, output_index)

    core = DraftedCore(turning, prior=None)
    request = make_request("r", prompt_of(30), max_tokens=600)
    outputs, _ = run(core, [request])
    assert outputs["r", 0] == expected(request, target_token)
    assert core.statistics().num_draft_tokens - core.statistics().num_accepted_tokens < 60


def test_a_sequence_that_cannot_be_guessed_among_others_that_can() -> None:
    def partly(context: list[int], output_index: int) -> int:
        return (wrong_token if context[0] == 7 else target_token)(context, output_index)

    core = DraftedCore(partly)
    requests = [make_request(str(i), [i, *prompt_of(10, i)], max_tokens=200) for i in (3, 5, 7)]
    outputs, _ = run(core, requests)
    assert all(outputs[request.id, 0] == expected(request, target_token) for request in requests)
    drafted = {sequence: sum(row.num_drafts for plan in core.target.plans for row in plan.rows
                             if row.sequence_id == sequence) for sequence in range(3)}  # fmt: skip
    assert drafted[0] > 100 and drafted[1] > 100 and drafted[2] < 80


def test_a_prompt_in_the_prefix_cache_is_not_computed_again() -> None:
    core = DraftedCore(target_token)
    prompt = prompt_of(200)
    run(core, [make_request("a", prompt, max_tokens=20)])
    before = core.num_drafted
    outputs, _ = run(core, [make_request("b", [*prompt, 1], max_tokens=20)])
    assert core.statistics().num_cache_hits >= 196
    assert core.num_drafted - before < 60
    assert outputs["b", 0] == expected(make_request("b", [*prompt, 1], max_tokens=20), target_token)


def test_a_block_that_was_found_but_never_drafted_on_is_caught_up_on() -> None:
    core = DraftedCore(target_token)
    core.speculation._chances = [0.0]
    core.speculation._savings = -1e9
    run(core, [make_request("a", prompt_of(100), max_tokens=5)])
    assert not core.draft.plans
    core.speculation._chances = [0.9]
    run(core, [make_request("b", prompt_of(100), max_tokens=50)])
    statistics = core.statistics()
    assert statistics.num_cache_hits >= 96
    assert statistics.num_accepted_tokens == statistics.num_draft_tokens > 30


def test_choices_share_what_the_draft_model_computed_of_the_prompt() -> None:
    core = DraftedCore(target_token, max_num_seqs=16)
    request = make_request("r", prompt_of(103), max_tokens=40, n=8)
    outputs, _ = run(core, [request])
    assert all(outputs["r", index] == expected(request, target_token) for index in range(8))
    statistics = core.statistics()
    assert statistics.num_accepted_tokens == statistics.num_draft_tokens > 200
    assert core.num_drafted < 103 + 8 * 50
    # the block in which the prompt ends is copied in both models' pages
    assert sum(len(row.block_copies) for plan in core.draft.plans for row in plan.rows) == 7


def test_a_long_prompt_is_caught_up_on_in_pieces_and_holds_nobody_up() -> None:
    core = DraftedCore(target_token, num_blocks=600, max_num_batched_tokens=64)
    requests = [
        make_request("short", prompt_of(10), max_tokens=300),
        make_request("long", prompt_of(900), max_tokens=60),
    ]
    outputs, _ = run(core, requests)
    assert all(outputs[request.id, 0] == expected(request, target_token) for request in requests)
    assert all(plan.num_tokens <= 64 for plan in core.draft.plans)
    drafted = [{row.sequence_id for row in plan.rows if row.num_drafts} for plan in core.target.plans]
    assert any(1 in ids for ids in drafted)
    # while the long one decodes and is caught up on, the short one is drafted for all the time
    lags = [place for place, plan in enumerate(core.target.plans)
            if [row.sequence_id for row in plan.rows if row.sample] == [0, 1] and 1 not in drafted[place]]  # fmt: skip
    assert len(lags) > 5
    assert sum(0 in drafted[place] for place in lags) >= len(lags) - 1


@pytest.mark.parametrize("draft_token", [target_token, mixed_token, wrong_token])
@pytest.mark.parametrize("seed", range(20))
def test_any_traffic_gives_the_tokens_that_no_engine_would(seed: int, draft_token: NextToken) -> None:
    """n, preemption, the cache on and off, aborts, slow readers, small budgets, failed steps: all at random."""
    numbers = random.Random(seed)
    window = numbers.choice([2, 3, 9, 1000])
    core = DraftedCore(
        draft_token,
        num_blocks=numbers.choice([16, 20, 60]),
        max_model_len=numbers.choice([50, 1000]),
        max_num_seqs=(rows := numbers.randrange(1, 9)),
        max_num_batched_tokens=rows + numbers.choice([1, 3, 20, 200]),
        enable_prefix_caching=numbers.random() < 0.5,
        credit_window=window,
        num_speculative_tokens=numbers.randrange(1, 10),
    )
    faults = random.Random(seed)
    is_faulty = numbers.random() < 0.3

    def fail(plan: StepPlan) -> None:
        if is_faulty and plan.num_tokens > 1 and faults.random() < 0.05:
            raise MemoryError

    core.target.on_launch = fail
    play_traffic(core, numbers, window, target_token)
    assert is_idle(core)
    assert not core.draft.sequences
    statistics = core.statistics()
    # were any block's content not what it is believed to be, a guess would be wrong
    if draft_token is target_token:
        assert statistics.num_accepted_tokens == statistics.num_draft_tokens
    if draft_token is wrong_token:
        assert statistics.num_accepted_tokens == 0
    core.close()


def test_a_failed_forward_of_the_draft_model_fails_no_request() -> None:
    for share in (0.1, 0.5, 1.0):
        core = DraftedCore(target_token)
        numbers = random.Random(1)

        def fail(plan: StepPlan, share: float = share, numbers: random.Random = numbers) -> None:
            if numbers.random() < share:
                raise RuntimeError("injected")

        core.draft.on_launch = fail
        requests = [make_request(str(seed), prompt_of(20, seed), max_tokens=60, n=2) for seed in range(4)]
        outputs, reasons = run(core, requests)
        assert all(
            outputs[request.id, index] == expected(request, target_token) for request in requests for index in range(2)
        )
        assert set(reasons.values()) == {"length"}
        assert core.statistics().num_accepted_tokens == core.statistics().num_draft_tokens
        assert is_idle(core)


def test_memory_that_runs_out_in_a_large_forward_pauses_drafting_and_turns_it_off_for_no_one() -> None:
    core = DraftedCore(target_token)

    def fail(plan: StepPlan) -> None:
        if len(plan.rows) > 2:
            raise MemoryError

    core.draft.on_launch = fail
    requests = [make_request(str(seed), prompt_of(20, seed), max_tokens=100) for seed in range(4)]
    outputs, _ = run(core, requests)
    assert all(outputs[request.id, 0] == expected(request, target_token) for request in requests)
    statistics = core.statistics()
    assert statistics.num_accepted_tokens == statistics.num_draft_tokens > 20
    failed = [place for place, plan in enumerate(core.draft.plans) if len(plan.rows) > 2]
    assert not failed  # a plan that fails is not kept, and what is kept was small enough
    assert statistics.num_steps < 100


def test_a_row_that_fails_by_itself_ends_drafting_for_its_sequence_alone() -> None:
    class Failing(FakeExecutor):
        def collect(self, handle: StepPlan) -> StepResult:
            result = super().collect(handle)
            places = [place for place, row in enumerate(handle.rows) if row.sequence_id == 0 and row.sample]
            tokens = tuple(() if place in places else sampled for place, sampled in enumerate(result.token_ids))
            return StepResult(tokens, failures={place: FloatingPointError() for place in places})

    core = DraftedCore(target_token, draft_executor=Failing)
    requests = [make_request(str(seed), prompt_of(20, seed), max_tokens=60) for seed in range(2)]
    outputs, _ = run(core, requests)
    assert all(outputs[request.id, 0] == expected(request, target_token) for request in requests)
    drafted = [row.sequence_id for plan in core.target.plans for row in plan.rows if row.num_drafts]
    assert set(drafted) == {1}
    # asked for together once, then alone, then never again
    assert sum(row.sequence_id == 0 for plan in core.draft.plans for row in plan.rows) == 2


def test_a_token_beyond_the_draft_models_vocabulary_ends_drafting_for_that_sequence() -> None:
    core = DraftedCore(target_token, draft_vocab=50)
    requests = [make_request(str(seed), prompt_of(20, seed), max_tokens=60) for seed in range(2)]
    outputs, _ = run(core, requests)
    assert all(outputs[request.id, 0] == expected(request, target_token) for request in requests)
    assert all(token < 50 for plan in core.draft.plans for row in plan.rows for token in row.token_ids)


def test_beyond_the_draft_models_context_nothing_is_guessed() -> None:
    core = DraftedCore(target_token, draft_model_len=60)
    request = make_request("r", prompt_of(20), max_tokens=100)
    outputs, _ = run(core, [request])
    assert outputs["r", 0] == expected(request, target_token)
    assert max(row.start + len(row.token_ids) for plan in core.draft.plans for row in plan.rows) == 60
    assert core.statistics().num_accepted_tokens == core.statistics().num_draft_tokens > 30
    core = DraftedCore(target_token, draft_model_len=19)
    run(core, [make_request("r", prompt_of(20), max_tokens=10)])
    assert not core.draft.plans


def test_nothing_is_guessed_beyond_an_end() -> None:
    core = DraftedCore(target_token)
    request = make_request("r", prompt_of(20), max_tokens=500, eos=[3])
    outputs, _ = run(core, [request])
    assert outputs["r", 0] == expected(request, target_token) and outputs["r", 0][-1] == 3
    last = [row for plan in core.target.plans for row in plan.rows][-1]
    assert last.token_ids[-1] == 3 or not last.num_drafts


def test_nobody_is_preempted_for_a_draft() -> None:
    for prior in (0.0, 0.9):
        core = DraftedCore(target_token, num_blocks=30, prior=prior)
        requests = [make_request(str(seed), prompt_of(20, seed), max_tokens=20) for seed in range(3)]
        outputs, _ = run(core, requests)
        assert all(outputs[request.id, 0] == expected(request, target_token) for request in requests)
        assert core.statistics().num_preemptions == 0


def test_a_draft_model_needs_to_be_named_and_to_be_there() -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineSettings(speculative_method="draft_model")
    assert caught.value.field == "speculative_model"
    settings = EngineSettings(speculative_method="draft_model", speculative_model="fake")
    with pytest.raises(ConfigurationError) as caught:
        EngineCore(FakeExecutor(), settings)
    assert caught.value.field == "speculative_method"
    assert isinstance(DraftedCore(target_token).speculation, Speculation)
