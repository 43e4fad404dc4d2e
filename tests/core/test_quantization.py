"""int8 layers: the kernel's product is that of the reference in torch, exactly where it is exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trio_llm.core.kernels import FLAGS, GROUP, Kernels, load
from trio_llm.core.linear import speed_up_linears
from trio_llm.core.quantization import QuantizedLinear, ReferenceLinear, quantize, quantize_groups

SHAPES = [(16, 64), (1, 1), (17, 65), (48, 192), (33, 130), (160, 32)]


@pytest.fixture
def kernels() -> Kernels:
    return load() or pytest.skip("there is no C++ compiler here")


def packed(weight: torch.Tensor, kernels: Kernels, bias: torch.Tensor | None = None) -> QuantizedLinear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight.data = weight
    if bias is not None:
        linear.bias.data = bias
    model = nn.ModuleDict({"layer": linear}).requires_grad_(False)
    assert quantize(model, kernels) == 1
    layer = model["layer"]
    assert isinstance(layer, QuantizedLinear)
    return layer


def expected(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The layer's arithmetic written out: exact sums of a group, then float32, one group after the other."""
    numbers, scales = quantize_groups(rows)
    weights, weight_scales = quantize_groups(weight)
    total = torch.zeros(rows.shape[0], weight.shape[0], dtype=torch.float64)
    for group in range(numbers.shape[1]):
        exact = numbers[:, group].double() @ weights[:, group].double().t()
        scale = (weight_scales[:, group].t() * scales[:, group]).double()
        # one rounding, as a fused multiply and add has
        total = (total + exact * scale).float().double()
    return total.float()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_the_references(kernels: Kernels, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(shape, generator=generator), torch.randn(13, shape[1], generator=generator)
    rows[3, :2] *= 100
    rows[5] = 0
    torch.testing.assert_close(packed(weight, kernels)(rows), expected(rows, weight), rtol=1e-6, atol=1e-5)


def test_a_cpu_without_dot_products_adds_the_same_integers(kernels: Kernels) -> None:
    """Compiled for less: the results are those of the quickest instructions, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(80, 200, generator=generator), torch.randn(9, 200, generator=generator)
    product = packed(weight, kernels)(rows)
    for options in (("-mno-avx512f",), ("-mno-avx512f", "-mno-avx2", "-mfma")):
        lesser = load((*FLAGS, *options))
        if lesser is None:
            pytest.skip("this compiler builds for another kind of CPU")
        assert torch.equal(packed(weight, lesser)(rows), product)


def test_the_reference_layer_is_the_kernels(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(40, 130, generator=generator), torch.randn(40, generator=generator)
    linear = nn.Linear(130, 40)
    linear.weight.data, linear.bias.data = weight, bias
    rows = torch.randn(2, 7, 130, generator=generator)
    ours = packed(weight, kernels, bias)(rows)
    assert ours.shape == (2, 7, 40)
    with torch.inference_mode():
        torch.testing.assert_close(ours, ReferenceLinear(linear)(rows), rtol=1e-5, atol=1e-4)


def test_quantised_numbers_are_near_and_use_all_bits() -> None:
    rows = torch.randn(50, 640, generator=torch.Generator().manual_seed(2))
    numbers, scales = quantize_groups(rows)
    assert numbers.shape == (50, 640 // GROUP, GROUP)
    assert (numbers.abs().amax(-1) == 127).all()
    assert ((numbers * scales).flatten(1) - rows).abs().le(scales.repeat_interleave(GROUP, -1).flatten(1) * 0.501).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_depends_on_no_other(kernels: Kernels, threads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = packed(torch.randn(176, 320, generator=generator), kernels)
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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_spoils_itself_only(kernels: Kernels, value: float) -> None:
    generator = torch.Generator().manual_seed(4)
    layer = packed(torch.randn(32, 128, generator=generator), kernels)
    rows = torch.randn(5, 128, generator=generator)
    good = layer(rows)
    rows[2, 70] = value
    found = layer(rows)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], good[others])
    numbers, scales = quantize_groups(rows)
    assert scales[2, 1].isnan()
    assert numbers.isfinite().all()


def test_no_rows_at_all(kernels: Kernels) -> None:
    assert packed(torch.randn(8, 16), kernels)(torch.empty(1, 0, 16)).shape == (1, 0, 8)


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


@pytest.mark.parametrize("keys", [16, 12])
def test_siblings_that_fit_share_memory_and_give_their_own_products(kernels: Kernels, keys: int) -> None:
    torch.manual_seed(0)
    block = Block(keys=keys).requires_grad_(False)
    alone = {
        name: packed(child.weight, kernels, child.bias) for name, child in block.named_children() if name != "norm"
    }
    speed_up_linears(block)
    assert quantize(block, kernels) == 6
    assert isinstance(block.norm, nn.LayerNorm)
    rows = torch.randn(3, 32)
    for name, layer in alone.items():
        x = torch.randn(3, 48) if name == "down_proj" else rows
        assert torch.equal(block.get_submodule(name)(x), layer(x))
    assert (block.q_proj.packed is block.v_proj.packed) == (keys == 16)
    assert block.gate_proj.packed is block.up_proj.packed
    assert block.down_proj.packed is not block.up_proj.packed


def test_only_float32_on_the_cpu_is_quantised() -> None:
    model = nn.ModuleDict(
        {
            "bfloat16_": nn.Linear(4, 4, dtype=torch.bfloat16),
            "elsewhere": nn.Linear(4, 4, device="meta"),
            "x": nn.Linear(4, 4),
        }
    )
    assert quantize(model, None) == 1
    assert type(model["x"]) is ReferenceLinear
