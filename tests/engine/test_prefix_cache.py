"""Stop strings and aborts, with the prefix cache and without, in a pool that is large enough and in one that is not.

The core knows nothing of text: where a stop string ends a choice, it has run ahead, and what it computed there stays
in the cache for the next.  Logits are the same to the last bit here, so each text must be that of the request alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import torch
import trio
from transformers import AutoConfig, AutoModelForCausalLM

from trio_llm import Engine, SamplingParams, open_engine
from trio_llm.config import EngineSettings
from trio_llm.engine.simulation import ByteTokenizer
from trio_llm.models.loader import LoadedModel

PREFIX = "once upon a time"
PROMPTS = [PREFIX, PREFIX + " there", PREFIX + " there was", PREFIX + " in a house", PREFIX]
BLOCK_BYTES = 2 * 2 * 8 * 4 * 4
"""Keys and values, of two heads of eight numbers in float32, of four tokens."""
SETTINGS = EngineSettings(
    device="cpu", deterministic=True, compiled_kernels=False, block_size=4, max_model_len=96, max_num_seqs=8,
    enable_prefix_caching=False, stream_interval=0.0,
)  # fmt: skip
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=24, n=2, allowed_token_ids=tuple(range(32, 127)))


def tiny_model() -> LoadedModel:
    """Random weights that speak ASCII."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "llama", vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=96, initializer_range=0.3,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    return LoadedModel(
        name="tiny",
        model=model,
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        defaults=SamplingParams(),
        eos_token_ids=frozenset(),
        max_model_len=96,
        load_seconds=0.0,
    )


@attrs.frozen
class Ending:
    """How a choice ended."""

    text: str
    token_ids: bytes
    reason: str


async def endings(engine: Engine, prompt: str, stop: Sequence[str] = ()) -> list[Ending]:
    async with engine.generate(prompt, attrs.evolve(PARAMS, stop=tuple(stop))) as generation:
        deltas = [delta async for delta in generation]
    for choice in generation.choices:
        assert "".join(delta.text for delta in deltas if delta.index == choice.index) == choice.text
    assert generation.usage.completion_tokens == sum(len(choice.token_ids) for choice in generation.choices)
    return [Ending(c.text, bytes(c.token_ids), str(c.finish_reason)) for c in generation.choices]


def up_to(text: str, stop: str) -> Ending:
    """What is left of a text of one token a character where a stop string ends it."""
    place = text.find(stop)
    return (
        Ending(text, text.encode(), "length") if place < 0 else Ending(text[:place], text[: place + 2].encode(), "stop")
    )


async def leave_early(engine: Engine, number: int) -> None:
    """Abort a request that shares the others' prefix, with two choices of which one may have ended."""
    async with engine.generate(PROMPTS[number % 5], PARAMS) as generation:
        for _ in range(number % 7):
            await anext(generation)
        generation.abort()


@pytest.mark.parametrize("num_blocks", [24, 400])
@pytest.mark.parametrize("caching", [False, True])
async def test_texts_are_those_of_each_request_alone(caching: bool, num_blocks: int) -> None:
    found: list[list[Ending]] = []

    async def ask(prompt: str, stop: str, place: int) -> None:
        found[place] = await endings(engine, prompt, [stop])

    prompts, turns = PROMPTS, []
    async with open_engine(tiny_model(), settings=SETTINGS) as engine:
        for _ in range(2):
            alone = [await endings(engine, prompt) for prompt in prompts]
            # two characters from the middle of the first choice, which end the second wherever they happen to be in it
            stops = [first.text[5 + 2 * place : 7 + 2 * place] for place, (first, _) in enumerate(alone)]
            expected = [[up_to(ending.text, stop) for ending in each] for each, stop in zip(alone, stops, strict=True)]
            assert {ending.reason for each in expected for ending in each} == {"length", "stop"}
            turns.append((prompts, stops, expected))
            # goes on from where the core had run to, and from where the stop string was
            prompts = [prompt + alone[place][place % 2].text for place, prompt in enumerate(prompts)]

    settings = attrs.evolve(SETTINGS, enable_prefix_caching=caching, kv_cache_memory=num_blocks * BLOCK_BYTES)
    async with open_engine(tiny_model(), settings=settings) as engine:
        for number, (prompts, stops, expected) in enumerate([*turns, *turns]):
            found = [[] for _ in PROMPTS]
            async with trio.open_nursery() as nursery:
                for place, (prompt, stop) in enumerate(zip(prompts, stops, strict=True)):
                    nursery.start_soon(ask, prompt, stop, place)
                    nursery.start_soon(leave_early, engine, place + 3 * number)
            assert found == expected
            core = await engine.settled()
            engine._worker.core.check()
            assert (core.num_running, core.num_waiting, core.num_free_blocks) == (0, 0, core.num_blocks)
        assert (core.num_cache_hits > 0) == caching
        assert (core.num_preemptions > 0) == (num_blocks == 24)
