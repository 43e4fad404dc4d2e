"""EncoderModel: a transformers model run over packed texts, and the vector of each.

Nothing is padded and nothing is cached: the tokens of several texts stand behind each other
in one forward, and attention keeps to each text's own.  A model whose hidden states come out
otherwise than from its own attention is refused when it is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from trio_llm.core.attention import IMPLEMENTATION, LAYER_ATTRIBUTE, Options, attention, register
from trio_llm.core.linear import speed_up_linears
from trio_llm.core.model import PROBE_TOLERANCE, check_config
from trio_llm.errors import ModelNotSupported
from trio_llm.models.encoders import LoadedEncoder, PoolingMode, first_position

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST_PROBE = 512


class PackedAttention:
    """The Layer of every attention module of an encoder: each packed text attends to itself alone."""

    def __init__(self) -> None:
        self.texts: list[slice] = []
        """The packed tokens of each text, set before a forward."""
        self.modules: set[nn.Module] = set()
        """Who has attended."""
        self.widest_window = 0

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        self.modules.add(module)
        self.widest_window = max(self.widest_window, options.sliding_window or 0)
        causal = bool(getattr(module, "is_causal", True))  # as transformers' own sdpa takes it
        _, num_heads, num_tokens, _ = query.shape
        out = query.new_empty((1, num_tokens, num_heads, value.shape[-1]))
        for tokens in self.texts:
            mask = _window(tokens.stop - tokens.start, options.sliding_window, causal=causal, device=query.device)
            attended = attention(
                query[:, :, tokens],
                key[:, :, tokens],
                value[:, :, tokens],
                mask,
                causal=causal and mask is None,
                options=options,
            )
            out[:, tokens] = attended.transpose(1, 2)
        return out


def _window(length: int, window: int | None, *, causal: bool, device: torch.device) -> Tensor | None:
    """Which keys (columns) each query sees through a sliding window; None where it hides nothing."""
    if window is None or length <= window:
        return None
    distances = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    seen = distances < window
    return seen & (distances >= 0 if causal else distances > -window)


@attrs.define(eq=False)
class EncoderModel:
    """Makes vectors of texts.

    Args:
        model: without a head, in eval mode, on its device.  Its attention implementation is replaced.
        pooling: what becomes of the last layer's hidden states: their mean, the first or the last.
        normalize: scale each vector to length 1.

    Raises:
        ModelNotSupported: its attention cannot be replaced.
    """

    model: PreTrainedModel
    pooling: PoolingMode = "mean"
    normalize: bool = True
    first_position: int = attrs.field(init=False)
    """Of a text's first token: RoBERTa and its kin begin behind the padding's position."""
    _own_attention: str = attrs.field(init=False)
    _attention: PackedAttention = attrs.field(factory=PackedAttention, init=False)
    _arguments: frozenset[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        name = type(self.model).__name__
        check_config(self.model)
        self._arguments = frozenset(inspect.signature(self.model.forward).parameters)
        if "position_ids" not in self._arguments:
            raise ModelNotSupported(f"{name} takes no position_ids, so texts cannot be packed")
        self.first_position = first_position(self.model)
        self._own_attention = self.model.config._attn_implementation
        register()
        self._use_attention(IMPLEMENTATION)
        for module in self.model.modules():
            setattr(module, LAYER_ATTRIBUTE, self._attention)

    @property
    def hidden_size(self) -> int:
        """Numbers in a vector."""
        return int(self.model.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def embed(self, texts: Sequence[Sequence[int]], dimensions: Sequence[int | None] | None = None) -> list[Tensor]:
        """The vectors of several texts.

        Args:
            texts: their token ids, special tokens included; none is empty.
            dimensions: of each text's vector, if it is to be cut: its first numbers, scaled to length 1
                as a model that is trained for that wants it.

        Returns:
            A vector (hidden_size or fewer) for each text, float32, on the CPU.
        """
        with torch.inference_mode():
            states = self._forward(texts).float()
            pooled = torch.stack([self._pool(states[tokens]) for tokens in self._attention.texts])
            if self.normalize:
                pooled = functional.normalize(pooled, dim=-1)
            rows = pooled.to("cpu")
            return [
                row if wanted is None or wanted >= row.shape[0] else functional.normalize(row[:wanted], dim=-1)
                for row, wanted in zip(rows, dimensions or [None] * len(texts), strict=True)
            ]

    def _pool(self, states: Tensor) -> Tensor:
        if self.pooling == "mean":
            return states.mean(dim=0)
        return states[0 if self.pooling == "cls" else -1]

    def _forward(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states (T, hidden_size) of the packed texts."""
        self._attention.texts = []
        start = 0
        for text in texts:
            self._attention.texts.append(slice(start, start + len(text)))
            start += len(text)
        token_ids = [token for text in texts for token in text]
        positions = [self.first_position + place for text in texts for place in range(len(text))]
        arguments: dict[str, Any] = {"position_ids": self._tensor(positions)}
        if "token_type_ids" in self._arguments:
            arguments["token_type_ids"] = self._tensor([0] * len(token_ids))
        if "use_cache" in self._arguments:
            arguments["use_cache"] = False
        states: Tensor = self.model(input_ids=self._tensor(token_ids), **arguments).last_hidden_state
        return states[0]

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor([values], dtype=torch.int64, device=self.model.device)

    def _use_attention(self, implementation: str) -> None:
        self.model.set_attn_implementation(implementation)
        if self.model.config._attn_implementation != implementation:
            raise ModelNotSupported(f"the attention of {type(self.model).__name__} cannot be replaced")

    def probe(self, max_model_len: int) -> None:
        """Compare two packed texts with each alone through the model's own attention.

        Raises:
            ModelNotSupported: the hidden states differ.
        """
        name = type(self.model).__name__
        generator = torch.Generator().manual_seed(0)
        with torch.inference_mode():
            try:
                self._forward([[5, 6, 7]])  # shows the windows there are
            except Exception as error:
                raise ModelNotSupported(f"{name} does not run packed: {error}") from error
            if not self._attention.modules:
                raise ModelNotSupported(f"{name} does not dispatch its attention through transformers' interface")
            # beyond the window, where there is one that a short text can show
            long = max(9, min(self._attention.widest_window + 5, LONGEST_PROBE))
            texts = [
                torch.randint(
                    5, min(self.vocab_size, 1000), (min(length, max_model_len),), generator=generator, device="cpu"
                ).tolist()
                for length in (4, long, 6)
            ]
            packed = self._forward(texts).float()
            self._use_attention(self._own_attention)
            try:
                # its own positions, too: ours for RoBERTa must be what it would make itself
                alone = [self.model(input_ids=self._tensor(text)).last_hidden_state[0].float() for text in texts]
            finally:
                self._use_attention(IMPLEMENTATION)
        own = torch.cat(alone)
        difference = float((packed - own).abs().max() / own.abs().max().clamp(min=1e-6))
        if not difference <= PROBE_TOLERANCE[self.model.dtype]:  # NaN fails too
            raise ModelNotSupported(
                f"{name} computes other hidden states for packed texts than for each alone "
                f"(relative difference {difference:.2g}), so it is not served"
            )


def build_encoder(loaded: LoadedEncoder) -> EncoderModel:
    """A loaded embedding model, ready to make vectors and proved to.

    Raises:
        ModelNotSupported: it cannot run packed, or would run wrongly.
    """
    speed_up_linears(loaded.model)
    encoder = EncoderModel(loaded.model, loaded.pooling, loaded.normalize)
    encoder.probe(loaded.max_model_len)
    return encoder
