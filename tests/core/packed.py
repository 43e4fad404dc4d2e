"""Packed layers for tests."""

from __future__ import annotations

import torch
from torch import nn

from trio_llm.core.kernels import Kernels
from trio_llm.core.packing import PackedLinear, pack

SHAPES = [(16, 64), (1, 1), (17, 65), (48, 192), (33, 130), (160, 32)]
"""Outputs and inputs: whole tiles and groups, and parts of them."""


def packed(
    weight: torch.Tensor, kernels: Kernels, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> PackedLinear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight.data = weight
    if bias is not None:
        linear.bias.data = bias
    model = nn.ModuleDict({"layer": linear}).requires_grad_(False)
    assert pack(model, kernels, dtype) == 1
    layer = model["layer"]
    assert isinstance(layer, PackedLinear)
    return layer
