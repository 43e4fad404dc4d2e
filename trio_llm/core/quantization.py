"""Linear layers in int8: weights packed once, rows quantised as they come.

Weight and row alike are cut in groups of 64 along the inputs, and each group has a scale of
its own: its largest absolute value becomes 127.  A group's product is summed in integers,
exactly; the groups' products are then summed in float32, one after the other.  A large number
in a row therefore costs precision in its own group only, which is what makes int8 rows harmless
without smoothing; the loss is in docs/benchmarks.md.  Nothing in a row's result depends on
other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trio_llm.core.kernels import GROUP, TILE, Kernels, Linear, tile_bytes
from trio_llm.core.linear import FewRowsLinear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that read the same input, by transformers' names: packed side by side, so that a kernel can
take them as one.  Gate and what it gates take turns, tile by tile."""


class QuantizedLinear(nn.Module):
    """An int8 layer in place of an nn.Linear.

    Args:
        linear: what it replaces.
        packed: tiles to quantise its weight into; shared with its siblings.
        first, step: every `step`-th tile from `first` on.
    """

    def __init__(self, linear: nn.Linear, kernels: Kernels, packed: Tensor, first: int = 0, step: int = 1) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.kernels = kernels
        self.register_buffer("packed", packed, persistent=False)
        self.layer: Linear = kernels.pack(linear.weight, packed, first=first, step=step)
        if self.bias is not None:
            self.layer.bias = self.bias.data_ptr()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        rows = input.reshape(-1, self.in_features).contiguous()
        return self.kernels.linear(self.layer, rows).view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


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
    count = 0
    for parent in list(model.modules()):
        linears = {
            name: child
            for name, child in parent.named_children()
            if isinstance(child, nn.Linear) and _can_quantize(child)
        }
        if kernels is None:
            for name, linear in linears.items():
                setattr(parent, name, ReferenceLinear(linear))
        else:
            for names in _families(linears):
                _pack_family(parent, names, kernels)
        count += len(linears)
    return count


def is_quantized(model: nn.Module) -> bool:
    """Whether `quantize` has replaced anything in it."""
    return any(isinstance(module, QuantizedLinear | ReferenceLinear) for module in model.modules())


def _can_quantize(module: nn.Linear) -> bool:
    return (
        type(module) in {nn.Linear, FewRowsLinear}
        and module.weight.dtype is torch.float32
        and module.weight.device.type == "cpu"
    )


def _families(linears: dict[str, nn.Linear]) -> list[tuple[str, ...]]:
    """The names in groups whose members lie side by side in memory."""
    families = [
        names
        for names in SIBLINGS
        if linears.keys() >= set(names)
        and len({linears[name].in_features for name in names}) == 1
        and all(linears[name].out_features % TILE == 0 for name in names)
        and (len(names) == 3 or len({linears[name].out_features for name in names}) == 1)
    ]
    grouped = {name for names in families for name in names}
    return [*families, *((name,) for name in linears if name not in grouped)]


def _pack_family(parent: nn.Module, names: tuple[str, ...], kernels: Kernels) -> None:
    linears = [parent.get_submodule(name) for name in names]
    counts = [-(-int(linear.out_features) // TILE) for linear in linears]  # type: ignore[arg-type]
    inputs = int(linears[0].in_features)  # type: ignore[arg-type]
    packed = torch.empty((sum(counts), tile_bytes(inputs)), dtype=torch.uint8, device="cpu")
    takes_turns = names == SIBLINGS[1]
    for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
        first, step = (index, len(names)) if takes_turns else (sum(counts[:index]), 1)
        assert isinstance(linear, nn.Linear)
        setattr(parent, name, QuantizedLinear(linear, kernels, packed, first, step))
