"""The CUDA attention's metadata, layout and graphs, with the kernel replaced by what its documentation says.

The kernel itself has no CPU version; `tests/core/test_cuda.py` runs it where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from trio_llm.core import varlen_attention
from trio_llm.core.attention import LayerSpec, SequenceSpan
from trio_llm.core.decode_graphs import DecodeGraphs, can_record
from trio_llm.core.model import PagedModel
from trio_llm.core.varlen_attention import VarlenBackend, can_attend, has_kernel

from .test_differential import compare
from .tiny_models import ARCHITECTURES, CPU, build, core_of, references

# one that slides, and one whose layers differ
KINDS = ["llama", "mistral", "gemma3_text"]


def documented_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """(T, Hq, D), one sequence after another; queries stand at the end of what is used."""
    assert num_splits == 1 and window_size[1] == 0
    # it is not read, but what runs beneath insists on it
    assert cu_seq_k.shape == cu_seq_q.shape and cu_seq_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert all(tensor.dtype == torch.int32 for tensor in (cu_seq_q, seqused_k, block_table))
    borders = cu_seq_q.tolist()
    assert max_q >= max(end - start for start, end in pairwise(borders))
    assert max_k >= int(seqused_k.max())
    out = torch.full_like(query, float("nan"))
    for index, (start, end) in enumerate(pairwise(borders)):
        used = int(seqused_k[index])
        pages = block_table[index, : -(-used // key.shape[1])].long()
        keys, values = (pool[pages].flatten(0, 1)[:used].transpose(0, 1) for pool in (key, value))
        places = torch.arange(used - (end - start), used)[:, None]
        seen = torch.arange(used) <= places
        if window_size[0] >= 0:
            seen &= torch.arange(used) >= places - window_size[0]
        groups = query.shape[1] // keys.shape[0]
        keys, values = (kv.repeat_interleave(groups, dim=0) for kv in (keys, values))
        scores = query[start:end].transpose(0, 1) @ keys.transpose(1, 2) * (scale or query.shape[2] ** -0.5)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[start:end] = (weights @ values).transpose(0, 1)
    return out


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "varlen_attn", documented_varlen_attn)


def varlen(architecture: str, *, block_size: int, num_blocks: int = 64) -> PagedModel:
    model = PagedModel(build(architecture), VarlenBackend(CPU, block_size))
    model.allocate(num_blocks)
    return model


@pytest.mark.parametrize("architecture", KINDS)
def test_text_is_transformers_own(architecture: str) -> None:
    expected = references(architecture)
    model = varlen(architecture, block_size=4)
    model.probe()
    compare(core_of(model), expected)
    compare(core_of(model, max_num_seqs=2, max_num_batched_tokens=3), expected)
    preempting = core_of(model, num_blocks=30, max_num_batched_tokens=11)
    compare(preempting, expected)
    assert preempting.statistics().num_preemptions > 0


class Replays:
    """In place of CUDA's: a graph is run anew, and writes where it wrote before."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.num_recorded += 1
        logits = function().clone()
        replays = self

        def replay() -> None:
            backend = replays.backend
            backend.step = step
            logits.copy_(function())

        step = self.backend.step
        return replay, logits

    backend: VarlenBackend


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5])
def test_a_padded_batch_has_the_logits_of_the_step_itself(num_sequences: int) -> None:
    model = varlen("llama", block_size=4)
    backend = model.backend
    assert isinstance(backend, VarlenBackend)
    capture = Replays()
    capture.backend = backend

    def run(tokens: Tensor, positions: Tensor) -> Tensor:
        return model.model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]

    graphs = DecodeGraphs(backend, run, max_model_len=256, sizes=(1, 2, 4, 8), capture=capture)
    generator = torch.Generator().manual_seed(num_sequences)
    prompts = [torch.randint(160, (7 + 3 * index,), generator=generator).tolist() for index in range(num_sequences)]
    tables = [[index * 10 + page for page in range(10)] for index in range(num_sequences)]

    with torch.inference_mode():
        for prompt, table in zip(prompts, tables, strict=True):
            backend.begin_step([SequenceSpan(0, len(prompt), table)])
            run(torch.tensor([prompt]), torch.arange(len(prompt))[None])
        for round_number in range(3):
            spans = [
                SequenceSpan(len(prompt) + round_number, 1, table)
                for prompt, table in zip(prompts, tables, strict=True)
            ]
            tokens = [round_number + index for index in range(num_sequences)]
            assert graphs.fits(spans)
            found = graphs.forward(tokens, spans).clone()
            # the same tokens once more, kernel by kernel, into the same places
            backend.begin_step(spans)
            expected = run(torch.tensor([tokens]), torch.tensor([[span.start for span in spans]]))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert capture.num_recorded == 1


def test_what_is_not_a_decode_step_does_not_fit() -> None:
    model = varlen("llama", block_size=4)
    assert isinstance(model.backend, VarlenBackend)
    graphs = DecodeGraphs(model.backend, lambda *_: torch.empty(0), max_model_len=64, sizes=(1, 2), capture=Replays())
    one = SequenceSpan(3, 1, [0])
    assert graphs.fits([one, one])
    assert not graphs.fits([])
    assert not graphs.fits([one, one, one])
    assert not graphs.fits([one, SequenceSpan(0, 2, [1])])


@pytest.mark.parametrize(
    ("spec", "dtype", "wanted"),
    [
        (LayerSpec(2, 64, 64, None), torch.bfloat16, True),
        (LayerSpec(2, 64, 64, 128), torch.float16, True),
        (LayerSpec(2, 64, 64, None), torch.float32, False),
        (LayerSpec(2, 192, 128, None), torch.bfloat16, False),
        (LayerSpec(2, 512, 512, None), torch.bfloat16, False),
        (LayerSpec(2, 20, 20, None), torch.bfloat16, False),
        (LayerSpec(2, 64, 64, None, is_plain=False), torch.bfloat16, False),
    ],
)
def test_which_layers_the_kernel_computes(spec: LayerSpec, dtype: torch.dtype, wanted: Any) -> None:
    assert can_attend([spec], dtype) is wanted


@pytest.mark.parametrize(
    ("capability", "hip", "wanted"),
    [((8, 0), None, True), ((9, 0), None, True), ((7, 5), None, False), ((9, 4), "7.0", False)],
)
def test_which_devices_have_the_kernel(
    capability: tuple[int, int], hip: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_kernel(torch.device("cuda")) is wanted
    assert not has_kernel(CPU)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_with_experts_are_not_recorded(architecture: str) -> None:
    assert can_record(build(architecture)) is (architecture not in {"mixtral", "qwen3_moe", "gpt_oss"})
