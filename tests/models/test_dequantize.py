"""Our dequantisers against those of the `gguf` package."""

import gguf
import numpy as np
import pytest
import torch

from trio_llm.models import dequantize as module
from trio_llm.models.dequantize import dequantize
from trio_llm.models.ggml_types import GGML_TYPES

BY_NAME = {kind.name: kind for kind in GGML_TYPES.values()}


def random_blocks(name: str, num_blocks: int) -> np.ndarray:
    """Random bytes, with scales that are ordinary numbers (a random float16 may be NaN)."""
    random = np.random.default_rng(0)
    kind = BY_NAME[name]
    data = random.integers(0, 256, (num_blocks, kind.bytes_per_block), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82]}
    halves |= {"Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    for start in halves.get(name, []):
        scales = random.normal(size=(num_blocks, 1)).astype(np.float16)
        data[:, start : start + 2] = scales.view(np.uint8)
    return data


@pytest.mark.parametrize("name", sorted(module._DECODERS))
def test_random_bytes_decode_as_in_the_gguf_package(name: str) -> None:
    data = random_blocks(name, 37)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    values = dequantize(torch.from_numpy(data).view(-1), BY_NAME[name], torch.float32)
    torch.testing.assert_close(values, torch.from_numpy(expected).view(-1), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_gguf_package_quantises_comes_back(name: str) -> None:
    weights = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    data = gguf.quants.quantize(weights, kind)
    raw = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).copy()).view(-1)
    values = dequantize(raw, BY_NAME[name], torch.float32).numpy().reshape(weights.shape)
    np.testing.assert_array_equal(values, gguf.quants.dequantize(data, kind))
    assert np.abs(values - weights).max() < 0.4


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(random_blocks("Q4_K", 10)).view(-1)
    whole = dequantize(raw, BY_NAME["Q4_K"], torch.float32)
    monkeypatch.setattr(module, "_CHUNK_VALUES", 3 * 256)
    assert torch.equal(dequantize(raw, BY_NAME["Q4_K"], torch.float32), whole)


def test_a_narrow_dtype_is_the_rounded_float32() -> None:
    raw = torch.from_numpy(random_blocks("Q5_K", 10)).view(-1)
    whole = dequantize(raw, BY_NAME["Q5_K"], torch.float32)
    assert torch.equal(dequantize(raw, BY_NAME["Q5_K"], torch.bfloat16), whole.bfloat16())


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for number, kind in GGML_TYPES.items():
        quantization = gguf.GGMLQuantizationType(number)
        assert kind.name == quantization.name
        assert (kind.block_size, kind.bytes_per_block) == gguf.GGML_QUANT_SIZES[quantization]
