"""Fused decoder layers: transformers' own forward on the same int8 layers, and the same bits however a text is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trio_llm.config import EngineSettings
from trio_llm.core.attention import SequenceSpan
from trio_llm.core.build import build_core
from trio_llm.core.fusion import FusedLayer
from trio_llm.core.kernels import Kernels, load
from trio_llm.core.linear import FewRowsLinear
from trio_llm.core.model import PagedModel, SpanInput
from trio_llm.core.packing import PackedLinear, pack
from trio_llm.core.quantization import ReferenceLinear, quantize
from trio_llm.core.request import Request
from trio_llm.errors import ConfigurationError
from trio_llm.models.loader import LoadedModel, load_model

from .helpers import Outputs, is_idle, make_request, run
from .tiny_models import CPU, PROMPTS, build, core_of, paged

FUSED = ["llama", "qwen2", "qwen3", "mistral"]
"""Architectures whose layers have the pattern: plain, with biases, with normed heads, with a sliding window."""
OTHERS = ["gemma3_text", "gpt2", "phi3", "mixtral", "gpt_oss"]


FORMATS = [torch.float32, torch.bfloat16]


def quantized(
    architecture: str,
    *,
    block_size: int = 16,
    fused: bool = True,
    kv_dtype: torch.dtype = torch.bfloat16,
    **overrides: object,
) -> PagedModel:
    model = paged(
        build(architecture, **overrides), block_size=block_size, num_blocks=160, backend="kernels", kv_dtype=kv_dtype
    )
    assert quantize(model.model, load())
    if fused:
        model.fuse_layers()
    return model


def own_logits(architecture: str, token_ids: list[int], **overrides: object) -> torch.Tensor:
    """What transformers gives with the same int8 layers."""
    model = build(architecture, **overrides)
    quantize(model, load())
    with torch.inference_mode():
        return model(input_ids=torch.tensor([token_ids], device=CPU), use_cache=False).logits[0]


def paged_logits(model: PagedModel, token_ids: list[int]) -> torch.Tensor:
    span = SequenceSpan(0, len(token_ids), range(160))
    with torch.inference_mode():
        return model.forward([SpanInput(token_ids, span)], range(len(token_ids)))


TEXT = [token for prompt in PROMPTS for token in prompt]


def is_near(found: torch.Tensor, expected: torch.Tensor, kv_dtype: torch.dtype = torch.float32) -> bool:
    """Alike but for numbers that were rounded the other way: few, or in bfloat16 some in every token."""
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    mean, median = (0.02, 0.01) if kv_dtype is torch.float32 else (0.04, 0.04)
    return bool(errors.mean() < mean) and bool(errors.median() < median)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("architecture", FUSED)
def test_fused_layers_are_transformers_own_with_the_same_linear_layers(
    architecture: str, kv_dtype: torch.dtype
) -> None:
    model = quantized(architecture, block_size=4, kv_dtype=kv_dtype)
    layers = [module for module in model.model.modules() if isinstance(module, FusedLayer)]
    assert len(layers) == model.model.config.num_hidden_layers
    found = paged_logits(model, TEXT)
    assert is_near(found, own_logits(architecture, TEXT), kv_dtype)
    assert not is_near(found, own_logits(architecture, TEXT, seed=1), kv_dtype), "the comparison must see another model"


@pytest.mark.parametrize("architecture", FUSED)
def test_fused_layers_in_float32_are_transformers_own(kernels: Kernels, architecture: str) -> None:
    model = paged(build(architecture), block_size=4, num_blocks=160, backend="kernels")
    pack(model.model, kernels, torch.float32)
    assert model.fuse_layers() == model.model.config.num_hidden_layers
    with torch.inference_mode():
        expected = build(architecture)(input_ids=torch.tensor([TEXT], device=CPU), use_cache=False).logits[0]
    torch.testing.assert_close(paged_logits(model, TEXT), expected, rtol=1e-4, atol=1e-4)


def test_a_window_that_is_one_too_wide_would_be_seen() -> None:
    for kv_dtype in FORMATS:
        found = paged_logits(quantized("mistral", block_size=4, kv_dtype=kv_dtype), TEXT)
        assert not is_near(found, own_logits("mistral", TEXT, sliding_window=10), kv_dtype)


def test_biases_count() -> None:
    model, other = build("qwen2"), build("qwen2")
    for module in other.modules():
        if getattr(module, "bias", None) is not None:
            module.bias.data.normal_(generator=torch.Generator().manual_seed(3))
    model.load_state_dict(other.state_dict())
    ours = paged(model, num_blocks=160, backend="kernels")
    quantize(model, load())
    assert ours.fuse_layers() == 2
    quantize(other, load())
    with torch.inference_mode():
        expected = other(input_ids=torch.tensor([TEXT], device=CPU), use_cache=False).logits[0]
    assert is_near(paged_logits(ours, TEXT), expected)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("architecture", OTHERS)
def test_other_layers_stay_as_they_are(architecture: str, kv_dtype: torch.dtype) -> None:
    model = quantized(architecture, kv_dtype=kv_dtype)
    assert not any(isinstance(module, FusedLayer) for module in model.model.modules())
    assert is_near(paged_logits(model, TEXT), own_logits(architecture, TEXT), kv_dtype)


def test_a_layer_that_has_the_pattern_and_does_something_else_stays_as_it_is() -> None:
    model = quantized("llama", fused=False, num_hidden_layers=4, kv_dtype=torch.float32)
    layer = model.model.model.layers[1]

    class Scaled(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states + 1.1 * (super().forward(hidden_states, *args, **kwargs) - hidden_states)

    layer.__class__ = Scaled
    assert model.fuse_layers() == 3
    assert type(layer) is Scaled
    lengths = [len(each.run.layers) for each in model.model.model.layers if isinstance(each, FusedLayer)]
    assert lengths == [1, 2, 2], "a run ends where a layer is not fused"
    with torch.inference_mode():
        own = model.model
        found = paged_logits(model, TEXT)
        own.set_attn_implementation("sdpa")
        expected = own(input_ids=torch.tensor([TEXT], device=CPU), use_cache=False).logits[0]
    assert is_near(found, expected)


@pytest.mark.parametrize(
    ("architecture", "kv_dtype"), [*((name, torch.bfloat16) for name in FUSED), ("llama", torch.float32)]
)
def test_a_text_is_the_same_bit_for_bit_however_it_is_computed(architecture: str, kv_dtype: torch.dtype) -> None:
    wide, narrow = quantized(architecture, kv_dtype=kv_dtype), quantized(architecture, block_size=4, kv_dtype=kv_dtype)

    def request(index: int) -> Request:
        return make_request(str(index), PROMPTS[index], max_tokens=48)

    for model in (wide, narrow):
        expected: Outputs = {}
        for index in range(len(PROMPTS)):
            expected |= run(core_of(model), [request(index)])[0]
        for settings in (
            {},
            {"max_num_seqs": 4, "max_num_batched_tokens": 7},
            {"max_num_seqs": 2, "max_num_batched_tokens": 3},
            {"num_blocks": 30 if model is narrow else 8, "max_num_batched_tokens": 11},
            {"enable_prefix_caching": False},
        ):
            core = core_of(model, **settings)
            outputs, _ = run(core, map(request, range(len(PROMPTS))))
            assert outputs == expected
            assert is_idle(core)


def test_logits_are_the_same_bits_alone_and_among_neighbours() -> None:
    model = quantized("qwen3", block_size=4)
    alone = paged_logits(model, TEXT)
    tables = [list(range(20 * index, 20 * index + 20)) for index in range(4)]
    with torch.inference_mode():
        for start in range(0, len(TEXT), 9):
            part = TEXT[start : start + 9]
            inputs = [SpanInput(part, SequenceSpan(start, len(part), table)) for table in tables]
            logits = model.forward(inputs, range(4 * len(part)))
            for index in range(4):
                assert torch.equal(logits[index * len(part) : (index + 1) * len(part)], alone[start : start + 9])


# -- settings


def loaded(*, is_quantized: bool) -> LoadedModel:
    model = load_model("smollm2", settings=EngineSettings(device="cpu"))
    assert model.is_quantized
    return LoadedModel(
        name="tiny", model=build("llama"), tokenizer=model.tokenizer, defaults=model.defaults,
        eos_token_ids=frozenset(), max_model_len=256, load_seconds=0.0, is_quantized=is_quantized,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("is_quantized", "settings", "kind"),
    [
        (True, {}, torch.int8),
        (False, {}, torch.float32),
        (True, {"quantization": "none"}, torch.float32),
        (False, {"quantization": "int8"}, torch.int8),
        (False, {"deterministic": True}, FewRowsLinear),
        (True, {"compiled_kernels": False}, FewRowsLinear),
        (True, {"compiled_kernels": False, "quantization": "int8"}, ReferenceLinear),
    ],
)
def test_settings_choose_the_arithmetic(
    kernels: Kernels, is_quantized: bool, settings: dict, kind: type | torch.dtype
) -> None:
    if kind is torch.float32 and kernels.vector_bytes < 64:
        kind = FewRowsLinear
    these = loaded(is_quantized=is_quantized)
    core = build_core(these, EngineSettings(**settings, kv_cache_memory=2**22))
    kinds = {
        module.dtype if isinstance(module, PackedLinear) else type(module)
        for module in these.model.modules()
        if isinstance(module, PackedLinear | ReferenceLinear | nn.Linear)
    }
    assert kinds == {kind}
    if isinstance(kind, torch.dtype):
        assert all(isinstance(layer, FusedLayer) for layer in these.model.model.layers)
    outputs, _ = run(core, [make_request("a", [5, 6, 7], max_tokens=5)])
    assert len(outputs["a", 0]) == 5


@pytest.mark.parametrize(
    ("is_quantized", "settings", "dtype"),
    [
        (True, {}, torch.bfloat16),
        (False, {}, torch.float32),
        (True, {"kv_cache_dtype": "float32"}, torch.float32),
        (False, {"kv_cache_dtype": "bfloat16"}, torch.bfloat16),
        (True, {"block_size": 3}, torch.float32),
        (True, {"compiled_kernels": False}, torch.float32),
    ],
)
def test_settings_choose_the_format_of_keys_and_values(is_quantized: bool, settings: dict, dtype: torch.dtype) -> None:
    if load() is None:
        pytest.skip("there is no C++ compiler here")
    room = 2**20
    core = build_core(loaded(is_quantized=is_quantized), EngineSettings(**settings, kv_cache_memory=room))
    model = core.executor._model
    assert model.kv_dtype is dtype
    assert model.block_bytes == sum(pages[0].nbytes for pages in model.backend._pages)
    assert all(pages.dtype is dtype for pages in model.backend._pages)
    assert core.executor.info.num_blocks == room // model.block_bytes


@pytest.mark.parametrize("settings", [{"compiled_kernels": False}, {"block_size": 5}, {"deterministic": True}])
def test_a_format_that_is_not_to_be_had_is_refused(settings: dict) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_core(loaded(is_quantized=False), EngineSettings(kv_cache_dtype="bfloat16", **settings))
    assert caught.value.field == "kv_cache_dtype"


def test_a_second_engine_takes_a_model_as_the_first_left_it() -> None:
    if load() is None:
        pytest.skip("there is no C++ compiler here")
    these = loaded(is_quantized=True)
    texts = [
        run(build_core(these, EngineSettings(kv_cache_memory=2**22)), [make_request("a", PROMPTS[0], max_tokens=9)])[0]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert sum(type(module).__name__ == "FusedLlamaDecoderLayer" for module in these.model.modules()) == 2


def test_int8_is_for_float32_on_the_cpu() -> None:
    these = loaded(is_quantized=False)
    these.model.to(torch.bfloat16)
    with pytest.raises(ConfigurationError, match="int8 needs"):
        build_core(these, EngineSettings(quantization="int8"))


def test_int8_is_batch_exact_without_any_padding() -> None:
    if load() is None:
        pytest.skip("there is no C++ compiler here")
    core = build_core(loaded(is_quantized=True), EngineSettings(kv_cache_memory=2**22))
    assert core.executor.info.batch_exact
