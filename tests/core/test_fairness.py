"""How long anyone can wait, in steps: the bounds that docs/design.md states."""

from __future__ import annotations

import math

import pytest

from trio_llm.core.engine_core import EngineCore
from trio_llm.core.request import Request

from .helpers import FaultyExecutor, make_core, make_request

B = 16
"""Token budget."""
S = 6
"""Sequences in a step."""


def add(core: EngineCore, name: str, length: int, max_tokens: int, *, priority: int = 0) -> Request:
    request = make_request(name, [ord(name[0]) % 40] * length, max_tokens=max_tokens, priority=priority)
    core.add(request)
    return request


def step(core: EngineCore) -> set[str]:
    """One step, all read at once; the requests that got a token."""
    outputs = core.step()
    core.check()
    for output in outputs:
        core.acknowledge(output.request_id, output.index, len(output.token_ids))
    return {output.request_id for output in outputs}


def steps_until(core: EngineCore, name: str, limit: int) -> int:
    """Steps until a request gets a token."""
    for number in range(1, limit + 1):
        if name in step(core):
            return number
    pytest.fail(f"{name} got nothing in {limit} steps")


def roomy(num_blocks: int = 400) -> EngineCore:
    executor = FaultyExecutor(num_blocks=num_blocks, block_size=4, max_model_len=300)
    return make_core(executor, max_num_seqs=S, max_num_batched_tokens=B, enable_prefix_caching=False)


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_who_decodes_gets_a_token_in_every_step(num_prompts: int, priority: int) -> None:
    core = roomy()
    decoding = [add(core, name, 1, 250) for name in "abc"]
    while len(step(core)) < 3:
        pass
    for name in "xyz"[:num_prompts]:
        add(core, name, 200, 1, priority=priority)
    for _ in range(num_prompts * 200 // B):
        assert {request.id for request in decoding} <= step(core)


@pytest.mark.parametrize("length", [1, 2, B - S + 1, B - S + 2, 40, 200])
def test_a_prompt_beside_a_full_batch_of_decodes_waits_as_long_as_it_is(length: int) -> None:
    """The first of the prompts has at least B - S + 1 tokens in every step."""
    core = roomy()
    for name in "abcde":
        add(core, name, 1, 250)
    while len(step(core)) < S - 1:
        pass
    add(core, "x", length, 1)
    assert steps_until(core, "x", 100) <= math.ceil(length / (B - S + 1))


@pytest.mark.parametrize("piece", [1, 3, 8, 100])
@pytest.mark.parametrize("num_prompts", [1, 2, 4])
def test_who_decodes_waits_for_no_more_than_a_piece_of_a_prompt(piece: int, num_prompts: int) -> None:
    """Prompts have at most P tokens of a step in which others decode, and the first of them as many if they fit."""
    executor = FaultyExecutor(num_blocks=400, block_size=4, max_model_len=300)
    core = make_core(
        executor,
        max_num_seqs=S,
        max_num_batched_tokens=B,
        max_num_mixed_prompt_tokens=piece,
        enable_prefix_caching=False,
    )
    decoding = {add(core, name, 1, 250).sequences[0].id for name in "ab"}
    while len(step(core)) < 2:
        pass
    num_before = len(executor.plans)
    for name in "wxyz"[:num_prompts]:
        add(core, name, 60, 1)
    assert steps_until(core, "w", 100) <= math.ceil(60 / min(piece, B - S + 1))
    for plan in executor.plans[num_before:]:
        # a prompt's last token is decoding already
        assert sum(len(row.token_ids) for row in plan.rows if len(row.token_ids) > 1) <= piece
        assert decoding <= {row.sequence_id for row in plan.rows}


def test_nobody_decodes_so_prompts_have_it_all() -> None:
    executor = FaultyExecutor(num_blocks=400, block_size=4, max_model_len=300)
    core = make_core(executor, max_num_seqs=S, max_num_batched_tokens=B, max_num_mixed_prompt_tokens=2)
    add(core, "x", 10 * B, 1)
    assert steps_until(core, "x", 11) == 10


def test_prompts_take_turns_in_their_order() -> None:
    """Who comes behind other prompts waits for these and itself, whatever decodes meanwhile."""
    core = roomy()
    for name in "abc":
        add(core, name, 1, 250)
    while len(step(core)) < 3:
        pass
    lengths = {"x": 90, "y": 3, "z": 20}
    for name, length in lengths.items():
        add(core, name, length, 5)
    waits = {}
    for number in range(1, 100):
        for name in step(core):
            waits.setdefault(name, number)
    total = 0
    for name, length in lengths.items():
        total += length
        assert waits[name] <= math.ceil(total / (B - S + 1)) + 1


@pytest.mark.parametrize("num_blocks", [20, 40, 400])
def test_everyone_ends_within_the_work_before_it(num_blocks: int) -> None:
    """Each step brings the first of all a token further at least, and who is first stays first till it ends."""
    core = roomy(num_blocks)
    names = [f"{letter}{number}" for letter in "abcdef" for number in range(5)]
    work = {name: (1 + 7 * place % 30, 1 + 11 * place % 40) for place, name in enumerate(names)}
    for name, (length, max_tokens) in work.items():
        add(core, name, length, max_tokens)
    requests = {name: core._requests[name] for name in names}
    ended: dict[str, int] = {}
    number = 0
    while core.has_work():
        number += 1
        step(core)
        for name, request in requests.items():
            if request.sequences[0].is_finished:
                ended.setdefault(name, number)
    bound = 0
    for name, (length, max_tokens) in work.items():
        bound += math.ceil(length / (B - S + 1)) + max_tokens
        assert ended[name] <= bound
    assert (core.statistics().num_preemptions > 0) == (num_blocks < 400)


def test_the_first_of_all_moves_in_every_step_however_short_memory_is() -> None:
    """Even where there is one row a step, and many who were paused come back at once."""
    executor = FaultyExecutor(num_blocks=400, block_size=4, max_model_len=300)
    core = make_core(executor, max_num_seqs=1, max_num_batched_tokens=4, credit_window=2)
    for name in "abcde":
        core.add(make_request(name, [1] * 30, max_tokens=9))
    while core.has_work():  # nobody reads
        core.step()
    for name in "abcde":
        core.acknowledge(name, 0, 2)
    core.add(make_request("long", [2] * 100, max_tokens=9))
    for _ in range(7):
        assert "a" in step(core), "the first was passed over"
