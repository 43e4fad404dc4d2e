"""Linear layers whose weights are packed once for our kernels, in int8 or in float32.

Sixteen outputs lie side by side, which is what a vector multiplies at once.  Layers that read the same
input are packed together, so that they can be computed as one.  Nothing in a row's result depends on
other rows, in either format.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trio_llm.core.kernels import TILE, Kernels, Linear, tile_bytes
from trio_llm.core.linear import FewRowsLinear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that read the same input, by transformers' names: packed side by side, so that a kernel can
take them as one.  Gate and what it gates take turns, tile by tile."""


class PackedLinear(nn.Module):
    """A packed layer in place of an nn.Linear.

    Args:
        linear: what it replaces.
        dtype: int8 quantises the weight, and rows as they come; float32 takes both as they are.
        packed: tiles to put its weight into; shared with its siblings.
        first, step: every `step`-th tile from `first` on.
    """

    def __init__(
        self,
        linear: nn.Linear,
        kernels: Kernels,
        dtype: torch.dtype,
        packed: Tensor,
        first: int = 0,
        step: int = 1,
    ) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.kernels = kernels
        self.dtype = dtype
        self.register_buffer("packed", packed, persistent=False)
        self.layer: Linear = kernels.pack(linear.weight, dtype, packed, first=first, step=step)
        if self.bias is not None:
            self.layer.bias = self.bias.data_ptr()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        rows = input.reshape(-1, self.in_features).contiguous()
        return self.kernels.linear(self.layer, rows).view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"dtype={self.dtype}"
        )


def pack(model: nn.Module, kernels: Kernels, dtype: torch.dtype) -> int:
    """Replace the linear layers of a float32 model on the CPU by packed ones; gives how many.

    Args:
        dtype: int8 or float32.
    """
    count = 0
    for parent, linears in packable(model):
        for names in _families(linears):
            _pack_family(parent, names, kernels, dtype)
        count += len(linears)
    return count


def packable(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, nn.Linear]]]:
    """The linear layers of a model that are in float32 on the CPU, by their parents and names.

    They may be replaced meanwhile; no others are held, so that weights are not in memory twice.
    """
    for parent in [module for module in model.modules() if not isinstance(module, nn.Linear)]:
        linears = {
            name: child
            for name, child in parent.named_children()
            if isinstance(child, nn.Linear)
            and type(child) in {nn.Linear, FewRowsLinear}
            and child.weight.dtype is torch.float32
            and child.weight.device.type == "cpu"
        }
        if linears:
            yield parent, linears


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


def _pack_family(parent: nn.Module, names: tuple[str, ...], kernels: Kernels, dtype: torch.dtype) -> None:
    linears = [parent.get_submodule(name) for name in names]
    counts = [-(-int(linear.out_features) // TILE) for linear in linears]  # type: ignore[arg-type]
    inputs = int(linears[0].in_features)  # type: ignore[arg-type]
    packed = torch.empty((sum(counts), tile_bytes(inputs, dtype)), dtype=torch.uint8, device="cpu")
    takes_turns = names == SIBLINGS[1]
    for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
        first, step = (index, len(names)) if takes_turns else (sum(counts[:index]), 1)
        assert isinstance(linear, nn.Linear)
        setattr(parent, name, PackedLinear(linear, kernels, dtype, packed, first, step))
