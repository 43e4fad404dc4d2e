"""int8 layers: the kernel's product is that of the reference in torch, exactly where it is exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trio_llm.core.kernels import FLAGS, GROUP, Kernels, load
from trio_llm.core.quantization import ReferenceLinear, quantize, quantize_groups

from .packed import SHAPES, packed


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
    torch.testing.assert_close(packed(weight, kernels, torch.int8)(rows), expected(rows, weight), rtol=1e-6, atol=1e-5)


def test_a_cpu_without_dot_products_adds_the_same_integers(kernels: Kernels) -> None:
    """Compiled for less: the results are those of the quickest instructions, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(80, 200, generator=generator), torch.randn(9, 200, generator=generator)
    product = packed(weight, kernels, torch.int8)(rows)
    for options in (("-mno-avx512f",), ("-mno-avx512f", "-mno-avx2", "-mfma")):
        lesser = load((*FLAGS, *options))
        if lesser is None:
            pytest.skip("this compiler builds for another kind of CPU")
        assert torch.equal(packed(weight, lesser, torch.int8)(rows), product)


def test_the_reference_layer_is_the_kernels(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(40, 130, generator=generator), torch.randn(40, generator=generator)
    linear = nn.Linear(130, 40)
    linear.weight.data, linear.bias.data = weight, bias
    rows = torch.randn(2, 7, 130, generator=generator)
    ours = packed(weight, kernels, torch.int8, bias)(rows)
    assert ours.shape == (2, 7, 40)
    with torch.inference_mode():
        torch.testing.assert_close(ours, ReferenceLinear(linear)(rows), rtol=1e-5, atol=1e-4)


def test_quantised_numbers_are_near_and_use_all_bits() -> None:
    rows = torch.randn(50, 640, generator=torch.Generator().manual_seed(2))
    numbers, scales = quantize_groups(rows)
    assert numbers.shape == (50, 640 // GROUP, GROUP)
    assert (numbers.abs().amax(-1) == 127).all()
    assert ((numbers * scales).flatten(1) - rows).abs().le(scales.repeat_interleave(GROUP, -1).flatten(1) * 0.501).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_spoils_itself_only(kernels: Kernels, value: float) -> None:
    generator = torch.Generator().manual_seed(4)
    layer = packed(torch.randn(32, 128, generator=generator), kernels, torch.int8)
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
