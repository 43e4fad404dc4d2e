"""Attention by our own kernels: pages are read in place, all sequences of a step in one call a layer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor, nn

from trio_llm.core.attention import Layer, LayerSpec, Options, SequenceSpan
from trio_llm.core.kernels import Attention, Kernels, Pages, Spans

NUMBERS_PER_WORD = {torch.float32: 1, torch.bfloat16: 2}
"""Neighbours that lie in one word of 32 bits, by the number format of the pages."""


class PageBackend:
    """An AttentionBackend for float32 models on CPUs, with keys and values in float32 or bfloat16.

    Pages are head-major, keys (block, head, dim, token) and values (block, head, token, dim), so
    that what one head reads lies together; in bfloat16 two neighbours, of dim in keys and of tokens
    in values, share a word, as dot products of bfloat16 want them.  Queries and the weights of the
    values are then rounded as well, and sums are made in float32.  The result of a query depends on nothing but its own
    sequence, bit for bit: neither on its neighbours nor on how the sequence was cut in chunks.
    """

    def __init__(self, kernels: Kernels, block_size: int = 16) -> None:
        self.kernels = kernels
        self.block_size = block_size
        self.spans = Spans()
        self.num_positions = 0
        """One more than the last position of the step."""
        self._numbers = array("q")  # what `spans` points to
        self._pages: list[Tensor] = []

    def allocate(self, specs: Sequence[LayerSpec], num_blocks: int, dtype: torch.dtype) -> list[Layer]:
        if dtype not in NUMBERS_PER_WORD:
            raise TypeError(f"the kernels keep keys and values in float32 or bfloat16, not {dtype}")
        together = NUMBERS_PER_WORD[dtype]
        if any(size % together for spec in specs for size in (spec.key_dim, spec.value_dim, self.block_size)):
            raise ValueError(f"keys and values in {dtype} need an even block_size and even heads")
        self._pages = []
        layers: list[Layer] = []
        for spec in specs:
            keys, values = (
                # empty, not zeros: memory that is never written is never touched
                torch.empty(
                    (num_blocks, spec.num_kv_heads, rows // together, columns, together), dtype=dtype, device="cpu"
                )
                for rows, columns in ((spec.key_dim, self.block_size), (self.block_size, spec.value_dim))
            )
            self._pages += [keys, values]
            layers.append(
                PageLayer(
                    self,
                    Pages(
                        keys.data_ptr(),
                        values.data_ptr(),
                        spec.num_kv_heads,
                        spec.key_dim,
                        spec.value_dim,
                        self.block_size,
                        together,
                    ),
                )
            )
        return layers

    def begin_step(self, spans: Sequence[SequenceSpan]) -> None:
        count = len(spans)
        lengths = [span.length for span in spans]
        offsets, tables = [0] * count, [0] * count
        blocks: list[int] = []
        num_tokens = 0
        for index, span in enumerate(spans):
            offsets[index], tables[index] = num_tokens, len(blocks)
            num_tokens += span.length
            blocks += span.block_table
        self._numbers = array("q", [*offsets, *lengths, *(span.start for span in spans), *tables, *blocks])
        address, _ = self._numbers.buffer_info()
        self.num_positions = max(span.start + span.length for span in spans)
        self.spans = Spans(count, num_tokens, *(address + 8 * count * index for index in range(5)))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            sources, destinations = (torch.tensor(ids, device="cpu") for ids in zip(*pairs, strict=True))
            for pages in self._pages:
                pages[destinations] = pages[sources]


@attrs.define(eq=False)
class PageLayer:
    """One layer's pages."""

    backend: PageBackend
    pages: Pages
    how: Attention | None = None
    """How the model last wanted its attention computed."""
    _options: Options | None = None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        how = self._how(options, num_heads=query.shape[1])
        out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[-1]))
        self.backend.kernels.attend(self.pages, self.backend.spans, query[0], key[0], value[0], how, out)
        return out

    def _how(self, options: Options, num_heads: int) -> Attention:
        known = self._options
        if (
            self.how is None
            or known is None
            or known.sinks is not options.sinks
            or (known.scaling, known.sliding_window, known.softcap)
            != (options.scaling, options.sliding_window, options.softcap)
        ):
            self._options = options
            self.how = Attention(
                num_heads,
                self.pages.key_dim**-0.5 if options.scaling is None else options.scaling,
                options.softcap or 0.0,
                options.sliding_window or 0,
                None if options.sinks is None else options.sinks.data_ptr(),
            )
        return self.how
