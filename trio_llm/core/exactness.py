"""Whether a token's logits depend, to the last bit, on who else is in the step.

In exact arithmetic they would not.  In floating point they may: a matrix product sums in
another order for three rows than for thirty.  That is never assumed, in either direction, but
looked at when a model is loaded, on the modules that will run and at the threads that are set.
What follows from it for requests is in docs/exactness.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trio_llm.core.attention import SequenceSpan
from trio_llm.core.model import PagedModel, SpanInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROW_MULTIPLE = 16
"""Rows of a deterministic model are padded to a multiple of this.  Products of twelve and more rows
were found to sum alike, and with sixteen the vectors of elementwise operations leave no rest."""

MAX_ROWS = 64
"""Up to this many rows, every number of them is tried in a layer."""

FEW_ROW_COUNTS = (1, 2, 3, 4, 5, 8, 11, 12, 16, 17, 32, 33, 48)
"""What is tried of large layers: around the sizes at which matrix products change their ways."""

LARGE = 2**22
"""Weights of a large layer."""

BATCH_SIZES = (2, 5, 17)
"""Sequences that are tried together in the whole model."""


def use_deterministic_experts(model: PreTrainedModel) -> None:
    """Have each token multiplied with its own experts' weights, if the model has experts: other ways of computing
    them sort the tokens of a step by expert, and so make products of many shapes."""
    if hasattr(model.config.get_text_config(), "_experts_implementation"):
        model.set_experts_implementation("batched_mm")


def batch_dependence(model: PagedModel, *, num_blocks: int, max_rows: int) -> str | None:
    """Look for something that makes a row's result depend on the number of rows, on their content or on its place.

    Args:
        model: as it will run, after all changes to its layers.  Writes into its blocks.
        num_blocks: how many of them there are.
        max_rows: tokens of the largest step.

    Returns:
        What was found, or None: as far as was tried, a row's bits are its own.
    """
    with torch.inference_mode():
        return _layer_dependence(model, max_rows) or _model_dependence(model, num_blocks)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """The modules that multiply rows with a weight, whatever their class: name, module, numbers in a row."""
    for name, module in model.named_modules():
        # transformers' Conv1D, of which GPT-2 is made, calls its sizes nx and nf
        width = getattr(module, "in_features", getattr(module, "nx", None))
        if isinstance(width, int) and not any(True for _ in module.children()):
            yield name, module, width


def _layer_dependence(model: PagedModel, max_rows: int) -> str | None:
    seen: set[object] = set()
    layers = []
    for name, layer, width in linear_layers(model.model):
        height = int(getattr(layer, "out_features", getattr(layer, "nf", 0)))
        kind = type(layer), width, height
        if kind not in seen:
            seen.add(kind)
            layers.append((width * height, width, name, layer))
    # the small ones first: where the answer is no, it mostly comes at once
    for size, width, name, layer in sorted(layers, key=lambda entry: entry[:3]):
        tried = range(1, MAX_ROWS) if size < LARGE else FEW_ROW_COUNTS
        counts = [count for count in tried if count % model.row_multiple == 0]
        # as many logits as tokens are never made
        most = MAX_ROWS if size // width >= model.vocab_size else max(max_rows, MAX_ROWS)
        rows = _rows(most, width).to(model.device, model.dtype)
        if (count := _dependent_count(layer, rows, counts)) is not None:
            return f"{type(layer).__name__} {name} computes {count} rows differently than {MAX_ROWS}"
    return None


def _rows(count: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((count, width), generator=generator, dtype=torch.float32, device="cpu")
    # one row is far larger than the others: a layer that scales all by the largest shows it
    rows[MAX_ROWS // 2] *= 100
    return rows


def _dependent_count(layer: nn.Module, rows: Tensor, counts: Iterable[int]) -> int | None:
    """A number of rows with which the layer gives a row something else than with MAX_ROWS."""
    some = rows[:MAX_ROWS]
    together = layer(some)
    if not torch.equal(layer(some.roll(1, 0)).roll(-1, 0), together):
        return MAX_ROWS
    for count in counts:
        for part in (slice(count), slice(MAX_ROWS - count, MAX_ROWS)):
            if not torch.equal(layer(some[part]), together[part]):
                return count
    if not torch.equal(layer(rows)[:MAX_ROWS], together):
        return len(rows)
    return None


def _model_dependence(model: PagedModel, num_blocks: int) -> str | None:
    """Decode a token alone and among others."""
    size = model.backend.block_size
    length = min(size, 8) - 1
    token_ids = [(7 * position + 3) % min(model.vocab_size, 1000) for position in range(max(size, BATCH_SIZES[-1]))]
    if length:
        model.forward([SpanInput(token_ids[:length], SequenceSpan(0, length, [0]))], [0])
    own = SpanInput([token_ids[length]], SequenceSpan(length, 1, [0]))
    alone = model.forward([own], [0])[0]
    for count in BATCH_SIZES:
        if count <= num_blocks:
            others = [SpanInput([token_ids[i]], SequenceSpan(0, 1, [i])) for i in range(1, count)]
            if not torch.equal(model.forward([*others, own], range(count))[-1], alone):
                return f"the model computes {count} tokens differently than one"
    if num_blocks > 1:
        prompt = SpanInput(token_ids[:size], SequenceSpan(0, size, [1]))
        if not torch.equal(model.forward([own, prompt], [0, size])[0], alone):
            return "the model computes a token beside a prompt differently than alone"
    return None
