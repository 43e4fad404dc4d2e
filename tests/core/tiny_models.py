"""Small random models of many architectures, their own greedy text, and our engine around them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trio_llm.config import EngineSettings
from trio_llm.core.attention import SdpaBackend
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.kernels import load
from trio_llm.core.linear import speed_up_linears
from trio_llm.core.model import PagedModel
from trio_llm.core.page_attention import PageBackend
from trio_llm.core.torch_executor import TorchExecutor

CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""Where the reference's first two candidates are closer than this, the rest may differ."""

COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # large enough that attention looks at something: with the usual 0.02 it averages
    "initializer_range": 0.3,
    # tied, a random model says its last token again and again
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 8, "num_hidden_layers": 4},
    "gemma3_text": {
        "sliding_window": 8,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {
        "num_local_experts": 4,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def build(architecture: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model in eval mode, the same for the same seed."""
    settings = {**COMMON, **ARCHITECTURES.get(architecture, {}), **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(architecture, **settings)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@attrs.frozen
class Reference:
    """What transformers itself gives for a prompt."""

    token_ids: list[int]
    gaps: list[float]
    """Of each token's logit to the next candidate's."""


def greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> Reference:
    """transformers' own greedy text, whatever end tokens come."""
    ids = torch.tensor([list(prompt)], device=CPU)
    with torch.inference_mode():
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=1.0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(result.logits).topk(2).values
    return Reference(result.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


PROMPTS = [[5, 6, 7, 8, 9, 10, 11] * 3, [20], [30] * 13 + [3, 4, 5, 99], [150, 7, 150]]


@functools.cache
def references(architecture: str) -> tuple[Reference, ...]:
    """Of PROMPTS, 64 tokens each."""
    model = build(architecture)
    return tuple(greedy(model, prompt, 64) for prompt in PROMPTS)


@attrs.define
class Comparison:
    """Counts how many continuations part from the reference where that nearly tied."""

    num_compared: int = 0
    num_ties: int = 0

    def compare(self, found: Sequence[int], reference: Reference) -> None:
        self.num_compared += 1
        assert len(found) == len(reference.token_ids)
        if list(found) == reference.token_ids:
            return
        place = next(i for i, (ours, own) in enumerate(zip(found, reference.token_ids, strict=True)) if ours != own)
        assert reference.gaps[place] < TOLERANCE, f"token {place} differs though the gap is {reference.gaps[place]}"
        self.num_ties += 1

    def check(self) -> None:
        assert self.num_ties <= 0.01 * self.num_compared, f"{self.num_ties} ties of {self.num_compared}"


BACKENDS = ("torch", "kernels")


def paged(
    model: PreTrainedModel,
    *,
    block_size: int = 16,
    num_blocks: int = 64,
    backend: str | None = None,
    kv_dtype: torch.dtype | None = None,
) -> PagedModel:
    """As build_core does it; `backend` is one of BACKENDS, by default what the product takes here."""
    speed_up_linears(model)
    kernels = None if backend == "torch" else load()
    if kernels is None and backend == "kernels":
        pytest.skip("there is no C++ compiler here")
    pages = SdpaBackend(CPU, block_size) if kernels is None else PageBackend(kernels, block_size)
    paged_model = PagedModel(model, pages, kv_dtype=kv_dtype)
    paged_model.allocate(num_blocks)
    return paged_model


def core_of(paged_model: PagedModel, *, num_blocks: int = 64, max_model_len: int = 256, **settings: Any) -> EngineCore:
    """An engine on a model; `num_blocks` may be fewer than it has."""
    executor = TorchExecutor(paged_model, num_blocks=num_blocks, max_model_len=max_model_len)
    return EngineCore(executor, EngineSettings(**{"max_num_seqs": 8, "max_num_batched_tokens": 512, **settings}))
