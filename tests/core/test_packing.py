"""Packed layers: the products are those of torch, a row's whatever rows there are beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trio_llm.core.kernels import FLAGS, Kernels, load
from trio_llm.core.linear import speed_up_linears
from trio_llm.core.packing import pack

from .packed import SHAPES, packed

FORMATS = [torch.int8, torch.float32]


@pytest.mark.parametrize("shape", SHAPES)
def test_in_float32_it_is_the_product_and_the_bias(kernels: Kernels, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(shape, generator=generator), torch.randn(13, shape[1], generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    exact = rows.double() @ weight.double().t() + bias.double()
    found = packed(weight, kernels, torch.float32, bias)(rows)
    # each of the sum's steps rounds once
    size = rows.double().abs() @ weight.double().abs().t() + bias.double().abs()
    assert ((found - exact).abs() <= (shape[1] + 1) * 2**-24 * size).all()


def test_a_cpu_with_shorter_vectors_makes_the_same_float32(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(80, 200, generator=generator), torch.randn(9, 200, generator=generator)
    product = packed(weight, kernels, torch.float32)(rows)
    lesser = load((*FLAGS, "-mno-avx512f"))
    if lesser is None:
        pytest.skip("this compiler builds for another kind of CPU")
    assert lesser.vector_bytes < 64
    assert torch.equal(packed(weight, lesser, torch.float32)(rows), product)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_depends_on_no_other(kernels: Kernels, threads: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = packed(torch.randn(176, 320, generator=generator), kernels, dtype)
    rows = torch.randn(64, 320, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = layer(rows)
        for count in range(1, 9):
            for first in range(0, 64 - count, 5):
                assert torch.equal(layer(rows[first : first + count]), together[first : first + count])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FORMATS)
def test_no_rows_at_all(kernels: Kernels, dtype: torch.dtype) -> None:
    assert packed(torch.randn(8, 16), kernels, dtype)(torch.empty(1, 0, 16)).shape == (1, 0, 8)


class Block(nn.Module):
    def __init__(self, width: int = 32, *, keys: int = 16, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, 32, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.gate_proj = nn.Linear(width, 48)
        self.up_proj = nn.Linear(width, 48)
        self.down_proj = nn.Linear(48, width)
        self.norm = nn.LayerNorm(width)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("keys", [16, 12])
def test_siblings_that_fit_share_memory_and_give_their_own_products(
    kernels: Kernels, keys: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    block = Block(keys=keys).requires_grad_(False)
    alone = {
        name: packed(child.weight, kernels, dtype, child.bias)
        for name, child in block.named_children()
        if name != "norm"
    }
    speed_up_linears(block)
    assert pack(block, kernels, dtype) == 6
    assert isinstance(block.norm, nn.LayerNorm)
    rows = torch.randn(3, 32)
    for name, layer in alone.items():
        x = torch.randn(3, 48) if name == "down_proj" else rows
        assert torch.equal(block.get_submodule(name)(x), layer(x))
    assert (block.q_proj.packed is block.v_proj.packed) == (keys == 16)
    assert block.gate_proj.packed is block.up_proj.packed
    assert block.down_proj.packed is not block.up_proj.packed
