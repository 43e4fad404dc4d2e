"""PagedModel: any transformers decoder, run over packed tokens with paged attention.

An architecture that could not run, or would silently run wrongly, is refused when it is
loaded: a static gate looks at the configuration, a probe runs two short sequences through
our attention and through the model's own and compares the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from trio_llm.core.attention import (
    IMPLEMENTATION,
    LAYER_ATTRIBUTE,
    AttentionBackend,
    LayerSpec,
    Options,
    SequenceSpan,
    attention,
    bytes_per_block,
    register,
)
from trio_llm.core.decode_graphs import DecodeGraphs
from trio_llm.core.faults import is_out_of_memory
from trio_llm.core.fusion import fuse
from trio_llm.core.page_attention import PageBackend
from trio_llm.core.quantization import is_quantized
from trio_llm.core.varlen_attention import VarlenBackend, to_device
from trio_llm.core.whole_model import WholeModel, find_whole
from trio_llm.errors import ModelNotSupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_KINDS = {"full_attention", "sliding_attention"}
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings that look at the longest position of the whole batch."""

OWN_ATTENTION_ATTRIBUTE = "_trio_llm_own_attention"

PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of a probe's logits, relative to the largest of them."""

QUANTIZED_TOLERANCE = 0.2
"""The same for a model that an engine before this one has quantised: in 8 bits a difference in the last
place may round a number the other way, and the layers that follow make more of it."""


def num_probe_blocks(block_size: int) -> int:
    """Blocks that `PagedModel.probe` needs."""
    return -(-_probe_length(block_size) // block_size) + 1


def _probe_length(block_size: int) -> int:
    """Tokens of the probe's long sequence: over a block border, and enough for two chunks."""
    return max(block_size + 3, 7)


@attrs.frozen
class SpanInput:
    """One sequence's tokens in a packed forward."""

    token_ids: Sequence[int]
    span: SequenceSpan


class PagedModel:
    """A transformers model whose attention reads and writes pages.

    Args:
        model: eval mode, on its device.  Its attention implementation is replaced.
        backend: owns the pages, on the same device.
        kv_dtype: of keys and values in the pages; None is the model's own.
        row_multiple: pad the tokens of a step, and the logits that are made, to a multiple of this.  The backend
            must do without the keys of what pads.

    Raises:
        ModelNotSupported: its attention cannot be replaced.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        *,
        kv_dtype: torch.dtype | None = None,
        row_multiple: int = 1,
    ) -> None:
        self.model = model
        self.backend = backend
        self.row_multiple = row_multiple
        self.device = model.device
        self.dtype = model.dtype
        self.kv_dtype = kv_dtype or model.dtype
        check_config(model)
        self._graphs: DecodeGraphs | None = None
        self._whole: WholeModel | None = None
        # an engine before this one may have replaced it
        own = getattr(model, OWN_ATTENTION_ATTRIBUTE, model.config.get_text_config()._attn_implementation)
        setattr(model, OWN_ATTENTION_ATTRIBUTE, own)
        self._own_attention: str = own
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        register()
        self._use_attention(IMPLEMENTATION)
        with torch.inference_mode():
            self._layers = self._discover()

    @property
    def specs(self) -> list[LayerSpec]:
        """What each attention layer caches, in the order in which the forward meets them."""
        return [spec for _, spec in self._layers]

    @property
    def vocab_size(self) -> int:
        """Logits in a row; at least the tokenizer's vocabulary, often padded beyond it."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers together."""
        return bytes_per_block(self.specs, self.backend.block_size, self.kv_dtype)

    def allocate(self, num_blocks: int, dtype: torch.dtype | None = None) -> None:
        """Make KV memory of `num_blocks` blocks, in place of what there was.

        Args:
            dtype: of keys and values, in place of `kv_dtype`.
        """
        layers = self.backend.allocate(self.specs, num_blocks, dtype or self.kv_dtype)
        for (module, _), layer in zip(self._layers, layers, strict=True):
            setattr(module, LAYER_ATTRIBUTE, layer)

    def forward(self, inputs: Sequence[SpanInput], wanted: Sequence[int]) -> Tensor:
        """Compute the packed tokens of several sequences.

        Args:
            inputs: the sequences' tokens, packed in this order.
            wanted: indices into the packed tokens whose logits are wanted.

        Returns:
            Logits (len(wanted), vocab_size), float32, on the model's device.
        """
        spans = [part.span for part in inputs]
        token_ids = [token for part in inputs for token in part.token_ids]
        if self._graphs is not None and self._graphs.fits(spans):
            return self._graphs.forward(token_ids, spans)[self._tensor(wanted)].float()
        self.backend.begin_step(spans)
        if self._whole is not None:
            assert isinstance(self.backend, PageBackend)
            return self._whole.forward(self.backend, token_ids, wanted)
        positions = [p for part in inputs for p in range(part.span.start, part.span.start + part.span.length)]
        padding = [0] * (-len(token_ids) % self.row_multiple)
        rows = [*wanted, *[0] * (-len(wanted) % self.row_multiple)]
        return self._forward(token_ids + padding, positions + padding, rows)[: len(wanted)]

    def _forward(self, token_ids: Sequence[int], positions: Sequence[int], wanted: Sequence[int]) -> Tensor:
        keep = self._tensor(wanted)
        arguments: dict[str, Any] = {"logits_to_keep": keep} if self._keeps_logits else {}
        logits = self.model(
            input_ids=self._tensor(token_ids)[None],
            position_ids=self._tensor(positions)[None],
            use_cache=False,
            **arguments,
        ).logits
        rows: Tensor = logits[0] if self._keeps_logits else logits[0, keep]
        return rows.float()

    def fuse_layers(self) -> int:
        """Compute decoder layers in one go where that can be done, and with them all else; gives how many.

        The pages' content is lost.
        """
        if not isinstance(self.backend, PageBackend):
            return 0
        table = range(num_probe_blocks(self.backend.block_size))
        token_ids = range(7)
        few = SpanInput(token_ids, SequenceSpan(0, len(token_ids), table))
        self._whole = None
        with torch.inference_mode():
            count = fuse(self.model, lambda: self.forward([few], [0]))
            self._whole = find_whole(self.model, self.backend, token_ids, lambda: self.forward([few], token_ids))
        return count

    def record_decode_steps(self, max_model_len: int) -> None:
        """Run decode steps as CUDA graphs from now on, each size recorded when it is first needed."""
        assert isinstance(self.backend, VarlenBackend)

        def run(token_ids: Tensor, positions: Tensor) -> Tensor:
            logits: Tensor = self.model(input_ids=token_ids, position_ids=positions, use_cache=False).logits
            return logits[0]

        self._graphs = DecodeGraphs(self.backend, run, max_model_len=max_model_len)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return to_device(values, torch.int64, self.device)

    def _use_attention(self, name: str) -> None:
        self.model.set_attn_implementation(name)
        if self.model.config.get_text_config()._attn_implementation != name:
            raise ModelNotSupported(f"the attention of {type(self.model).__name__} cannot be replaced")

    def _discover(self) -> list[tuple[nn.Module, LayerSpec]]:
        """Run a few tokens through the model and see which modules attend, and to what."""
        recorder = _Recorder()
        for module in self.model.modules():
            setattr(module, LAYER_ATTRIBUTE, recorder)
        name = type(self.model).__name__
        try:
            self._forward([0, 1, 2], [0, 1, 2], [2])
        except Exception as error:
            raise ModelNotSupported(f"{name} does not run without a cache and a mask: {_first_line(error)}") from error
        finally:
            for module in self.model.modules():
                delattr(module, LAYER_ATTRIBUTE)
        if not recorder.layers:
            raise ModelNotSupported(f"{name} does not dispatch its attention through transformers' interface")
        modules = [module for module, _ in recorder.layers]
        if len(set(modules)) != len(modules):
            raise ModelNotSupported(f"{name} attends more than once in a layer")
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        if kinds:
            sliding = [kind == "sliding_attention" for kind in kinds]
        else:
            window = getattr(config, "sliding_window", None)
            sliding = [bool(window) and getattr(config, "use_sliding_window", True)] * len(recorder.layers)
        # two short sequences cannot show a window that is longer than they are
        if [spec.sliding_window is not None for _, spec in recorder.layers] != sliding:
            raise ModelNotSupported(f"{name} does not tell its attention which layers have a sliding window")
        return recorder.layers

    def probe(self) -> None:
        """Compare our attention with the model's own on two short sequences.

        Uses the first `num_probe_blocks` blocks; their content is lost.

        Raises:
            ModelNotSupported: the logits differ, or there are none.
        """
        name = type(self.model).__name__
        try:
            error = self._probe()
        except Exception as failure:
            if is_out_of_memory(failure):
                raise
            raise ModelNotSupported(f"{name} does not run with paged attention: {_first_line(failure)}") from failure
        tolerance = QUANTIZED_TOLERANCE if is_quantized(self.model) else PROBE_TOLERANCE[self.dtype]
        if not error <= tolerance:  # NaN fails too
            raise ModelNotSupported(
                f"{name} computes other logits with paged attention than with its own "
                f"(relative difference {error:.2g}), so it is not served"
            )

    def _probe(self) -> float:
        """The largest difference of a logit, relative to the largest logit."""
        size = self.backend.block_size
        generator = torch.Generator().manual_seed(0)
        long, short = (
            torch.randint(min(self.vocab_size, 1000), (length,), generator=generator, device="cpu").tolist()
            for length in (_probe_length(size), min(size, 5))
        )
        *table, last = reversed(range(num_probe_blocks(size)))
        first = len(long) - 4
        with torch.inference_mode():
            # the long one in two chunks, the short one beside the second
            self.forward([SpanInput(long[:first], SequenceSpan(0, first, table))], [0])
            paged = self.forward(
                [
                    SpanInput(long[first:], SequenceSpan(first, 4, table)),
                    SpanInput(short, SequenceSpan(0, len(short), [last])),
                ],
                range(4 + len(short)),
            )
            self._use_attention(self._own_attention)
            try:
                own = torch.cat(
                    [
                        self._forward(long, range(len(long)), range(len(long)))[-4:],
                        self._forward(short, range(len(short)), range(len(short))),
                    ]
                )
            finally:
                self._use_attention(IMPLEMENTATION)
        return float((paged - own).abs().max() / own.abs().max().clamp(min=1e-6))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class _Recorder:
    """A Layer that attends without pages and notes who asked."""

    def __init__(self) -> None:
        self.layers: list[tuple[nn.Module, LayerSpec]] = []

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        plain = options.softcap is None and options.sinks is None
        spec = LayerSpec(key.shape[1], key.shape[3], value.shape[3], options.sliding_window, is_plain=plain)
        self.layers.append((module, spec))
        return attention(query, key, value, None, causal=True, options=options).transpose(1, 2)


def check_config(model: PreTrainedModel) -> None:
    """The static gate."""
    name = type(model).__name__
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds <= ATTENTION_KINDS:
        raise ModelNotSupported(f"{name} has layers of kind {', '.join(sorted(kinds - ATTENTION_KINDS))}")
    if config.is_encoder_decoder:
        raise ModelNotSupported(f"{name} is an encoder-decoder model")
    if getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", None) or ()):
        # the probe's sequences are far too short to reach the position where it begins
        raise ModelNotSupported(f"{name} scales its attention by the place in the batch instead of the position")
    for rope in _rope_parameters(config):
        if rope.get("rope_type", "default") in BATCH_DEPENDENT_ROPE:
            raise ModelNotSupported(f"{name} uses {rope['rope_type']} rotary embeddings, which mix up a batch")


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The config's rope parameters: one dict, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
