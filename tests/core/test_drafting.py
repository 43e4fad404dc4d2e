"""Speculation in the whole core: the same tokens in fewer steps, and nothing lost where nothing can be guessed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence

import pytest

from trio_llm.config import EngineSettings
from trio_llm.core.drafter import Drafter
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.request import Request
from trio_llm.core.request import Sequence as TokenSequence
from trio_llm.core.speculation import MARGIN, Speculation, speculation_for
from trio_llm.core.step import StepPlan
from trio_llm.core.step_costs import StepCosts
from trio_llm.core.torch_executor import TorchExecutor
from trio_llm.errors import ConfigurationError

from .helpers import FakeDrafter, is_idle, make_request, run
from .tiny_models import CPU, PROMPTS, build, paged
from .traffic import VOCAB, NextToken, expected, play_traffic, prompt_of

FLAT = StepCosts(((1, 1.0), (1000, 1.0)))
"""Drafts cost nothing."""
STEEP = StepCosts(((1, 55.0), (3, 140.0), (5, 150.0), (17, 155.0), (33, 212.0)))
"""A small model in float32 on two cores: a few more tokens cost two steps, some more cost no more."""
LINEAR = StepCosts(((1, 1.0), (2, 2.0)))
"""Every token costs the same, as in a batch that keeps all cores busy."""


def noise(context: Sequence[int], output_index: int) -> int:
    return zlib.crc32(repr((list(context), output_index)).encode())


def unguessable(context: list[int], output_index: int) -> int:
    return noise(context, output_index) % VOCAB


def periodic(context: list[int], output_index: int) -> int:
    return context[-7]


def halting(context: list[int], output_index: int) -> int:
    """Copies, with a slip now and then."""
    value = noise(context, output_index)
    return context[-5] if value % 8 and len(context) > 5 else value % VOCAB


def core_with(
    next_token: NextToken, *, costs: StepCosts = FLAT, drafter: Drafter | None = None, num_blocks: int = 400,
    max_model_len: int = 1000, **fields: object,
) -> tuple[EngineCore, FakeExecutor]:  # fmt: skip
    info = ExecutorInfo(num_blocks=num_blocks, block_size=4, vocab_size=VOCAB, max_model_len=max_model_len)
    executor = FakeExecutor(info, next_token)
    settings = EngineSettings(**{"speculative_method": "ngram", "max_num_seqs": 8, "credit_window": 1000, **fields})
    if drafter is not None:
        speculation = Speculation(drafter, max_tokens=settings.num_speculative_tokens, vocab_size=VOCAB, costs=costs)
    else:
        speculation = speculation_for(settings, VOCAB, costs)
    return EngineCore(executor, settings, speculation), executor


@pytest.mark.parametrize("costs", [FLAT, STEEP])
def test_repetitive_text_takes_a_fraction_of_the_steps(costs: StepCosts) -> None:
    core, executor = core_with(periodic, costs=costs)
    request = make_request("r", prompt_of(30), max_tokens=200)
    outputs, _ = run(core, [request])
    statistics = core.statistics()
    assert outputs["r", 0] == expected(request, periodic)
    assert statistics.num_steps < 200 / 6
    assert statistics.num_accepted_tokens > 0.8 * 200
    # after the prompt's, each step gives one token and what was accepted
    assert statistics.num_steps + statistics.num_accepted_tokens == 200
    assert statistics.num_draft_tokens == sum(row.num_drafts for plan in executor.plans for row in plan.rows)
    assert statistics.num_drafts == sum(row.num_drafts > 0 for plan in executor.plans for row in plan.rows)


def cost_of(executor: FakeExecutor, costs: StepCosts) -> float:
    return sum(costs(plan.num_tokens) for plan in executor.plans)


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("costs", [FLAT, STEEP, StepCosts()])
def test_text_that_cannot_be_guessed_costs_nothing(costs: StepCosts, num_requests: int) -> None:
    requests = [make_request(str(seed), prompt_of(40, seed), max_tokens=300) for seed in range(num_requests)]
    core, executor = core_with(unguessable, costs=costs, num_blocks=1000)
    run(core, requests)
    statistics = core.statistics()
    num_tokens = 300 * num_requests
    assert statistics.num_draft_tokens < 0.03 * num_tokens
    plain, plain_executor = core_with(unguessable, costs=costs, num_blocks=1000, speculative_method="off")
    run(plain, [make_request(r.id, r.prompt_token_ids, max_tokens=300) for r in requests])
    assert plain.statistics().num_draft_tokens == 0
    assert cost_of(executor, costs) <= 1.03 * cost_of(plain_executor, costs)


def test_every_guess_wrong_is_noticed() -> None:
    """n-grams repeat all the time, and always go on differently."""

    def teasing(context: list[int], output_index: int) -> int:
        return [1, 2, 3, 4, 5 + output_index // 5 % (VOCAB - 5)][output_index % 5] if output_index % 5 < 4 else (
            5 + output_index // 5 % (VOCAB - 5))  # fmt: skip

    for costs in (FLAT, STEEP, StepCosts()):
        core, executor = core_with(teasing, costs=costs)
        outputs, _ = run(core, [make_request("r", [0], max_tokens=500)])
        assert len(outputs["r", 0]) == 500
        assert cost_of(executor, costs) <= 1.03 * costs(1) * 500


def test_one_that_begins_to_repeat_is_noticed_at_once() -> None:
    def turning(context: list[int], output_index: int) -> int:
        return unguessable(context, output_index) if output_index < 200 else context[-7]

    core, _ = core_with(turning, costs=STEEP)
    outputs, _ = run(core, [make_request("r", prompt_of(30), max_tokens=400)])
    assert len(outputs["r", 0]) == 400
    assert core.statistics().num_steps < 200 + 200 / 4


def test_a_batch_that_is_compute_bound_drafts_nothing() -> None:
    requests = [make_request(str(seed), prompt_of(30, seed), max_tokens=50) for seed in range(8)]
    core, _ = core_with(periodic, costs=LINEAR)
    run(core, requests)
    assert core.statistics().num_draft_tokens == 0
    assert core.statistics().num_steps >= 50


def test_drafts_fall_with_the_size_of_the_batch() -> None:
    """Costs that are flat up to 16 tokens leave one sequence all its drafts, and eight of them one each."""
    costs = StepCosts(((1, 1.0), (16, 1.0), (17, 2.0)))
    for num_requests, most in ((1, 8), (4, 3), (8, 1)):
        core, executor = core_with(periodic, costs=costs, max_num_seqs=16)
        run(core, [make_request(str(seed), prompt_of(30, seed), max_tokens=100) for seed in range(num_requests)])
        decoding = [plan for plan in executor.plans if len(plan.rows) == num_requests and
                    all(row.sample and len(row.token_ids) == row.num_drafts + 1 for row in plan.rows)]  # fmt: skip
        assert max(row.num_drafts for plan in decoding for row in plan.rows) >= most
        assert max(plan.num_tokens for plan in decoding) <= 16


def test_drafts_take_no_budget_from_anyone() -> None:
    """Beside a long prompt there are none, and the prompt goes as fast as without."""
    lengths = {}
    for method in ("off", "ngram"):
        core, executor = core_with(periodic, speculative_method=method, max_num_seqs=2, max_num_batched_tokens=16)
        core.add(make_request("a", prompt_of(14), max_tokens=600))
        for _ in range(10):
            core.step()
        core.add(make_request("b", prompt_of(200, 1), max_tokens=4))
        before = len(executor.plans)
        while not any(output.request_id == "b" for output in core.step()):
            assert all(plan.num_tokens <= 16 for plan in executor.plans)
        lengths[method] = len(executor.plans) - before
    assert lengths["off"] == lengths["ngram"]


def test_nobody_is_preempted_for_a_draft() -> None:
    preemptions = {}
    for method in ("off", "ngram"):
        core, _ = core_with(periodic, speculative_method=method, num_blocks=30)
        requests = [make_request(str(seed), prompt_of(20, seed), max_tokens=20) for seed in range(3)]
        outputs, _ = run(core, requests)
        assert all(outputs[r.id, 0] == expected(r, periodic) for r in requests)
        preemptions[method] = core.statistics().num_preemptions
    assert preemptions["off"] == preemptions["ngram"] == 0


def refuse(sequence: TokenSequence, max_tokens: int) -> Sequence[int]:
    raise RuntimeError("no idea")


ADVERSARIES: dict[str, Callable[[TokenSequence, int], Sequence[int]]] = {
    "random": lambda sequence, k: [
        noise(sequence.token_ids, i) % VOCAB for i in range(noise(sequence.token_ids, 99) % (k + 1))
    ],
    "too long": lambda sequence, k: [sequence.token_ids[-7]] * 5000,
    "empty": lambda sequence, k: [],
    "outside": lambda sequence, k: [VOCAB],
    "negative": lambda sequence, k: [0, -1],
    "raises": refuse,
    "no list": lambda sequence, k: None,  # type: ignore[return-value]
}


@pytest.mark.parametrize("next_token", [unguessable, periodic, halting])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_an_adversary_changes_no_token(name: str, next_token: NextToken) -> None:
    adversary = FakeDrafter(ADVERSARIES[name])
    core, _ = core_with(next_token, drafter=adversary, max_num_batched_tokens=24)
    requests = [make_request(str(seed), prompt_of(9, seed), max_tokens=60, n=2) for seed in range(5)]
    outputs, _ = run(core, requests)
    for request in requests:
        assert outputs[request.id, 0] == outputs[request.id, 1] == expected(request, next_token)
    assert is_idle(core)
    assert not core.speculation._records
    assert sorted(set(adversary.released)) == list(range(10))
    if name in {"empty", "outside", "negative", "raises", "no list"}:
        assert core.statistics().num_draft_tokens == 0


def test_a_drafter_that_fails_is_off_for_that_sequence_alone() -> None:
    def guess(sequence: TokenSequence, max_tokens: int) -> Sequence[int]:
        calls.append(sequence.request.id)
        if sequence.request.id == "bad" and sequence.num_output_tokens > 10:
            raise RuntimeError
        return [sequence.token_ids[-7 + i] for i in range(min(7, max_tokens))]

    calls: list[str] = []
    core, executor = core_with(periodic, drafter=FakeDrafter(guess))
    requests = [make_request(name, prompt_of(20), max_tokens=100) for name in ("bad", "good")]
    outputs, _ = run(core, requests)
    assert outputs["bad", 0] == outputs["good", 0] == expected(requests[0], periodic)
    assert calls.count("bad") < 12 and calls[-1] == "good"
    lengths = [row.num_drafts for plan in executor.plans for row in plan.rows if row.sequence_id == 1]
    assert max(lengths) == 7


def test_a_drafter_that_fails_to_observe_is_off() -> None:
    class Blind(FakeDrafter):
        def observe(self, sequence: TokenSequence, block_copies: Sequence[tuple[int, int]] = ()) -> None:
            raise RuntimeError

    core, _ = core_with(periodic, drafter=Blind(lambda sequence, k: [sequence.token_ids[-7]]))
    request = make_request("r", prompt_of(20), max_tokens=50)
    outputs, _ = run(core, [request])
    assert outputs["r", 0] == expected(request, periodic)
    assert core.statistics().num_draft_tokens == 0


@pytest.mark.parametrize("seed", range(40))
def test_any_traffic_gives_the_tokens_that_no_engine_would(seed: int) -> None:
    """n, preemption, the cache on and off, aborts, slow readers, small budgets: all at random."""
    numbers = random.Random(seed)
    next_token = numbers.choice([unguessable, periodic, halting])
    window = numbers.choice([1, 3, 9, 1000])
    core, executor = core_with(
        next_token,
        costs=numbers.choice([FLAT, STEEP, StepCosts()]),
        num_blocks=numbers.choice([16, 20, 60]),
        max_model_len=numbers.choice([50, 1000]),
        max_num_seqs=(rows := numbers.randrange(1, 9)),
        max_num_batched_tokens=rows + numbers.choice([1, 3, 20, 200]),
        enable_prefix_caching=numbers.random() < 0.5,
        credit_window=window,
        num_speculative_tokens=numbers.randrange(1, 10),
    )
    play_traffic(core, numbers, window, next_token)
    assert is_idle(core)
    assert not core.speculation._records and not core.speculation.drafter._histories
    drafted = [row for plan in executor.plans for row in plan.rows if row.num_drafts]
    statistics = core.statistics()
    assert statistics.num_drafts == len(drafted)
    assert statistics.num_accepted_tokens <= statistics.num_draft_tokens == sum(row.num_drafts for row in drafted)


def test_a_failing_step_that_carried_drafts_is_run_again() -> None:
    core, executor = core_with(periodic)
    failures = iter([True, False] * 500)

    def fail(plan: StepPlan) -> None:
        if any(row.num_drafts for row in plan.rows) and next(failures):
            raise RuntimeError("injected")

    executor.on_launch = fail
    requests = [make_request(str(seed), prompt_of(20, seed), max_tokens=40) for seed in range(2)]
    outputs, _ = run(core, requests)
    assert any(len(tokens) == 40 for tokens in outputs.values())
    assert all(expected(r, periodic)[: len(outputs[r.id, 0])] == outputs[r.id, 0] for r in requests)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}])
def test_tiny_models_give_the_same_tokens(architecture: str, fields: dict[str, float]) -> None:
    model = paged(build(architecture), block_size=4, num_blocks=200)

    def core_of(costs: StepCosts | None, num_blocks: int) -> EngineCore:
        executor = TorchExecutor(model, num_blocks=num_blocks, max_model_len=256)
        settings = EngineSettings(max_num_seqs=8, speculative_method="ngram" if costs else "off", prompt_lookup_min=1)
        return EngineCore(executor, settings, speculation_for(settings, executor.info.vocab_size, costs))

    def requests() -> list[Request]:
        return [make_request(str(i), prompt, max_tokens=50, n=2, seed=i, **fields) for i, prompt in enumerate(PROMPTS)]

    plain, _ = run(core_of(None, 200), requests())
    for costs, num_blocks in ((FLAT, 200), (STEEP, 200), (FLAT, 40)):
        core = core_of(costs, num_blocks)
        drafted, _ = run(core, requests())
        assert drafted == plain
        if costs is FLAT and not fields:
            assert core.statistics().num_accepted_tokens > 0


def test_costs_between_and_beyond_the_points() -> None:
    costs = StepCosts(((1, 10.0), (3, 30.0), (7, 50.0)))
    assert [costs(size) for size in (1, 2, 3, 5, 7, 9)] == [10, 20, 30, 40, 50, 60]


def test_costs_are_measured_on_the_executor() -> None:
    executor = FakeExecutor(ExecutorInfo(num_blocks=8, block_size=4, vocab_size=VOCAB, max_model_len=20))
    now = 0.0

    def tick(plan: StepPlan) -> None:
        nonlocal now
        now += {1: 5.0, 2: 4.0}.get(plan.num_tokens, plan.num_tokens)

    executor.on_launch = tick
    costs = StepCosts.measure(executor, clock=lambda: now)
    assert costs.points == ((1, 3.0), (2, 3.0), (3, 3.0), (5, 5.0), (9, 9.0), (17, 17.0))
    assert not executor.sequences


def test_costs_of_an_executor_too_small_to_measure() -> None:
    executor = FakeExecutor(ExecutorInfo(num_blocks=1, block_size=1, vocab_size=VOCAB, max_model_len=20))
    assert StepCosts.measure(executor) == StepCosts()


def test_a_real_model_is_measured_before_its_first_request() -> None:
    model = paged(build("llama"), block_size=4, num_blocks=20)
    executor = TorchExecutor(model, num_blocks=20, max_model_len=256)
    costs = StepCosts.measure(executor)
    assert [size for size, _ in costs.points] == [1, 2, 3, 5, 9, 17, 33]
    assert all(cost > 0 for _, cost in costs.points)
    assert model.device == CPU


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_max"),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineSettings(**fields)
    assert caught.value.field == field


def test_off_is_the_default() -> None:
    assert speculation_for(EngineSettings(), VOCAB) is None
    assert 0 < MARGIN < 0.1
