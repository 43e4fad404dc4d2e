"""From token ids to logits in one call of a kernel.

Where decoder layers are one call, what is around them takes longer than it computes: on the way through a
transformers model a step of one token spends a millisecond in Python, and holds the interpreter meanwhile.  A model
that is nothing but embeddings, fused layers, a norm and a head is therefore computed without its forward.  As with
the layers, the pattern is looked for and then proved: some tokens go through the model's own forward, and what
each part takes and gives must be what the parts before it gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trio_llm.core.attention import LAYER_ATTRIBUTE
from trio_llm.core.fusion import TOLERANCE, FusedLayer, LayerRun, rms_epsilon
from trio_llm.core.kernels import Model
from trio_llm.core.packing import PackedLinear
from trio_llm.core.page_attention import PageBackend, PageLayer

MIN_POSITIONS = 2048
"""Positions whose rotation is computed at the first; from then on twice as many whenever they are too few."""

NORM_TOLERANCE = 1e-5
"""Largest difference from a model's own norm, relative to the most that it gives: that of two orders of a sum."""


class WholeModel:
    """A model that is computed without its forward; made by `find_whole`.

    Args:
        run: all of its layers.
        embeddings: (vocab, width), float32.
        rotary: gives the rotation (cosines, sines) of positions, as transformers' modules do.
        norm: what comes after the layers.
        head: what comes after the norm.
    """

    def __init__(self, run: LayerRun, embeddings: Tensor, rotary: nn.Module, norm: nn.Module, head: PackedLinear):
        self._run = run
        self._embeddings = embeddings
        self._rotary = rotary
        self._norm_weights = norm.get_parameter("weight")
        epsilon = rms_epsilon(norm)
        assert epsilon is not None
        self._head = head
        self._cosines, self._sines = self._rotations(0, MIN_POSITIONS)
        self._model = Model(
            embeddings=embeddings.data_ptr(),
            rotary_dim=self._cosines.shape[-1],
            cosines=self._cosines.data_ptr(),
            sines=self._sines.data_ptr(),
            norm_weights=self._norm_weights.data_ptr(),
            eps=epsilon,
            head=head.layer,
        )

    def forward(self, backend: PageBackend, token_ids: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """Compute the tokens of the step that the backend has begun.

        Args:
            wanted: indices into them.

        Returns:
            Logits (len(wanted), vocab), float32.

        Raises:
            IndexError: a token has no embedding.
            RuntimeError: the model's pages are another backend's.
        """
        pages: PageLayer = getattr(self._run.layers[0].self_attn, LAYER_ATTRIBUTE)
        if pages.backend is not backend:  # whose blocks are not ours: out of bounds is no error in C++
            raise RuntimeError("the model has the pages of another engine, which was opened on it later")
        if not 0 <= min(token_ids) <= max(token_ids) < len(self._embeddings):
            raise IndexError(f"a token id is not one of {len(self._embeddings)}")
        self._cover(backend.num_positions)
        layers = self._run.over(pages)
        self._model.layers, self._model.num_layers = layers, len(layers)
        return backend.kernels.forward(self._model, backend.spans, token_ids, wanted)

    def _cover(self, num_positions: int) -> None:
        have = len(self._cosines)
        if num_positions <= have:
            return
        more = self._rotations(have, 1 << (num_positions - 1).bit_length())
        self._cosines, self._sines = (torch.cat(pair) for pair in zip((self._cosines, self._sines), more, strict=True))
        self._model.cosines, self._model.sines = self._cosines.data_ptr(), self._sines.data_ptr()

    def _rotations(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (positions, rotary_dim)."""
        positions = torch.arange(begin, end, device="cpu")
        cosines, sines = self._rotary(self._embeddings[:1], positions[None])
        return cosines[0].contiguous(), sines[0].contiguous()

    def rotates_like(self, rotation: tuple[Tensor, Tensor]) -> bool:
        """Whether a model's own rotation (1, tokens, rotary_dim), of positions from the first on, is the one used here."""
        ours = self._cosines, self._sines
        return all(torch.equal(own[0], our[: own.shape[1]]) for own, our in zip(rotation, ours, strict=True))

    def norms_like(self, given: Tensor, made: Tensor) -> bool:
        """Whether a norm that made this of that, (1, tokens, width), is the kernel's."""
        ours = functional.rms_norm(given, self._norm_weights.shape, self._norm_weights, self._model.eps)
        return bool((ours - made).abs().max() <= NORM_TOLERANCE * made.abs().max())


def find_whole(
    model: Any, backend: PageBackend, token_ids: Sequence[int], forward: Callable[[], Tensor]
) -> WholeModel | None:
    """Look whether a model, its layers fused, can be computed as a whole; None if not.

    Args:
        model: a transformers model.
        token_ids: of a sequence from its first token on.
        forward: runs them through the model and gives the logits of all, (len(token_ids), vocab).
    """
    if not _has_pattern(model):
        return None
    base, head = model.base_model, model.get_output_embeddings()
    seen: dict[str, Any] = {}

    def note(name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen[name] = args, kwargs, output

        return module.register_forward_hook(hook, with_kwargs=True)

    watched = {
        "rotary": base.rotary_emb,
        "first": base.layers[0],
        "last": base.layers[-1],
        "norm": base.norm,
        "head": head,
    }
    hooks = [note(name, module) for name, module in watched.items()]
    try:
        logits = forward()
    finally:
        for hook in hooks:
            hook.remove()
    if seen.keys() != watched.keys():
        return None
    args, kwargs, _ = seen["rotary"]
    if len(args) + len(kwargs) != 2 or not kwargs.keys() <= {"position_ids"}:
        return None  # it goes by more than positions
    takes: dict[str, Any] = {name: args[0] if args else None for name, (args, _, _) in seen.items()}
    gives = {name: output for name, (_, _, output) in seen.items()}
    embedded = base.embed_tokens.weight[list(token_ids)]
    handed_on = (
        (embedded, takes["first"]),
        (gives["last"], takes["norm"]),
        (gives["norm"], takes["head"]),
        (gives["head"], logits),
    )
    if not all(_same(given, taken) for given, taken in handed_on):
        return None
    whole = WholeModel(base.layers[0].run, base.embed_tokens.weight, base.rotary_emb, base.norm, head)
    if not whole.rotates_like(seen["first"][1]["position_embeddings"]) or not whole.norms_like(
        takes["norm"], gives["norm"]
    ):
        return None
    error = whole.forward(backend, token_ids, range(len(token_ids))) - logits
    return whole if error.abs().max() <= TOLERANCE * logits.abs().max() else None


def _same(given: object, taken: object) -> bool:
    """The same numbers in the same order, whatever their shapes."""
    if not isinstance(given, Tensor) or not isinstance(taken, Tensor):
        return False
    return given.numel() == taken.numel() and torch.equal(given.reshape_as(taken), taken)


def _has_pattern(model: Any) -> bool:
    """By the names that transformers gives a model's parts."""
    parts = dict(model.base_model.named_children())
    if parts.keys() != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    layers = list(parts["layers"])
    if not all(isinstance(layer, FusedLayer) and layer.run is layers[0].run for layer in layers):
        return False
    weight = getattr(parts["embed_tokens"], "weight", None)
    return (
        len(layers[0].run.layers) == len(layers)
        and isinstance(model.get_output_embeddings(), PackedLinear)
        and isinstance(weight, Tensor)
        and weight.dtype is torch.float32
        and weight.is_contiguous()
        and rms_epsilon(parts["norm"]) is not None
    )
