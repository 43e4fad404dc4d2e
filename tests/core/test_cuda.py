"""The CUDA path on a GPU: `pytest tests/core/test_cuda.py` where there is one."""

from __future__ import annotations

import pytest
import torch

from trio_llm.core.attention import SdpaBackend, SequenceSpan
from trio_llm.core.model import PagedModel, SpanInput
from trio_llm.core.varlen_attention import BLOCK_SIZE, VarlenBackend

from .helpers import is_idle, make_request, run
from .tiny_models import build, core_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
CUDA = torch.device("cuda")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "max_position_embeddings": 2048}
LENGTHS = (1, 37, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 5, 3 * BLOCK_SIZE)


def model_on_gpu(architecture: str, backend: SdpaBackend | VarlenBackend, dtype: torch.dtype) -> PagedModel:
    model = PagedModel(build(architecture, **WIDE).to(CUDA, dtype), backend)
    model.allocate(64)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(160, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3_text"])
def test_the_kernel_agrees_with_sdpa(architecture: str, dtype: torch.dtype) -> None:
    blocks = -(-max(LENGTHS) // BLOCK_SIZE) + 1
    inputs = [
        SpanInput(prompt, SequenceSpan(0, len(prompt), list(range(index * blocks, (index + 1) * blocks))))
        for index, prompt in enumerate(prompts())
    ]
    wanted = list(torch.tensor(LENGTHS).cumsum(0) - 1)
    with torch.inference_mode():
        own = model_on_gpu(architecture, VarlenBackend(CUDA), dtype).forward(inputs, wanted)
        reference = model_on_gpu(architecture, SdpaBackend(CUDA, BLOCK_SIZE), dtype).forward(inputs, wanted)
    error = float((own - reference).abs().max() / reference.abs().max())
    assert error < (5e-2 if dtype is torch.bfloat16 else 1e-2)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_graphs_give_the_tokens_of_kernels_one_by_one(architecture: str) -> None:
    def tokens(graphs: bool) -> dict[tuple[str, int], list[int]]:
        model = model_on_gpu(architecture, VarlenBackend(CUDA), torch.bfloat16)
        model.probe()
        if graphs:
            model.record_decode_steps(1024)
        core = core_of(model, max_model_len=1024)
        outputs, _ = run(core, [make_request(str(i), p, max_tokens=24) for i, p in enumerate(prompts())])
        assert is_idle(core)
        return outputs

    assert tokens(graphs=True) == tokens(graphs=False)
