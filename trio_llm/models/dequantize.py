"""The values of GGUF tensors, in vectors.

A block is a few scales followed by small integers, several to a byte.  The integers
of a run of bytes are stored field by field: all low nibbles of the run first, then
all high ones.  Every format below is that one idea with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trio_llm.models.ggml_types import GGMLType

_CHUNK_VALUES = 1 << 20
"""Values decoded at once, so that the float32 in between stays in the cache and small."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(raw: Tensor, kind: GGMLType, dtype: torch.dtype) -> Tensor:
    """The values that flat bytes hold.

    Args:
        raw: uint8, whole blocks one after the other.
        kind: their format.
        dtype: of the result; the arithmetic is float32 whatever it is.

    Returns:
        A flat tensor.
    """
    if kind.name in _FLOATS:
        return raw.view(_FLOATS[kind.name]).to(dtype)
    decode = _DECODERS[kind.name]
    blocks = raw.view(-1, kind.bytes_per_block)
    values = torch.empty(blocks.shape[0], kind.block_size, dtype=dtype, device=raw.device)
    step = _CHUNK_VALUES // kind.block_size
    for start in range(0, blocks.shape[0], step):
        values[start : start + step] = decode(blocks[start : start + step])
    return values.view(-1)


def _fields(packed: Tensor, bits: int, run: int) -> Tensor:
    """The `bits`-wide integers of each row of bytes, in runs of `run` bytes, lowest field first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1)
    values = (packed.reshape(packed.shape[0], -1, 1, run) >> shifts) & ((1 << bits) - 1)
    return values.reshape(packed.shape[0], -1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as a float32 column."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _grouped(integers: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """Integers times the scale of their group, less its minimum; one column of `scales` is one group."""
    values = integers.float().view(*scales.shape, -1) * scales.unsqueeze(-1)
    if minima is not None:
        values -= minima.unsqueeze(-1)
    return values.view(integers.shape)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_fields(blocks[:, 2:], 4, 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _fields(blocks[:, 4:], 4, 16).float() + _half(blocks, 2)


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """32 integers: the fifth bits in four bytes, one after the other, then the nibbles."""
    return (_fields(low, 4, 16) | (_fields(high, 1, 1) << 4)).float()


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    integers = _fields(blocks[:, 16:80], 2, 32)
    return _grouped(integers, _half(blocks, 80) * (scales & 15).float(), _half(blocks, 82) * (scales >> 4).float())


def _q3_k(blocks: Tensor) -> Tensor:
    # the third bit is stored inverted: where it is clear, 4 is taken off
    integers = _fields(blocks[:, 32:96], 2, 32).float() - 4 * (1 - _fields(blocks[:, :32], 1, 32).float())
    scales = _fields(blocks[:, 96:104], 4, 8) | (_fields(blocks[:, 104:108], 2, 4) << 4)
    return _grouped(integers, _half(blocks, 108) * (scales.float() - 32))


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits, packed in twelve bytes.

    Four bytes hold scales 0 to 3 and, on top, two bits of scales 4 to 7; four more do
    the same for the minima; the last four hold the low nibbles of both.
    """
    first, second, nibbles = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (nibbles & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (nibbles >> 4) | ((second >> 6) << 4)], dim=1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    return _grouped(_fields(blocks[:, 16:], 4, 32), _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    integers = _fields(blocks[:, 48:], 4, 32) | (_fields(blocks[:, 16:48], 1, 32) << 4)
    return _grouped(integers, _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q6_k(blocks: Tensor) -> Tensor:
    integers = _fields(blocks[:, :128], 4, 64) | (_fields(blocks[:, 128:192], 2, 32) << 4)
    scales = blocks[:, 192:208].view(torch.int8).float()
    return _grouped(integers.float() - 32, _half(blocks, 208) * scales)


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
