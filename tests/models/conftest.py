"""Small models in both forms, and the real one of the catalogue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from trio_llm.config import EngineSettings
from trio_llm.models.catalogue import resolve
from trio_llm.models.loader import LoadedModel, load_model

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
TINY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3": {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8, "num_hidden_layers": 7},
}


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    path = resolve("smollm2")
    assert isinstance(path, Path)
    return path


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    return load_model("smollm2", settings=EngineSettings(device="cpu"))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and one merge."""
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(TOKENS)}, merges=[("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        add_bos_token=True,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(architecture: str, **changes: Any) -> PreTrainedModel:
    """A model of random weights, all of them random: a norm of ones would hide a mistake."""
    fields = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    fields |= TINY.get(architecture, {}) | changes
    config = AutoConfig.for_model("gemma3_text" if architecture == "gemma3" else architecture, **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture
def make_directory(tmp_path: Path) -> Callable[..., Path]:
    """Saves a tiny model and its tokenizer as a Hugging Face directory."""

    def make(model: PreTrainedModel, name: str = "tiny") -> Path:
        path = tmp_path / name
        model.save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
        return path

    return make


@pytest.fixture(name="tiny_model")
def _tiny_model() -> Callable[..., PreTrainedModel]:
    return tiny_model


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny model as llama.cpp's converter would: its names, its changes to values."""

    def make(architecture: str, model: PreTrainedModel, **metadata: Any) -> Path:
        path = tmp_path / "tiny.gguf"
        config = model.config
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if architecture.startswith("gemma"):
            writer.add_sliding_window(config.sliding_window)
        if architecture != "gemma3":
            writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(metadata.pop("pre", "gpt-2"))
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
        writer.add_token_merges(["h e"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_chat_template(TEMPLATE)
        for key, value in metadata.pop("extra", {}).items():
            getattr(
                writer,
                f"add_{type(value).__name__.replace('str', 'string').replace('int', 'uint32').replace('float', 'float32')}",
            )(key, value)
        kind = metadata.pop("kind", gguf.GGMLQuantizationType.F32)
        for name, tensor in {**_gguf_tensors(architecture, model), **metadata.pop("tensors", {})}.items():
            quantized = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(tensor, quantized), raw_dtype=quantized)
        assert not metadata
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def _gguf_tensors(architecture: str, model: PreTrainedModel) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(
        {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture], model.config.num_hidden_layers
    )
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        value = parameter.float()
        if architecture == "llama" and (count := heads.get(stem.rpartition(".")[2])):
            value = value.view(count, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        if architecture.startswith("gemma") and stem.endswith("norm"):
            value = value + 1
        tensors[f"{names.get_name(stem)}.{suffix}"] = np.ascontiguousarray(value.numpy())
    return tensors
