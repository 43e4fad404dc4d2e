"""Blocks that are shared, by content or by fork, hold what their readers would have computed."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import pytest

from trio_llm.core.engine_core import EngineCore
from trio_llm.core.request import Request, Sequence
from trio_llm.core.speculation import Speculation

from .helpers import FakeDrafter, is_idle, make_request, run
from .tiny_models import Comparison, build, core_of, greedy, paged

PREFIX = [7, 3, 9, 9, 1, 4, 12, 5, 8, 2]
TAILS = [[], [20], [21, 22, 23], [20]]
NUM_TOKENS = 20
SMALLER = {"gemma3_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}}


class MostlyRight(FakeDrafter):
    """A drafter that knows what comes; every fifth guess is wrong."""

    def __init__(self, known: Mapping[tuple[str, int], Seq[int]]) -> None:
        super().__init__(self._known)
        self.known = known

    def _known(self, sequence: Sequence, count: int) -> list[int]:
        done = sequence.num_output_tokens
        tokens = self.known.get((sequence.request.id, sequence.index), ())[done : done + count]
        return [token if (done + place) % 5 else (token + 1) % 160 for place, token in enumerate(tokens)]


def tokens_of(core: EngineCore, these: Seq[Request], abort: bool) -> dict[tuple[str, int], list[int]]:
    """Run them all; with `abort` beside a request of which one choice leaves early, and then the others."""
    gone = make_request("gone", [*PREFIX, 20, 30], max_tokens=NUM_TOKENS, n=3)
    for request in [these[0], gone, *these[1:]] if abort else these:
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
    assert is_idle(core)
    return outputs


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
def test_cache_chunks_preemption_choices_drafts_and_aborts_together(architecture: str) -> None:
    """Greedy, each gives transformers' own text; seeded, each gives what it gives alone, with all that switched off."""
    prompts = [PREFIX + tail for tail in TAILS]
    make = functools.partial(build, architecture, **SMALLER.get(architecture, {}))
    expected = [greedy(make(), prompt, NUM_TOKENS) for prompt in prompts]
    model = paged(make(), block_size=4, num_blocks=160)
    seeded = {"max_tokens": NUM_TOKENS, "n": 3, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    alone = run(core_of(model, num_blocks=160), [make_request("seeded", prompts[2], **seeded)])[0]
    known = {(str(i), index): each.token_ids for i, each in enumerate(expected) for index in range(3)} | alone
    counts = Comparison()
    happened: Counter[str] = Counter()
    product = itertools.product((True, False), (9, 512), (22, 160), (1, 3), (False, True), (False, True))
    for caching, budget, num_blocks, n, speculation, abort in product:
        core = core_of(model, num_blocks=num_blocks, max_num_batched_tokens=budget, enable_prefix_caching=caching)
        if speculation:
            core.speculation = Speculation(MostlyRight(known), max_tokens=4, vocab_size=160)
        these = [make_request(str(i), prompt, max_tokens=NUM_TOKENS, n=n) for i, prompt in enumerate(prompts)]
        outputs = tokens_of(core, [*these, make_request("seeded", prompts[2], **seeded)], abort)
        for i, reference in enumerate(expected):
            for index in range(n):
                counts.compare(outputs[str(i), index], reference)
        assert {key: tokens for key, tokens in outputs.items() if key[0] == "seeded"} == alone
        statistics = core.statistics()
        assert caching or statistics.num_cache_hits == 0
        assert speculation or statistics.num_draft_tokens == 0
        happened["hits"] += statistics.num_cache_hits
        happened["preemptions"] += statistics.num_preemptions
        happened["accepted drafts"] += statistics.num_accepted_tokens
        happened["wrong drafts"] += statistics.num_draft_tokens - statistics.num_accepted_tokens
    counts.check()
    assert all(happened[what] > 0 for what in ("hits", "preemptions", "accepted drafts", "wrong drafts")), happened


@pytest.mark.parametrize("length", [8, 9, 11])
def test_a_fork_computes_one_token_of_the_prompt(length: int) -> None:
    """The prompt once for all choices, its last token for each other choice, and one token to go on with for each."""
    core = core_of(paged(build("llama"), block_size=4), enable_prefix_caching=False)
    request: Request = make_request("a", (PREFIX * 2)[:length], max_tokens=2, n=4)
    core.add(request)
    while core.has_work():
        core.step()
    assert core.statistics().num_computed_tokens == length + 3 + 4
