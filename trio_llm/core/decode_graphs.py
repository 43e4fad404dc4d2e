"""CUDA graphs for decode steps: hundreds of small kernels as one launch.

A step in which every sequence computes one token differs from the next only in numbers, so it can
be recorded once for each batch size and replayed.  Sizes are few: a batch is padded to the next one
with rows that write to a spare block and that nobody reads.  Whatever else a step is, chunks of
prompts or drafts, runs kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor, nn

from trio_llm.core.attention import SequenceSpan
from trio_llm.core.varlen_attention import StepTensors, VarlenBackend, to_device

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of the graphs that may be recorded, each when it is first needed."""

Run = Callable[[Tensor, Tensor], Tensor]
"""(token ids (1, B), positions (1, B)) -> logits (B, vocab), by the attention metadata that the backend holds."""
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Record what a function does; gives what replays it and the tensor that each replay fills."""


def can_record(model: nn.Module) -> bool:
    """Whether a forward of the model is the same kernels whatever the tokens are.

    It is not where there are experts, whose weights are stacked, (expert, out, in): on some GPUs the CPU waits to see
    which of them a step needs, and nobody may wait in what is recorded.
    """
    return all(parameter.dim() < 3 for parameter in model.parameters())


@attrs.frozen(eq=False)
class _Graph:
    """A recorded step and the memory that it reads."""

    size: int
    tokens: Tensor
    positions: Tensor
    step: StepTensors
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """Runs decode steps by replaying.

    Args:
        backend: with its pages allocated.
        run: the model's forward, all rows' logits.
        max_model_len: tokens of the longest sequence there can be.
        sizes: of the batches that are recorded, ascending.
        capture: records; the default is CUDA's.
    """

    def __init__(
        self,
        backend: VarlenBackend,
        run: Run,
        *,
        max_model_len: int,
        sizes: Sequence[int] = SIZES,
        capture: Capture | None = None,
    ) -> None:
        self._backend = backend
        self._run = run
        self._max_model_len = max_model_len
        self._sizes = sizes
        self._capture = capture or _CudaCapture(backend.device)
        self._graphs: dict[int, _Graph] = {}

    def fits(self, spans: Sequence[SequenceSpan]) -> bool:
        """Whether a step is one of those that are recorded."""
        return 0 < len(spans) <= self._sizes[-1] and all(span.length == 1 for span in spans)

    def forward(self, token_ids: Sequence[int], spans: Sequence[SequenceSpan]) -> Tensor:
        """Logits (len(spans), vocab), of memory that the next step overwrites.

        Args:
            token_ids: one for each span.
            spans: each of length 1.
        """
        size = next(size for size in self._sizes if size >= len(spans))
        if size not in self._graphs:
            self._graphs[size] = self._record(size)
        graph = self._graphs[size]
        self._fill(graph, token_ids, spans)
        graph.replay()
        return graph.logits[: len(spans)]

    def _fill(self, graph: _Graph, token_ids: Sequence[int], spans: Sequence[SequenceSpan]) -> None:
        """Put a step's numbers where the recorded kernels read them, in one transfer."""
        block_size, null_block = self._backend.block_size, self._backend.null_block
        padding, width = graph.size - len(spans), graph.step.block_table.shape[1]
        slots = [span.block_table[span.start // block_size] * block_size + span.start % block_size for span in spans]
        tables = [
            block
            for span in spans
            for block in [*span.block_table[:width], *[null_block] * (width - len(span.block_table))]
        ]
        packed = to_device(
            [
                *[*token_ids, *[0] * padding],
                *[*(span.start for span in spans), *[0] * padding],
                *[*slots, *[null_block * block_size] * padding],
                *[*(span.start + 1 for span in spans), *[1] * padding],
                *[*tables, *[null_block] * (padding * width)],
            ],
            torch.int64,
            self._backend.device,
        )
        targets = (graph.tokens, graph.positions, graph.step.slots, graph.step.seqused_k, graph.step.block_table)
        for target, source in zip(targets, torch.split(packed, [target.numel() for target in targets]), strict=True):
            target.copy_(source.view_as(target))

    def _record(self, size: int) -> _Graph:
        device, width = self._backend.device, -(-self._max_model_len // self._backend.block_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        tokens, positions = (zeros(1, size, dtype=torch.int64) for _ in range(2))
        step = StepTensors(
            slots=zeros(size, dtype=torch.int64).fill_(self._backend.null_block * self._backend.block_size),
            cu_seq_q=torch.arange(size + 1, dtype=torch.int32, device=device),
            seqused_k=zeros(size).fill_(1),
            block_table=zeros(size, width).fill_(self._backend.null_block),
            max_q=1,
            # part of what is recorded, so the longest there can be
            max_k=self._max_model_len,
        )
        self._backend.step = step
        replay, logits = self._capture(lambda: self._run(tokens, positions))
        return _Graph(size, tokens, positions, step, replay, logits)


class _CudaCapture:
    """torch.cuda.graph, with one stream and one memory pool for all sizes.

    Args:
        device: the model's, which need not be the current one: torch would take a stream of that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with torch.cuda.device(self._device):
            # what is made at a first call (workspaces, compiled kernels) must not be recorded
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    function()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                logits = function()
        return graph.replay, logits
