"""Paged attention on CUDA by torch's variable-length kernel: one call a layer, whatever the batch.

`torch.nn.attention.varlen.varlen_attn` reads the pages in place through block tables.  It is
called with `num_splits=1`: without it a sequence's result would depend on its neighbours, and
rows of a paged batch could stay unwritten (pytorch issue 194167).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from trio_llm.core.attention import Layer, LayerSpec, Options, SequenceSpan

BLOCK_SIZE = 256
"""The kernel that torch brings (FlashAttention 2) wants pages of a multiple of this."""

MAX_HEAD_DIM = 256


MIN_CAPABILITY = (8, 0)
"""Of GPUs: Ampere's."""


def has_kernel(device: torch.device) -> bool:
    """Whether torch brings the kernel for a device: an NVIDIA GPU that is new enough."""
    # what ROCm calls cuda knows no num_splits
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def can_attend(specs: Sequence[LayerSpec], dtype: torch.dtype) -> bool:
    """Whether the kernel computes these layers: 16-bit numbers, keys as wide as values, plain scores."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    return all(
        spec.is_plain and spec.key_dim == spec.value_dim <= MAX_HEAD_DIM and spec.key_dim % 8 == 0 for spec in specs
    )


@attrs.frozen
class StepTensors:
    """What the kernel must know of a step, on the device; N sequences, T tokens."""

    slots: Tensor
    """(T,), int64: where each token's key and value are written, in tokens from the first page on."""
    cu_seq_q: Tensor
    """(N + 1,), int32: where each sequence's tokens begin and end in the packed ones."""
    seqused_k: Tensor
    """(N,), int32: tokens of each sequence that are seen, those of the step included."""
    block_table: Tensor
    """(N, P), int32; what stands behind a sequence's own blocks is never read."""
    max_q: int
    max_k: int


class VarlenBackend:
    """An AttentionBackend on CUDA.  Pages are token-major, keys and values apart: (block, token, head, dim).

    One block more than was asked for is kept: what pads a batch to the size of a captured graph writes there.
    """

    def __init__(self, device: torch.device, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        self.device = device
        self.null_block = 0
        self.step: StepTensors | None = None
        self._pages: list[Tensor] = []

    def allocate(self, specs: Sequence[LayerSpec], num_blocks: int, dtype: torch.dtype) -> list[Layer]:
        self.null_block = num_blocks
        layers: list[Layer] = []
        self._pages = []
        for spec in specs:
            shape = (num_blocks + 1, self.block_size, spec.num_kv_heads, spec.key_dim)
            keys, values = (torch.empty(shape, dtype=dtype, device=self.device) for _ in range(2))
            # padding reads the spare block: a NaN in it would be a NaN in a row that nobody looks at, and cost time
            keys[num_blocks].zero_()
            values[num_blocks].zero_()
            self._pages += [keys, values]
            layers.append(VarlenLayer(self, keys, values))
        return layers

    def begin_step(self, spans: Sequence[SequenceSpan]) -> None:
        self.step = self.step_tensors(spans)

    def step_tensors(self, spans: Sequence[SequenceSpan]) -> StepTensors:
        """Metadata of a step in one transfer."""
        num_pages = [-(-(span.start + span.length) // self.block_size) for span in spans]
        width = max(num_pages)
        cu_seq_q, used, slots, tables = [0], [], [], []
        for span, count in zip(spans, num_pages, strict=True):
            end = span.start + span.length
            cu_seq_q.append(cu_seq_q[-1] + span.length)
            used.append(end)
            slots += [
                span.block_table[position // self.block_size] * self.block_size + position % self.block_size
                for position in range(span.start, end)
            ]
            tables += [*span.block_table[:count], *[self.null_block] * (width - count)]
        sizes = [len(slots), len(cu_seq_q), len(used), len(tables)]
        packed = to_device([*slots, *cu_seq_q, *used, *tables], torch.int64, self.device)
        slot_tensor, *rest = torch.split(packed, sizes)
        cu, seqused, table = (part.to(torch.int32) for part in rest)
        return StepTensors(
            slot_tensor,
            cu,
            seqused,
            table.view(len(spans), width),
            max_q=max(span.length for span in spans),
            max_k=max(used),
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            sources, destinations = (to_device(list(ids), torch.int64, self.device) for ids in zip(*pairs, strict=True))
            for pages in self._pages:
                pages[destinations] = pages[sources]


@attrs.define(eq=False)
class VarlenLayer:
    """One layer's pages."""

    backend: VarlenBackend
    keys: Tensor
    values: Tensor

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        step = self.backend.step
        assert step is not None
        self.keys.flatten(0, 1).index_copy_(0, step.slots, key[0].transpose(0, 1))
        self.values.flatten(0, 1).index_copy_(0, step.slots, value[0].transpose(0, 1))
        # the window counts the query itself, the kernel's does not
        left = -1 if options.sliding_window is None else options.sliding_window - 1
        out = varlen_attn(
            query[0].transpose(0, 1).contiguous(),
            self.keys,
            self.values,
            step.cu_seq_q,
            # FlashAttention 2 asks for the keys' borders too, and with seqused_k never reads them
            step.cu_seq_q,
            step.max_q,
            step.max_k,
            scale=options.scaling,
            window_size=(left, 0),
            enable_gqa=query.shape[1] != self.keys.shape[2],
            seqused_k=step.seqused_k,
            block_table=step.block_table,
            num_splits=1,
        )
        assert isinstance(out, Tensor)
        return out[None]


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device; a GPU gets them from pinned memory, and nobody waits for it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
