"""A real model through the whole engine: its thread, its pages, its tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from trio_llm import open_engine
from trio_llm.config import EngineSettings
from trio_llm.models.loader import LoadedModel, load_model

# the weights as they are: transformers is to make the same text of them
SETTINGS = EngineSettings(device="cpu", quantization="none", max_num_seqs=4, max_model_len=256)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2", settings=SETTINGS)


async def test_a_chat_with_smollm2(smollm2: LoadedModel) -> None:
    """Greedy, in two chats at once: the text that transformers makes of the same weights."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Name three colours."}]

    # before the engine gives the model its own attention
    prompt = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = smollm2.model.generate(**prompt, do_sample=False, max_new_tokens=24)
    expected = smollm2.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)

    async def chat(text: list[str]) -> None:
        async with engine.generate(messages, temperature=0, max_tokens=24) as generation:
            text.extend([delta.text async for delta in generation])
        assert "".join(text) == generation.text

    async with open_engine(smollm2, settings=SETTINGS) as engine:
        first: list[str] = []
        second: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(chat, first)
            nursery.start_soon(chat, second)
        core = await engine.settled()
        assert core.num_free_blocks == core.num_blocks
    assert "".join(first) == "".join(second) == expected
