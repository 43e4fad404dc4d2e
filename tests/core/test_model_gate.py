"""What may be served: refusals, each in one clear line, and the probe that sees a lie."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from trio_llm.config import EngineSettings
from trio_llm.core import attention
from trio_llm.core.build import build_core
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.errors import ConfigurationError, ModelNotSupported
from trio_llm.models.loader import LoadedModel

from .helpers import make_request, run
from .tiny_models import ARCHITECTURES, build, greedy, paged

ROPE = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}


def refuse(model: PreTrainedModel, *words: str) -> None:
    """It is refused, in one line that says which model and why."""
    with pytest.raises(ModelNotSupported) as caught:
        paged(model).probe()
    assert "\n" not in caught.value.message
    for word in (type(model).__name__, *words):
        assert word in caught.value.message


def test_an_attention_that_cannot_be_replaced() -> None:
    refuse(build("bloom", n_head=4), "cannot be replaced")


def test_an_attention_that_is_called_twice_in_a_layer() -> None:
    refuse(build("diffllama"), "more than once")


def test_a_hybrid_with_a_state_beside_its_attention() -> None:
    refuse(build("falcon_h1"), "layers of kind")


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention"])
def test_a_kind_of_layer_that_is_not_known(kind: str) -> None:
    model = build("llama")
    model.config.layer_types = ["full_attention", kind]
    refuse(model, kind)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", **ROPE},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, **ROPE},
    ],
    ids=["dynamic", "longrope"],
)
def test_rotary_embeddings_that_look_at_the_whole_batch(rope: dict[str, Any]) -> None:
    refuse(build("llama", rope_parameters=rope), rope["rope_type"])


def test_the_same_rope_hidden_in_one_kind_of_layer() -> None:
    model = build("gemma3_text")
    model.config.rope_parameters = {
        "full_attention": {"rope_type": "dynamic", **ROPE},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    refuse(model, "dynamic")


def test_a_scale_that_looks_at_the_whole_batch_beyond_some_thousand_tokens() -> None:
    fields = {"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4, "num_local_experts": 2}
    refuse(build("llama4_text", attn_temperature_tuning=True, **fields), "the place in the batch")
    paged(build("llama4_text", attn_temperature_tuning=False, **fields)).probe()
    # where all layers have rotary embeddings there is no such scale
    paged(build("llama4_text", attn_temperature_tuning=True, no_rope_layers=[1] * 4, **fields)).probe()


def test_a_model_that_raises_in_the_probe() -> None:
    """Keys of fewer heads than latent attention makes, say."""
    model = build("deepseek_v3", qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, kv_lora_rank=16, q_lora_rank=16,
                  n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16)  # fmt: skip
    refuse(model, "does not run with paged attention")


def test_memory_that_runs_out_in_the_probe_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = paged(build("llama"))

    def run_out(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(model, "forward", run_out)
    with pytest.raises(MemoryError):
        model.probe()


def test_linear_and_yarn_ropes_pass() -> None:
    for kind in ("linear", "yarn"):
        paged(build("llama", rope_parameters={"rope_type": kind, **ROPE})).probe()


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gpt_neox", "stablelm", "olmo2", "starcoder2"])
def test_the_probe_passes_what_is_right(architecture: str, block_size: int) -> None:
    paged(build(architecture), block_size=block_size).probe()


# -- models that lie


def attention_of(model: PreTrainedModel, layer: int) -> torch.nn.Module:
    return model.model.layers[layer].self_attn


@contextlib.contextmanager
def attending(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Our attention hears other options than the model gave."""
    right = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda *args, **kwargs: right(*args, **change(kwargs)))
    attention.register()
    try:
        yield
    finally:
        monkeypatch.setattr(attention, "paged_attention", right)
        attention.register()


def test_a_module_whose_window_is_not_the_configs() -> None:
    model = build("mistral", sliding_window=200)
    own = attention_of(model, 1)
    forward = own.forward

    @functools.wraps(forward)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        model.config.sliding_window, kept = 3, model.config.sliding_window
        try:
            return forward(*args, **kwargs)
        finally:
            model.config.sliding_window = kept

    own.forward = narrow
    refuse(model)


def test_layers_that_do_not_pass_their_window_on() -> None:
    model = build("gemma3_text")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    refuse(model, "sliding window")


def test_a_window_on_the_wrong_layers() -> None:
    model = build("gemma3_text")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 8
    refuse(model, "sliding window")


@pytest.mark.parametrize("architecture", ["mistral", "phi3", "starcoder2", "gemma3_text"])
def test_a_window_that_the_config_has_and_the_attention_never_hears_of(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attending(monkeypatch, lambda kwargs: kwargs | {"sliding_window": None}):
        refuse(build(architecture, sliding_window=8))


@pytest.mark.parametrize(
    "lie",
    [
        lambda kwargs: kwargs | {"scaling": 1.7 * kwargs["scaling"]},
        lambda kwargs: kwargs | {"softcap": None},
        lambda kwargs: kwargs | {"softcap": 1.0},
    ],
    ids=["scaling", "softcap lost", "softcap invented"],
)
def test_the_probe_sees_other_options(lie: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with attending(monkeypatch, lie):
        refuse(build("gemma2", attn_logit_softcapping=2.0), "logits")


def test_the_probe_sees_positions_that_are_counted_in_the_batch() -> None:
    """A model that ignores position_ids would place every sequence after its neighbour."""
    model = build("llama")
    forward = model.model.forward

    @functools.wraps(forward)
    def ignorant(*args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.model.forward = ignorant
    refuse(model, "logits")


def test_the_probe_sees_a_state_that_mixes_neighbours() -> None:
    model = build("llama")
    norm = model.model.norm
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) + 0.2 * forward(hidden).roll(1, dims=1)
    refuse(model, "logits")


def test_the_probe_refuses_nan() -> None:
    model = build("llama")
    model.lm_head.weight[5] = float("nan")
    refuse(model, "logits")


def test_a_probe_leaves_our_attention_in_place_and_the_weights_alone() -> None:
    model = build("qwen3")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model_ours = paged(model, block_size=4)
    model_ours.probe()
    model_ours.probe()
    assert model.config._attn_implementation == "trio_llm_paged"
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# -- build_core


def loaded(model: PreTrainedModel, **fields: Any) -> LoadedModel:
    return LoadedModel(
        name="tiny",
        model=model,
        tokenizer=None,  # type: ignore[arg-type]
        defaults=SamplingParams(),
        eos_token_ids=frozenset(),
        load_seconds=0.0,
        **{"max_model_len": 256, **fields},
    )


@pytest.mark.parametrize("block_size", [None, 4])
def test_build_core_gives_an_engine_that_generates(block_size: int | None) -> None:
    reference = greedy(build("llama"), [1, 2, 3], 12)
    settings = EngineSettings(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32, block_size=block_size)
    core = build_core(loaded(build("llama")), settings)
    assert core.max_total_tokens == 32
    assert core.statistics().num_blocks == 2 * (32 // (block_size or 16))
    outputs, _ = run(core, [make_request("a", [1, 2, 3], max_tokens=12)])
    assert outputs["a", 0] == reference.token_ids
    core.close()


def test_build_core_works_for_one_short_sequence() -> None:
    settings = EngineSettings(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=20)
    core = build_core(loaded(build("llama")), settings)
    outputs, _ = run(core, [make_request("a", [1, 2, 3], max_tokens=12)])
    assert len(outputs["a", 0]) == 12


def test_build_core_refuses_a_context_that_the_model_has_not() -> None:
    with pytest.raises(ConfigurationError, match="max_model_len is 257, but the model's context is 256") as caught:
        build_core(loaded(build("llama")), EngineSettings(max_model_len=257))
    assert caught.value.field == "max_model_len"


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_build_core_works_with_tiny_blocks(block_size: int) -> None:
    core = build_core(loaded(build("llama")), EngineSettings(block_size=block_size, max_num_seqs=4))
    outputs, _ = run(core, [make_request("a", [1, 2, 3], max_tokens=12)])
    assert len(outputs["a", 0]) == 12


def test_build_core_refuses_what_the_gate_refuses() -> None:
    with pytest.raises(ModelNotSupported):
        build_core(loaded(build("diffllama")), EngineSettings())
