"""Linear layers in int8: weights packed once, rows quantised as they come.

Weight and row alike are cut in groups of 64 along the inputs, and each group has a scale of
its own: its largest absolute value becomes 127.  A group's product is summed in integers,
exactly; the groups' products are then summed in float32, one after the other.  A large number
in a row therefore costs precision in its own group only, which is what makes int8 rows harmless
without smoothing; the loss is in docs/benchmarks.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trio_llm.core.kernels import GROUP, Kernels
from trio_llm.core.packing import PackedLinear, pack, packable


class ReferenceLinear(nn.Module):
    """The same arithmetic in plain torch, slowly: up to the order in which floats are summed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        numbers, scales = quantize_groups(linear.weight.float())
        self.register_buffer("weight", (numbers * scales).flatten(1), persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        numbers, scales = quantize_groups(input.reshape(-1, self.in_features))
        weight: Tensor = self.get_buffer("weight")
        return functional.linear((numbers * scales).flatten(1), weight, self.bias).view(
            *input.shape[:-1], self.out_features
        )


def quantize_groups(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, inputs) -> whole numbers from -127 to 127 (rows, groups, 64) as float32, and scales (rows, groups, 1).

    The last group is filled up with zeros.  A group that holds an infinity or a NaN has the scale NaN.
    """
    groups = functional.pad(rows, (0, -rows.shape[-1] % GROUP)).view(len(rows), -1, GROUP)
    most = groups.abs().amax(-1, keepdim=True)
    # not 127 / most, of which torch makes a product
    inverse = torch.where(most > 1e-30, torch.full_like(most, 127.0) / most, torch.zeros_like(most))
    finite = most.isfinite()
    numbers = torch.where(finite, (groups * inverse).round(), torch.zeros_like(groups))
    return numbers, torch.where(finite, most / 127.0, torch.full_like(most, torch.nan))


def quantize(model: nn.Module, kernels: Kernels | None) -> int:
    """Replace the linear layers of a float32 model on the CPU by int8 ones; gives how many.

    Args:
        kernels: None for plain torch, which is slower than no quantisation at all.
    """
    if kernels is not None:
        return pack(model, kernels, torch.int8)
    count = 0
    for parent, linears in packable(model):
        for name, linear in linears.items():
            setattr(parent, name, ReferenceLinear(linear))
        count += len(linears)
    return count


def is_quantized(model: nn.Module) -> bool:
    """Whether `quantize` has replaced anything in it."""
    return any(
        isinstance(module, ReferenceLinear) or (isinstance(module, PackedLinear) and module.dtype is torch.int8)
        for module in model.modules()
    )
