"""Drafts, right, wrong or mixed, change how many steps it takes and never a token; and what a seed promises."""

from __future__ import annotations

import random

import pytest

from trio_llm.core.engine_core import EngineCore
from trio_llm.core.request import Request, Status
from trio_llm.core.step import Row
from trio_llm.core.torch_executor import agreed

from .helpers import is_idle, make_request, run
from .tiny_models import PROMPTS, build, core_of, paged

SAMPLING = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0},
    "limited": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}


def requests(sampling: str, *, n: int = 1) -> list[Request]:
    return [
        make_request(str(index), prompt, max_tokens=40, n=n, seed=100 + index, **SAMPLING[sampling])
        for index, prompt in enumerate(PROMPTS)
    ]


class Drafter:
    """Guesses before each step, by a seeded mix of what is right and what is not."""

    def __init__(self, these: list[Request], right: dict[tuple[str, int], list[int]], share: float) -> None:
        self.requests = these
        self.right = right
        self.share = share
        self.random = random.Random(5)

    def __call__(self, core: EngineCore) -> None:
        for request in self.requests:
            for sequence in request.sequences:
                if sequence.status is Status.RUNNING:
                    rest = self.right[request.id, sequence.index][sequence.num_output_tokens :]
                    sequence.draft_token_ids = [
                        token if self.random.random() < self.share else self.random.randrange(160)
                        for token in rest[: self.random.randrange(6)]
                    ] + [self.random.randrange(160)] * self.random.randrange(2)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_tokens_with_drafts_are_the_tokens_without(architecture: str, sampling: str) -> None:
    model = paged(build(architecture), block_size=4, num_blocks=160)
    plain_core = core_of(model, num_blocks=160)
    plain, _ = run(plain_core, requests(sampling))
    for share in (0.0, 0.7, 1.0):
        for limits in ({"num_blocks": 160}, {"num_blocks": 160, "max_num_seqs": 3, "max_num_batched_tokens": 7},
                       {"num_blocks": 24, "max_num_batched_tokens": 17}):  # fmt: skip
            these = requests(sampling)
            core = core_of(model, **limits)
            drafted, _ = run(core, these, before_step=Drafter(these, plain, share))
            assert drafted == plain
            assert is_idle(core)
            if share == 1.0 and limits == {"num_blocks": 160}:
                assert core.statistics().num_steps < 0.6 * plain_core.statistics().num_steps
            if limits["num_blocks"] == 24:
                assert core.statistics().num_preemptions > 0


def test_drafted_positions_use_their_own_choices_noise() -> None:
    model = paged(build("qwen3"), block_size=4, num_blocks=300)
    plain, _ = run(core_of(model, num_blocks=300, max_num_seqs=16), requests("random", n=3))
    assert len({tuple(plain["0", index]) for index in range(3)}) == 3
    these = requests("random", n=3)
    drafted, _ = run(
        core_of(model, num_blocks=300, max_num_seqs=16), these, before_step=Drafter(these, plain, share=0.8)
    )
    assert drafted == plain


@pytest.mark.parametrize("sampling", ["random", "limited"])
def test_a_seed_gives_the_same_tokens_alone_among_neighbours_chunked_and_preempted(sampling: str) -> None:
    model = paged(build("llama"), block_size=4, num_blocks=400)
    alone = {}
    for request in requests(sampling, n=2):
        outputs, _ = run(core_of(model, num_blocks=400), [request])
        alone |= outputs
    neighbours = [make_request(f"n{index}", [index, 9], max_tokens=20 + index, seed=index, temperature=1.5)
                  for index in range(15)]  # fmt: skip
    for limits in ({"num_blocks": 400, "max_num_seqs": 32}, {"num_blocks": 60, "max_num_batched_tokens": 9},
                   {"num_blocks": 26, "max_num_batched_tokens": 20}):  # fmt: skip
        core = core_of(model, **limits)
        outputs, _ = run(core, [*neighbours[:7], *requests(sampling, n=2), *neighbours[7:]])
        assert {key: outputs[key] for key in alone} == alone
        assert (core.statistics().num_preemptions > 0) == (limits["num_blocks"] < 400)
        neighbours = [make_request(f"m{index}", [index, 9], max_tokens=9, seed=index) for index in range(15)]


def test_another_seed_and_another_choice_give_other_tokens() -> None:
    model = paged(build("llama"), num_blocks=200)
    these = [make_request(str(seed), [1, 2, 3], max_tokens=20, n=2, seed=seed, temperature=1.0) for seed in range(3)]
    outputs, _ = run(core_of(model, num_blocks=200), these)
    assert len({tuple(tokens) for tokens in outputs.values()}) == 6


def test_greedy_ignores_the_seed_and_all_choices_agree() -> None:
    model = paged(build("llama"), num_blocks=200)
    these = [make_request(str(seed), [1, 2, 3], max_tokens=20, n=2, seed=seed) for seed in range(3)]
    outputs, _ = run(core_of(model, num_blocks=200), these)
    assert len({tuple(tokens) for tokens in outputs.values()}) == 1


@pytest.mark.parametrize(
    ("sampled", "drafts", "wanted"),
    [
        ([7], (), (7,)),
        ([7, 8], (7,), (7, 8)),
        ([7, 8], (6,), (7,)),
        ([7, 8, 9], (7, 5), (7, 8)),
        ([7, 8, 9], (5, 8), (7,)),
        ([7, 8, 9], (7, 8), (7, 8, 9)),
    ],
)
def test_the_longest_agreeing_run_and_one_more(sampled: list[int], drafts: tuple[int, ...], wanted) -> None:
    row = Row(0, (1, *drafts), 0, 0, (), len(drafts), True, 0)
    assert agreed(sampled, row) == wanted
