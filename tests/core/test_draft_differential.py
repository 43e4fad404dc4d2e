"""A draft model on real models: the tokens of the target alone, whatever else happens, and guesses that its own noise makes right."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from trio_llm.config import EngineSettings
from trio_llm.core.attention import LayerSpec, bytes_per_block
from trio_llm.core.build import build_core
from trio_llm.core.draft_model import DraftModel
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.model import PagedModel
from trio_llm.core.request import Request
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.speculation import Speculation
from trio_llm.core.step import StepPlan
from trio_llm.core.step_costs import StepCosts
from trio_llm.core.torch_executor import TorchExecutor
from trio_llm.errors import ConfigurationError
from trio_llm.models.loader import LoadedModel

from .helpers import is_idle, make_request, run
from .tiny_models import PROMPTS, build, paged

VOCAB = 160
TARGET = StepCosts(((1, 10.0), (1000, 10.0)))
CHEAP = StepCosts(((1, 0.5), (1001, 10.5)))

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 1.0},
    "limited": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2,
                  "logit_bias": {7: 3.0}, "min_tokens": 5, "logprobs": 2},
}  # fmt: skip


class Counting(TorchExecutor):
    """Keeps the plans that it ran."""

    def __init__(self, model: PagedModel, num_blocks: int) -> None:
        super().__init__(model, num_blocks=num_blocks, max_model_len=256, vocab_size=VOCAB)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        return super().launch(plan)


def core_of(
    target: PagedModel, draft: PagedModel | None = None, *, num_blocks: int = 200, prior: float | None = 0.9, **fields: Any
) -> EngineCore:  # fmt: skip
    settings = EngineSettings(**{"max_num_seqs": 16, **fields})
    speculation = None
    if draft is not None:
        drafter = DraftModel(
            Counting(draft, num_blocks),
            vocab_size=draft.vocab_size,
            max_tokens=settings.max_num_batched_tokens,
            costs=CHEAP,
        )
        if prior is not None:
            drafter.prior = (prior,)
        speculation = Speculation(drafter, max_tokens=6, vocab_size=VOCAB, costs=TARGET)
    return EngineCore(Counting(target, num_blocks), settings, speculation)


def requests(sampling: str, *, n: int = 2) -> list[Request]:
    return [
        make_request(str(place), prompt, max_tokens=40, n=n, seed=place, **SAMPLING[sampling])
        for place, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_model_drafts_for_itself(architecture: str, sampling: str) -> None:
    """Every guess is right, and the tokens are those of no drafts: with the cache and without, in chunks, preempted."""
    target, draft = (paged(build(architecture), block_size=4, num_blocks=200) for _ in range(2))
    plain_core = core_of(target)
    plain, _ = run(plain_core, requests(sampling))
    for fields in (
        {},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"num_blocks": 28, "max_num_batched_tokens": 17},
    ):
        core = core_of(target, draft, **fields)
        drafted, _ = run(core, requests(sampling))
        assert drafted == plain
        assert is_idle(core)
        statistics = core.statistics()
        # but for ties in rounding: the target computes several tokens together
        assert statistics.num_accepted_tokens >= 0.99 * statistics.num_draft_tokens > 0
        if not fields:
            assert statistics.num_steps < 0.5 * plain_core.statistics().num_steps
        if "num_blocks" in fields:
            assert statistics.num_preemptions > 0


@pytest.mark.parametrize("sampling", SAMPLING)
def test_another_model_changes_no_token(sampling: str) -> None:
    """It is drafted with all the same at first, since it is believed in here."""
    target = paged(build("llama"), block_size=4, num_blocks=200)
    draft = paged(build("qwen3", seed=5, num_hidden_layers=1), block_size=4, num_blocks=200)
    plain, _ = run(core_of(target), requests(sampling))
    for fields in ({}, {"num_blocks": 28, "max_num_batched_tokens": 17}):
        core = core_of(target, draft, **fields)
        drafted, _ = run(core, requests(sampling))
        assert drafted == plain
        statistics = core.statistics()
        assert statistics.num_draft_tokens > 0
        assert statistics.num_accepted_tokens < 0.3 * statistics.num_draft_tokens


@pytest.mark.parametrize("vocab_size", [100, 208])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_vocabulary_of_another_size(sampling: str, vocab_size: int) -> None:
    """Padded more or less; what a request says of tokens that only the target has does no harm."""
    target = paged(build("llama"), block_size=4, num_blocks=200)
    draft = paged(build("llama", seed=1, vocab_size=vocab_size), block_size=4, num_blocks=200)
    fields = {**SAMPLING[sampling], "logit_bias": {155: 1.0, 99: 1.0}, "stop_token_ids": [159]}

    def these() -> list[Request]:
        return [make_request(str(i), [i, 5, 6], max_tokens=30, seed=i, **fields) for i in range(6)]

    plain, _ = run(core_of(target), these())
    core = core_of(target, draft)
    off: set[int] = set()

    def note(core: EngineCore) -> None:
        off.update(key for key, record in core.speculation._records.items() if record.is_off)

    drafted, _ = run(core, these(), before_step=note)
    assert drafted == plain
    assert core.statistics().num_draft_tokens > 0
    # those alone that said what the draft model has no embedding for
    unknown = {int(request) for (request, _), tokens in plain.items() if max(tokens[:-1]) >= vocab_size}
    assert off <= unknown


def test_a_draft_model_of_no_use_does_not_run_but_for_probes() -> None:
    target = paged(build("llama"), block_size=4, num_blocks=200)
    draft = paged(build("qwen3", seed=5), block_size=4, num_blocks=200)
    core = core_of(target, draft, prior=None)
    these = [make_request(str(seed), PROMPTS[seed], max_tokens=200) for seed in range(4)]
    run(core, these)
    plans = core.speculation.drafter.executor.plans
    costs = sum(CHEAP(plan.num_tokens) for plan in plans)
    num_steps = core.statistics().num_steps
    assert plans
    assert costs <= 0.015 * num_steps * TARGET(1) + 4 * TARGET(1)
    assert core.statistics().num_draft_tokens < 20


def test_the_same_noise_makes_guesses_right_that_the_likeliest_token_would_not_be() -> None:
    """The draft is the target with a little noise on its weights: sampled hot, it mostly draws the same tokens."""
    model, near = build("llama"), build("llama")
    for parameter in near.parameters():
        parameter.add_(0.02 * parameter.abs().mean())
    target, draft = (paged(each, block_size=4, num_blocks=200) for each in (model, near))
    rates = {}
    for kind, fields in {"coupled": {}, "likeliest": {"temperature": 0.0}}.items():
        core = core_of(target, draft)
        admit = core.speculation.drafter.admit

        def admit_with(sequence_id: int, task: Any, admit: Any = admit, fields: dict[str, Any] = fields) -> None:
            admit(sequence_id, attrs.evolve(task, params=attrs.evolve(task.params, **fields)))

        core.speculation.drafter.admit = admit_with
        run(core, [make_request(str(i), [i, 9, 4], max_tokens=60, seed=i, temperature=1.5) for i in range(8)])
        rates[kind] = core.statistics().num_accepted_tokens / core.statistics().num_draft_tokens
    assert rates["coupled"] > 0.7
    assert rates["likeliest"] < 0.5


def test_ending_a_request_at_any_step_leaves_nothing() -> None:
    target, draft = (paged(build("llama"), block_size=4, num_blocks=200) for _ in range(2))
    plain, _ = run(core_of(target), requests("random"))
    for last in range(14):
        core = core_of(target, draft)
        for request in requests("random"):
            core.add(request)
        found: dict[tuple[str, int], list[int]] = {}
        for _ in range(last):
            for output in core.step():
                found.setdefault((output.request_id, output.index), []).extend(output.token_ids)
                core.acknowledge(output.request_id, output.index, len(output.token_ids))
            core.check()
        for request in requests("random"):
            core.finish(request.id)
        core.check()
        assert is_idle(core)
        assert not core.speculation.drafter._states and not core.speculation.drafter.executor._sequences
        assert all(plain[key][: len(tokens)] == tokens for key, tokens in found.items())


def loaded(model: Any, max_model_len: int = 256) -> LoadedModel:
    return LoadedModel(
        name="tiny", model=model, tokenizer=None, defaults=SamplingParams(), eos_token_ids=frozenset(),
        max_model_len=max_model_len, load_seconds=0.0,
    )  # fmt: skip


def test_build_core_gives_both_models_the_same_blocks() -> None:
    fields = {"speculative_method": "draft_model", "speculative_model": "tiny", "max_num_seqs": 4}
    one = bytes_per_block([LayerSpec(2, 8, 8, None)], 16, build("llama").dtype)
    settings = EngineSettings(kv_cache_memory=100 * one, **fields)
    core = build_core(loaded(build("llama")), settings, loaded(build("qwen3", num_hidden_layers=1), 128))
    # two layers of the target and one of the draft model
    assert core.executor.info.num_blocks == 33
    drafter = core.speculation.drafter
    assert isinstance(drafter, DraftModel)
    assert drafter.executor.info.num_blocks == 33
    assert drafter.executor.info.block_size == core.executor.info.block_size == 16
    assert drafter.executor.info.max_model_len == 128
    assert len(drafter.costs.points) == len(core.speculation.costs.points) == 7
    plain = build_core(loaded(build("llama")), EngineSettings(max_num_seqs=4))
    these = [make_request("r", PROMPTS[0], max_tokens=200)]
    assert run(core, these)[0] == run(plain, [make_request("r", PROMPTS[0], max_tokens=200)])[0]
    core.close()


def test_build_core_without_the_draft_model_that_the_settings_ask_for() -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_core(loaded(build("llama")), EngineSettings(speculative_method="draft_model", speculative_model="tiny"))
    assert caught.value.field == "speculative_method"
