"""Blocks that are shared, by content or by fork, hold what their readers would have computed."""

from __future__ import annotations

import itertools

import pytest

from trio_llm.core.request import Request

from .helpers import is_idle, make_request
from .tiny_models import Comparison, build, core_of, greedy, paged

PREFIX = [7, 3, 9, 9, 1, 4, 12, 5, 8, 2]
TAILS = [[], [20], [21, 22, 23], [20]]
NUM_TOKENS = 40


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
def test_cache_chunks_preemption_choices_and_aborts_together(architecture: str) -> None:
    prompts = [PREFIX + tail for tail in TAILS]
    expected = [greedy(build(architecture), prompt, NUM_TOKENS) for prompt in prompts]
    model = paged(build(architecture), block_size=4, num_blocks=160)
    counts = Comparison()
    num_hits = num_preemptions = 0
    for caching, budget, num_blocks, n in itertools.product((True, False), (9, 512), (22, 160), (1, 3)):
        core = core_of(model, num_blocks=num_blocks, max_num_batched_tokens=budget, enable_prefix_caching=caching)
        these = [make_request(str(i), prompt, max_tokens=NUM_TOKENS, n=n) for i, prompt in enumerate(prompts)]
        gone = make_request("gone", [*PREFIX, 20, 30], max_tokens=NUM_TOKENS, n=3)
        for request in [these[0], gone, *these[1:]]:
            core.add(request)
        outputs: dict[tuple[str, int], list[int]] = {}
        for number in itertools.count():
            if not core.has_work():
                break
            if number == 5:  # its blocks may be others' by now
                core.finish("gone", 0)
            if number == 8:
                core.finish("gone")
            for output in core.step():
                outputs.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            core.check()
        for i, reference in enumerate(expected):
            for index in range(n):
                counts.compare(outputs[str(i), index], reference)
        assert is_idle(core)
        statistics = core.statistics()
        assert caching or statistics.num_cache_hits == 0
        num_hits += statistics.num_cache_hits
        num_preemptions += statistics.num_preemptions
    counts.check()
    assert num_hits > 0
    assert num_preemptions > 0


@pytest.mark.parametrize("length", [8, 9, 11])
def test_a_fork_computes_one_token_of_the_prompt(length: int) -> None:
    """The prompt once for all choices, its last token for each other choice, and one token to go on with for each."""
    core = core_of(paged(build("llama"), block_size=4), enable_prefix_caching=False)
    request: Request = make_request("a", (PREFIX * 2)[:length], max_tokens=2, n=4)
    core.add(request)
    while core.has_work():
        core.step()
    assert core.statistics().num_computed_tokens == length + 3 + 4
