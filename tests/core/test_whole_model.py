"""Models that are computed without their forward: which are, and that nothing but the way is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trio_llm.config import EngineSettings
from trio_llm.core.attention import SequenceSpan
from trio_llm.core.build import build_core
from trio_llm.core.fusion import FusedLayer
from trio_llm.core.kernels import Kernels
from trio_llm.core.model import PagedModel, SpanInput
from trio_llm.core.packing import pack
from trio_llm.core.quantization import quantize
from trio_llm.core.whole_model import MIN_POSITIONS

from .helpers import make_request, run
from .test_fusion import FUSED, OTHERS, TEXT, loaded, paged_logits
from .tiny_models import PROMPTS, build, paged

FORMATS = [torch.int8, torch.float32]


def fused(model: Any, kernels: Kernels, dtype: torch.dtype) -> PagedModel:
    ours = paged(model, block_size=4, num_blocks=160, backend="kernels")
    if dtype is torch.int8:
        quantize(model, kernels)
    else:
        pack(model, kernels, dtype)
    ours.fuse_layers()
    return ours


def by_its_forward(model: PagedModel) -> torch.Tensor:
    """The logits of TEXT on the way through transformers, layers fused or not."""
    whole, model._whole = model._whole, None
    try:
        return paged_logits(model, TEXT)
    finally:
        model._whole = whole


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("architecture", FUSED)
def test_logits_are_those_of_its_forward(kernels: Kernels, architecture: str, dtype: torch.dtype) -> None:
    model = fused(build(architecture), kernels, dtype)
    assert model._whole is not None
    expected = by_its_forward(model)
    # the norm before the head is ours and not torch's: a number of an int8 row may be rounded the other way
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    assert (paged_logits(model, TEXT) - expected).abs().max() <= tolerance * expected.abs().max()


def test_the_forward_of_a_whole_model_is_not_called(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> None:
    these = loaded(is_quantized=True)
    core = build_core(these, EngineSettings(kv_cache_memory=2**22))
    expected, _ = run(core, [make_request("a", PROMPTS[0], max_tokens=9)])

    def forward(*_: object, **__: object) -> None:
        raise AssertionError("called")

    for module in (these.model, these.model.model, *these.model.model.layers):
        monkeypatch.setattr(module, "forward", forward)
    assert run(core, [make_request("b", PROMPTS[0], max_tokens=9)])[0]["b", 0] == expected["a", 0]


def test_wanted_tokens_come_in_the_order_that_is_asked_for(kernels: Kernels) -> None:
    model = fused(build("llama"), kernels, torch.float32)
    every = paged_logits(model, TEXT)
    wanted = [len(TEXT) - 1, 0, 5, 5]
    with torch.inference_mode():
        some = model.forward([SpanInput(TEXT, SequenceSpan(0, len(TEXT), range(160)))], wanted)
    assert torch.equal(some, every[wanted])


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_without_an_embedding_is_an_error(kernels: Kernels, token: int) -> None:
    model = fused(build("llama"), kernels, torch.float32)
    with pytest.raises(IndexError):
        paged_logits(model, [1, token, 2])
    with pytest.raises(ValueError, match="1 token ids for the 3"):
        kernels.forward(model._whole._model, model.backend.spans, [1], [0])


def test_positions_beyond_those_at_hand_are_rotated_as_the_model_does(kernels: Kernels) -> None:
    model = fused(build("llama", max_position_embeddings=4 * MIN_POSITIONS), kernels, torch.float32)
    whole = model._whole
    assert len(whole._cosines) == MIN_POSITIONS
    last = 2 * MIN_POSITIONS + 4
    model.allocate(1)
    table = [0] * (last // 4 + 1)
    with torch.inference_mode():
        model.forward([SpanInput([3], SequenceSpan(last, 1, table))], [0])
        positions = torch.arange(len(whole._cosines))[None]
        cosines, sines = model.model.model.rotary_emb(torch.zeros(1), position_ids=positions)
    assert len(whole._cosines) == 4 * MIN_POSITIONS
    assert torch.equal(whole._cosines, cosines[0])
    assert torch.equal(whole._sines, sines[0])
    assert whole._model.cosines == whole._cosines.data_ptr()
    assert whole._model.sines == whole._sines.data_ptr()


# -- what is no whole


@pytest.mark.parametrize("architecture", OTHERS)
def test_architectures_with_other_parts_keep_their_forward(kernels: Kernels, architecture: str) -> None:
    assert fused(build(architecture), kernels, torch.int8)._whole is None


def scaled(module: torch.nn.Module, factor: float = 1.0001) -> None:
    """Have a module give a little more than it should."""

    class Scaled(type(module)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            if hasattr(out, "logits"):
                out.logits = out.logits * factor
                return out
            return tuple(part * factor for part in out) if isinstance(out, tuple) else out * factor

    module.__class__ = Scaled


class Shifted(torch.nn.Module):
    """Rotates by the place after each token's own."""

    def __init__(self, own: torch.nn.Module) -> None:
        super().__init__()
        self.own = [own]
        self.calls = 0

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        self.calls += 1
        return self.own[0](x, position_ids=position_ids + (self.calls > 1))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("part", ["", "model.embed_tokens", "model.norm"])
def test_a_model_that_does_a_little_more_keeps_its_forward(kernels: Kernels, part: str, dtype: torch.dtype) -> None:
    model = build("llama")
    scaled(model.get_submodule(part))
    ours = fused(model, kernels, dtype)
    assert ours._whole is None
    expected = by_its_forward(ours)
    assert torch.equal(paged_logits(ours, TEXT), expected)


def test_a_model_that_rotates_by_other_positions_keeps_its_forward(kernels: Kernels) -> None:
    ours = fused(build("llama"), kernels, torch.float32)
    assert ours._whole is not None
    base = ours.model.model
    base.rotary_emb = Shifted(base.rotary_emb)
    ours.fuse_layers()
    assert ours._whole is None


def test_a_model_with_one_layer_that_is_not_fused_keeps_its_forward(kernels: Kernels) -> None:
    model = build("llama", num_hidden_layers=3)
    scaled(model.model.layers[1], 1.2)
    ours = fused(model, kernels, torch.float32)
    assert ours._whole is None
    assert torch.equal(paged_logits(ours, TEXT), by_its_forward(ours))


def test_a_rotation_that_goes_by_more_than_positions_keeps_the_forward(kernels: Kernels) -> None:
    """Mellum's wants the layer's kind; all else of this model is of the pattern."""
    from transformers import MellumConfig, MellumForCausalLM

    torch.manual_seed(0)
    config = MellumConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, mlp_layer_types=["dense"] * 2,
        layer_types=["full_attention"] * 2,
    )  # fmt: skip
    ours = fused(MellumForCausalLM(config).eval(), kernels, torch.float32)
    assert all(isinstance(layer, FusedLayer) for layer in ours.model.model.layers)
    assert ours._whole is None
    assert paged_logits(ours, TEXT).isfinite().all()


def test_the_pages_of_another_engine_are_not_touched(kernels: Kernels) -> None:
    first = fused(build("llama"), kernels, torch.float32)
    second = paged(first.model, block_size=4, num_blocks=2, backend="kernels")
    with pytest.raises(RuntimeError, match="another engine"):
        paged_logits(first, TEXT)
    with torch.inference_mode():
        assert second.forward([SpanInput([1, 2], SequenceSpan(0, 2, [0]))], [1]).isfinite().all()


def test_what_was_found_is_found_again(kernels: Kernels) -> None:
    ours = fused(build("llama"), kernels, torch.float32)
    ours.fuse_layers()
    assert ours._whole is not None
