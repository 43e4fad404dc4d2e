"""The CUDA path on a GPU: `pytest tests/core/test_cuda.py` where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trio_llm.config import EngineSettings
from trio_llm.core.attention import SdpaBackend, SequenceSpan
from trio_llm.core.build import build_core
from trio_llm.core.model import PagedModel, SpanInput
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.varlen_attention import BLOCK_SIZE, VarlenBackend
from trio_llm.models.loader import LoadedModel

from .helpers import is_idle, make_request, run
from .tiny_models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
CUDA = torch.device("cuda")
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    # with larger weights what is rounded to 16 bits makes as much of a difference as a fault would
    "initializer_range": 0.1,
}
LENGTHS = (1, 37, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 5, 3 * BLOCK_SIZE)
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Of a logit, relative to the largest."""


def model_on_gpu(architecture: str, backend: SdpaBackend | VarlenBackend, dtype: torch.dtype) -> PagedModel:
    model = PagedModel(build(architecture, **WIDE).to(CUDA, dtype), backend)
    model.allocate(64)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(160, (length,), generator=generator).tolist() for length in LENGTHS]


def tables() -> list[list[int]]:
    """Blocks for each prompt and some tokens more."""
    blocks = -(-max(LENGTHS) // BLOCK_SIZE) + 1
    return [list(range(index * blocks, (index + 1) * blocks)) for index in range(len(LENGTHS))]


def difference(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3_text"])
def test_the_kernel_agrees_with_sdpa(architecture: str, dtype: torch.dtype) -> None:
    inputs = [
        SpanInput(prompt, SequenceSpan(0, len(prompt), table))
        for prompt, table in zip(prompts(), tables(), strict=True)
    ]
    wanted = (torch.tensor(LENGTHS).cumsum(0) - 1).tolist()
    with torch.inference_mode():
        own = model_on_gpu(architecture, VarlenBackend(CUDA), dtype).forward(inputs, wanted)
        reference = model_on_gpu(architecture, SdpaBackend(CUDA, BLOCK_SIZE), dtype).forward(inputs, wanted)
    assert difference(own, reference) < TOLERANCE[dtype]


# a size that is recorded, and one that is padded to it; fed with the same tokens, since a padded
# product may round otherwise and a random model's best two tokens are often close
@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_graphs_give_the_logits_of_kernels_one_by_one(architecture: str, count: int) -> None:
    sequences = list(zip(prompts(), tables(), strict=True))[-count:]

    def logits(graphs: bool) -> Tensor:
        model = model_on_gpu(architecture, VarlenBackend(CUDA), torch.bfloat16)
        if graphs:
            model.record_decode_steps(1024)
        steps = []
        with torch.inference_mode():
            model.forward([SpanInput(p, SequenceSpan(0, len(p), table)) for p, table in sequences], [0])
            for step in range(4):
                inputs = [
                    SpanInput([10 * step + index], SequenceSpan(len(p) + step, 1, table))
                    for index, (p, table) in enumerate(sequences)
                ]
                steps.append(model.forward(inputs, range(count)))
        return torch.stack(steps)

    assert difference(logits(graphs=True), logits(graphs=False)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3_moe"])
def test_an_engine_as_it_is_served(architecture: str) -> None:
    loaded = LoadedModel(
        name="tiny",
        model=build(architecture, **WIDE).to(CUDA, torch.bfloat16),
        tokenizer=None,  # type: ignore[arg-type]
        defaults=SamplingParams(),
        eos_token_ids=frozenset(),
        load_seconds=0.0,
        max_model_len=2048,
    )
    core = build_core(loaded, EngineSettings(max_num_seqs=8, max_num_batched_tokens=512))
    assert core.executor.info.block_size == BLOCK_SIZE

    outputs, _ = run(core, [make_request(str(i), p, max_tokens=24) for i, p in enumerate(prompts())])

    assert [len(tokens) for tokens in outputs.values()] == [24] * len(LENGTHS)
    assert is_idle(core)
    core.close()
