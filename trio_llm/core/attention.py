"""Paged attention: where keys and values live, how they are written and attended to.

transformers' models hand each layer's query, key and value to a function registered by
name in its AttentionInterface.  Ours finds the layer's share of the KV memory on the
attention module itself and the step's metadata in the AttentionBackend: which keyword
arguments a model forwards differs from model to model, its modules do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

IMPLEMENTATION = "trio_llm_paged"
"""Our name in transformers' AttentionInterface.  No mask function bears it, so that
transformers builds no mask."""

LAYER_ATTRIBUTE = "_trio_llm_layer"


@attrs.frozen
class LayerSpec:
    """What one attention layer caches for a token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None
    """Tokens a query sees, itself included; None for all."""
    is_plain: bool = True
    """Neither soft-capped scores nor sinks."""

    @property
    def numbers_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@attrs.frozen
class Options:
    """How a layer wants its attention computed."""

    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@attrs.frozen
class SequenceSpan:
    """A sequence's part of a step: tokens start to start + length of it are computed."""

    start: int
    length: int
    block_table: Sequence[int]
    """Covers at least start + length tokens."""


class Layer(Protocol):
    """What LAYER_ATTRIBUTE of an attention module holds."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """query (1, Hq, T, Dk), key (1, Hkv, T, Dk), value (1, Hkv, T, Dv) -> (1, T, Hq, Dv)"""


class AttentionBackend(Protocol):
    """Owns the layout of the KV memory and all that reads or writes it."""

    block_size: int

    def allocate(self, specs: Sequence[LayerSpec], num_blocks: int, dtype: torch.dtype) -> list[Layer]:
        """Make the KV memory; gives each layer's handle."""

    def begin_step(self, spans: Sequence[SequenceSpan]) -> None:
        """Announce whose tokens the next forward packs, in order."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) in every layer, before the step's writes."""


def bytes_per_block(specs: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in all layers together."""
    return block_size * dtype.itemsize * sum(spec.numbers_per_token for spec in specs)


@attrs.frozen
class _Reach:
    """The keys a span attends to: blocks to gather, which gathered tokens count, and a mask."""

    blocks: Tensor
    first: int
    """Gathered token of the first key."""
    num_keys: int
    causal: bool
    mask: Tensor | None
    """(T, num_keys), True where a query sees a key; None when all do, or when `causal` says it."""


class SdpaBackend:
    """Attention by torch's scaled_dot_product_attention, one call a sequence; any device.

    One call for each sequence needs no padding, and makes a sequence's result independent
    of its neighbours.  Pages are token-major, (block, token, head, key then value), so
    that one gather of whole blocks brings both keys and values.

    Args:
        device: of the pages.
        block_size: tokens in a page.
        one_by_one: attend with each token of a sequence by itself, as when decoding: its result then does not
            depend on which tokens are computed with it.
    """

    def __init__(self, device: torch.device, block_size: int = 16, *, one_by_one: bool = False) -> None:
        self.block_size = block_size
        self.one_by_one = one_by_one
        self.device = device
        self.spans: list[tuple[slice, SequenceSpan]] = []
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        self._pages: list[Tensor] = []
        self._reaches: dict[int | None, list[_Reach]] = {}

    def allocate(self, specs: Sequence[LayerSpec], num_blocks: int, dtype: torch.dtype) -> list[Layer]:
        # empty, not zeros: memory that is never written is never touched
        self._pages = [
            torch.empty(
                (num_blocks, self.block_size, spec.num_kv_heads, spec.key_dim + spec.value_dim),
                dtype=dtype,
                device=self.device,
            )
            for spec in specs
        ]
        return [SdpaLayer(self, pages, spec.key_dim) for pages, spec in zip(self._pages, specs, strict=True)]

    def begin_step(self, spans: Sequence[SequenceSpan]) -> None:
        self.spans = []
        self._reaches = {}
        slots: list[Tensor] = []
        offset = 0
        for span in spans:
            slots.append(self._slots(span))
            for part in _singles(span) if self.one_by_one else [span]:
                self.spans.append((slice(offset, offset + part.length), part))
                offset += part.length
        self.slots = torch.cat(slots).to(self.device)

    def _slots(self, span: SequenceSpan) -> Tensor:
        positions = torch.arange(span.start, span.start + span.length, dtype=torch.int64, device="cpu")
        table = torch.tensor(span.block_table, dtype=torch.int64, device="cpu")
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def reaches(self, window: int | None) -> list[_Reach]:
        """For each span of the step what it sees through `window`; made once a step."""
        if window not in self._reaches:
            self._reaches[window] = [self._reach(span, window) for _, span in self.spans]
        return self._reaches[window]

    def _reach(self, span: SequenceSpan, window: int | None) -> _Reach:
        end = span.start + span.length
        low = 0 if window is None else max(0, span.start - window + 1)
        first_block = low // self.block_size
        last_block = -(-end // self.block_size)
        blocks = torch.tensor(span.block_table[first_block:last_block], dtype=torch.int64, device=self.device)
        causal = span.length > 1 and span.start == 0 and (window is None or end <= window)
        mask = None
        if span.length > 1 and not causal:
            queries = torch.arange(span.start, end, device=self.device)[:, None]
            keys = torch.arange(low, end, device=self.device)
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
        return _Reach(blocks, low - first_block * self.block_size, end - low, causal, mask)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            sources, destinations = (torch.tensor(ids, device=self.device) for ids in zip(*pairs, strict=True))
            for pages in self._pages:
                pages[destinations] = pages[sources]


def _singles(span: SequenceSpan) -> list[SequenceSpan]:
    """A span for each of its tokens."""
    return [SequenceSpan(span.start + place, 1, span.block_table) for place in range(span.length)]


@attrs.define(eq=False)
class SdpaLayer:
    """One layer's pages."""

    backend: SdpaBackend
    pages: Tensor
    key_dim: int

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        count = len(self.backend.slots)
        written = torch.cat((key[0], value[0]), dim=-1).transpose(0, 1)[:count]
        self.pages.flatten(0, 1).index_copy_(0, self.backend.slots, written)
        _, num_heads, num_tokens, _ = query.shape
        out = query.new_empty((1, num_tokens, num_heads, value.shape[-1]))
        if count < num_tokens:
            out[:, count:] = 0  # what pads the step attends to nothing
        reaches = self.backend.reaches(options.sliding_window)
        for (tokens, _), reach in zip(self.backend.spans, reaches, strict=True):
            seen = self.pages.index_select(0, reach.blocks).flatten(0, 1)
            seen = seen[reach.first : reach.first + reach.num_keys].transpose(0, 1)[None]
            keys, values = seen[..., : self.key_dim], seen[..., self.key_dim :]
            attended = attention(query[:, :, tokens], keys, values, reach.mask, causal=reach.causal, options=options)
            out[:, tokens] = attended.transpose(1, 2)
        return out


def attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, causal: bool, options: Options
) -> Tensor:
    """Grouped-query attention of one sequence.

    Args:
        query: (1, Hq, T, Dk)
        keys, values: (1, Hkv, S, Dk) and (1, Hkv, S, Dv)
        mask: (T, S), True where a query sees a key; None for all.
        causal: T equals S and each query sees what stands before it.

    Returns:
        (1, Hq, T, Dv)
    """
    if options.softcap is not None or options.sinks is not None:
        return _explicit_attention(query, keys, values, mask, causal=causal, options=options)
    _, num_heads, num_queries, _ = query.shape
    num_kv_heads = keys.shape[1]
    if num_queries == 1:
        # one query a head: the heads of a group become queries, which torch's CPU kernel likes ten times better
        grouped = query.view(1, num_kv_heads, num_heads // num_kv_heads, -1)
        out = functional.scaled_dot_product_attention(grouped, keys, values, scale=options.scaling)
        return out.reshape(1, num_heads, 1, -1)
    return functional.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=options.scaling,
        enable_gqa=num_kv_heads != num_heads,
    )


def _explicit_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, causal: bool, options: Options
) -> Tensor:
    """Written out, for what SDPA lacks: soft-capped scores and attention sinks."""
    _, num_heads, num_queries, key_dim = query.shape
    groups = num_heads // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    scores = query @ keys.transpose(-1, -2) * (options.scaling if options.scaling is not None else key_dim**-0.5)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        # a sink is a score without a value: it takes probability and gives nothing
        sinks = options.sinks.to(scores.dtype).view(1, num_heads, 1, 1).expand(1, num_heads, num_queries, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
    return weights[..., : keys.shape[2]] @ values


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers' models call in place of their own attention."""
    layer: Layer = getattr(module, LAYER_ATTRIBUTE)
    return layer.attend(module, query, key, value, Options(scaling, sliding_window, softcap, s_aux)), None


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention)
