"""All decoder layers in one call of a kernel.

A step of one sequence makes some thirty small torch operations a layer, which take longer than
its arithmetic.  Layers of the usual pattern (norm, attention with rotary embeddings, add, norm,
gated SiLU, add), whichever model they belong to, are therefore computed by one function, those
that follow each other in one call.  The pattern is looked for in a layer's submodules and then
proved: some tokens go through the layer's own forward and through ours, and a layer where the two
differ stays as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from trio_llm.core.attention import IMPLEMENTATION, LAYER_ATTRIBUTE
from trio_llm.core.kernels import TILE, Decoder, Linear
from trio_llm.core.packing import SIBLINGS, PackedLinear
from trio_llm.core.page_attention import PageLayer

TOLERANCE = 2e-2
"""Largest difference from a layer's own forward, relative to the most that it adds: a number of a row
that is rounded the other way moves its product by as much as half a percent."""


@attrs.define(eq=False)
class LayerRun:
    """Layers that follow each other, each reading what the one before gave."""

    layers: Sequence[nn.Module]
    decoders: Sequence[Decoder]
    kept: Sequence[Tensor]
    """What the decoders point to."""
    is_ours: bool = False
    """Whether the forward that goes on has computed all layers at the first."""
    _array: ctypes.Array[Decoder] | None = None
    _first_pages: PageLayer | None = None

    def forward(self, first: PageLayer, hidden_states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """All layers, given the first one's pages."""
        return first.backend.kernels.decoders(self.over(first), first.backend.spans, hidden_states, *rotation)

    def over(self, first: PageLayer) -> ctypes.Array[Decoder]:
        """What the kernels must know of all layers, given the first one's pages."""
        if self._array is None or first is not self._first_pages:  # all pages are allocated together
            for layer, decoder in zip(self.layers, self.decoders, strict=True):
                decoder.pages = getattr(layer.self_attn, LAYER_ATTRIBUTE).pages
            self._array, self._first_pages = (Decoder * len(self.decoders))(*self.decoders), first
        return self._array


class FusedLayer:
    """Stands before a decoder layer's own class; made by changing a layer's class.

    The first of a run computes all of it, the others hand on.  Where attention is not ours, as in
    a part of PagedModel's probe, each is the layer's own forward.
    """

    run: LayerRun
    is_first: bool

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = self.run
        if self.is_first:
            attention: Any = self.self_attn  # type: ignore[attr-defined]
            pages: Any = getattr(attention, LAYER_ATTRIBUTE, None)
            run.is_ours = isinstance(pages, PageLayer) and attention.config._attn_implementation == IMPLEMENTATION
            if run.is_ours:
                return run.forward(pages, hidden_states, kwargs["position_embeddings"])
        elif run.is_ours:
            return hidden_states
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


def fuse(model: nn.Module, forward: Callable[[], object]) -> int:
    """Change the layers of a model that have the pattern and are proved right; gives how many.

    Args:
        forward: runs a few tokens through the model, over the pages of a PageBackend.
    """
    runs: list[LayerRun] = []
    last: list[Any] = [None, None]  # what the last of them gave, and the rotation that it took

    def prove(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], own: Any) -> None:
        rotation = kwargs.get("position_embeddings")
        if not (args and isinstance(own, Tensor) and isinstance(rotation, tuple)):
            return
        decoder, kept = found[layer]
        pages: PageLayer = getattr(layer.self_attn, LAYER_ATTRIBUTE)
        assert pages.how is not None, "the layer's own forward has just told it"
        decoder.rotary_dim, decoder.attention = rotation[0].shape[-1], pages.how
        alone = LayerRun([layer], [decoder], kept)
        added, error = own - args[0], alone.forward(pages, args[0], rotation) - own
        if not error.abs().max() <= TOLERANCE * added.abs().max():
            return
        if runs and last[0] is args[0] and last[1] is rotation:
            before = runs.pop()
            alone = LayerRun([*before.layers, layer], [*before.decoders, decoder], [*before.kept, *kept])
        runs.append(alone)
        last[:] = own, rotation

    found = {layer: decoder for layer in model.modules() if (decoder := _decoder(layer)) is not None}
    if not found:
        return 0
    hooks = [layer.register_forward_hook(prove, with_kwargs=True) for layer in found]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    for run in runs:
        for index, layer in enumerate(run.layers):
            changed: Any = layer
            changed.run, changed.is_first = run, index == 0
            changed.__class__ = type(f"Fused{type(layer).__name__}", (FusedLayer, type(layer)), {})
            changed.__class__.forward = FusedLayer.forward  # not as transformers wraps it, for training
    return sum(len(run.layers) for run in runs)


def _decoder(layer: nn.Module) -> tuple[Decoder, list[Tensor]] | None:
    """What the kernel must know of a layer, with what that points to; None if it has not the pattern."""
    parts = dict(layer.named_children())
    pattern = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if isinstance(layer, FusedLayer) or parts.keys() != pattern:
        return None
    attention, mlp = dict(parts["self_attn"].named_children()), dict(parts["mlp"].named_children())
    head_norms = [attention.pop(name) for name in ("q_norm", "k_norm") if name in attention]
    norms = [parts["input_layernorm"], parts["post_attention_layernorm"], *head_norms]
    pages = getattr(parts["self_attn"], LAYER_ATTRIBUTE, None)
    if (
        attention.keys() != {"q_proj", "k_proj", "v_proj", "o_proj"}
        or mlp.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}
        or type(mlp["act_fn"]).__name__ not in {"SiLUActivation", "SiLU"}
        or len(head_norms) == 1
        or any(rms_epsilon(norm) is None for norm in norms)
        or not isinstance(pages, PageLayer)
    ):
        return None
    weights = [norm.get_parameter("weight") for norm in norms]
    if any(weight.numel() != pages.pages.key_dim for weight in weights[2:]):
        return None
    kept: list[Tensor] = [*weights]
    projections = _joined([attention[name] for name in SIBLINGS[0]], kept)
    gate_up = _joined([mlp[name] for name in SIBLINGS[1]], kept)
    output, down = attention["o_proj"], mlp["down_proj"]
    if (
        projections is None
        or gate_up is None
        or not isinstance(output, PackedLinear)
        or not isinstance(down, PackedLinear)
    ):
        return None
    decoder = Decoder(
        norm_weights=weights[0].data_ptr(),
        next_norm_weights=weights[1].data_ptr(),
        eps=rms_epsilon(norms[0]),
        next_eps=rms_epsilon(norms[1]),
        projections=projections,
        output=output.layer,
        gate_up=gate_up,
        down=down.layer,
    )
    if head_norms:
        decoder.query_norm, decoder.key_norm = (weight.data_ptr() for weight in weights[2:])
        decoder.head_eps = rms_epsilon(head_norms[0])
    return decoder, kept


def rms_epsilon(norm: nn.Module) -> float | None:
    """Of an RMS norm; None if it is none."""
    weight = getattr(norm, "weight", None)
    if not type(norm).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _joined(linears: Sequence[nn.Module], kept: list[Tensor]) -> Linear | None:
    """Siblings as the one layer that they are in memory; None if they are not."""
    if not all(isinstance(linear, PackedLinear) for linear in linears):
        return None
    siblings: list[Any] = list(linears)
    if any(linear.packed is not siblings[0].packed for linear in siblings) or siblings[0].out_features % TILE:
        return None
    outputs = sum(linear.out_features for linear in siblings)
    joined = Linear(siblings[0].layer.tiles, None, siblings[0].in_features, outputs, 1, siblings[0].layer.in_floats)
    if any(linear.bias is not None for linear in siblings):
        biases = [
            torch.zeros(linear.out_features, dtype=torch.float32, device="cpu") if linear.bias is None else linear.bias
            for linear in siblings
        ]
        if siblings[0].layer.step > 1:  # tile by tile, as they are packed
            bias = torch.stack([bias.view(-1, TILE) for bias in biases], dim=1).flatten()
        else:
            bias = torch.cat(biases)
        kept.append(bias)
        joined.bias = bias.data_ptr()
    return joined
