"""The number formats of GGUF tensors: how many values share how many bytes."""

from __future__ import annotations

import attrs


@attrs.frozen
class GGMLType:
    """A number format.  `block_size` values are stored together in `bytes_per_block` bytes."""

    name: str
    block_size: int
    bytes_per_block: int


GGML_TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    30: GGMLType("BF16", 1, 2),
}
"""By the numbers that ggml gives them in files."""
