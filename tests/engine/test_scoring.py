"""What scoring needs of the engine: no token at all, the prompt's log-probabilities, and times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from tests.core.tiny_models import build, core_of, paged
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.request import Request
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.engine.simulation import open_simulation
from trio_llm.errors import ContextLengthExceeded

INFO = ExecutorInfo(num_blocks=16, block_size=4, vocab_size=64, max_model_len=32)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 31, 32])
async def test_no_token(n: int, length: int) -> None:
    """The prompt may fill the whole context; nothing is made, and every block comes back."""
    async with open_simulation(executor=FakeExecutor(INFO), max_num_batched_tokens=16, max_num_seqs=4) as engine:
        for _ in range(2):  # the second finds the first one's blocks
            async with engine.generate([7] * length, max_tokens=0, n=n, prompt_logprobs=1) as generation:
                deltas = [delta async for delta in generation]
            assert [(choice.text, choice.token_ids, choice.finish_reason) for choice in generation.choices] == (
                [("", [], "length")] * n
            )
            assert len(deltas) == n
            assert generation.prompt_logprobs is not None
            assert len(generation.prompt_logprobs) == length - 1
            assert generation.usage.completion_tokens == 0
        with pytest.raises(ContextLengthExceeded):
            async with engine.generate([7] * 33, max_tokens=0):
                pass
        core = await engine.settled()
        assert core.num_free_blocks == core.num_blocks


def test_scores_are_those_of_the_model() -> None:
    model = build("llama")
    prompt = [5, 6, 7, 8, 9, 10, 11, 3, 99]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    core = core_of(paged(model), max_num_seqs=3, max_num_batched_tokens=4)
    params = SamplingParams(max_tokens=0, prompt_logprobs=2).resolved(SamplingParams(), max_tokens=9, seed=0)
    core.add(Request("a", prompt, params))
    outputs: list[Any] = []
    while core.has_work():
        outputs += core.step()
        core.check()
    (output,) = outputs
    assert [scored.token_id for scored in output.prompt_logprobs] == prompt[1:]
    for place, scored in enumerate(output.prompt_logprobs):
        assert scored.logprob == pytest.approx(expected[place, prompt[place + 1]].item(), abs=1e-4)


async def test_timings(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(INFO)
    settings = {"max_num_batched_tokens": 5, "max_num_seqs": 1}
    async with open_simulation(executor=executor, seconds_per_turn=1, **settings) as engine:

        async def first() -> None:
            async with engine.generate([1] * 5, max_tokens=3, ignore_eos=True) as generation:
                assert generation.timings.decode == 0
                async for _ in generation:
                    pass
            assert generation.timings.decode == pytest.approx(2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await trio.sleep(0.5)
            async with engine.generate([2] * 10, max_tokens=2, ignore_eos=True) as generation:
                async for _ in generation:
                    pass
        timings = generation.timings
        assert timings.queue > 1.5
        assert timings.prefill == pytest.approx(1)  # two steps, the first at its beginning
        assert timings.decode == pytest.approx(1)


async def test_on_arrival_says_when_there_is_something_to_drain() -> None:
    async with open_simulation(executor=FakeExecutor(INFO)) as engine:
        arrived = trio.Event()
        async with engine.generate([1, 2], max_tokens=3, ignore_eos=True) as generation:
            generation.on_arrival = lambda: arrived.set()  # noqa: PLW0108 - another event each time
            deltas = []
            while generation.finish_reason is None:
                await arrived.wait()
                arrived = trio.Event()
                deltas += generation.drain()
            deltas += generation.drain()
        assert [token for delta in deltas for token in delta.token_ids] == generation.choices[0].token_ids
