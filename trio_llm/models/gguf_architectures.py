"""From GGUF's names and numbers to those of transformers' model classes.

llama.cpp renames tensors and, for some architectures, changes their values: Llama's
query and key rows are interleaved for its rotary embedding, Gemma's norms have one
added.  A row of ARCHITECTURES says all of that for one architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from trio_llm.errors import ModelLoadError, ModelNotSupported

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from trio_llm.models.gguf import GGUFFile

_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = _DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_ROPE_FACTORS = "rope_freqs.weight"


def _keep(tensor: torch.Tensor, name: str, config: PreTrainedConfig) -> torch.Tensor:
    return tensor


def _llama(tensor: torch.Tensor, name: str, config: PreTrainedConfig) -> torch.Tensor:
    """Undo the interleaving of the two halves of each head's rows."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
    if heads is None:
        return tensor
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _gemma(tensor: torch.Tensor, name: str, config: PreTrainedConfig) -> torch.Tensor:
    """Take off the one that llama.cpp adds to norms.  Norms are float32 in the file, and stay exact in it."""
    return tensor - 1 if name.endswith("norm") else tensor


@attrs.frozen
class Architecture:
    """How one GGUF architecture becomes one of transformers' models."""

    model_type: str
    names: Mapping[str, str]
    """Of tensors, without layer number and suffix."""
    undo: Callable[[torch.Tensor, str, PreTrainedConfig], torch.Tensor] = _keep
    """What takes back the change that llama.cpp made to the values of a tensor."""


ARCHITECTURES = {
    "llama": Architecture("llama", _DECODER, _llama),
    "qwen2": Architecture("qwen2", _DECODER),
    "qwen3": Architecture("qwen3", _DECODER),
    "gemma2": Architecture("gemma2", _GEMMA, _gemma),
    "gemma3": Architecture("gemma3_text", _GEMMA, _gemma),
}


def build_config(file: GGUFFile) -> PreTrainedConfig:
    """The configuration of the model that the file holds.

    Raises:
        ModelNotSupported: another architecture, or a variant of one that would run wrongly.
        ModelLoadError: a necessary number is missing.
    """
    from transformers import AutoConfig
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    name = file.architecture
    if name not in ARCHITECTURES:
        raise ModelNotSupported(
            f"GGUF architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}. "
            f"A Hugging Face directory of the model may be"
        )
    values = _Values(file.metadata, name)
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise ModelNotSupported(
            f"the model is split over {parts} GGUF files; merge them first (llama-gguf-split --merge)"
        )
    if values.get("expert_count"):
        raise ModelNotSupported(f"GGUF files of {name} with experts are not supported; use a Hugging Face directory")

    mapping: Any = GGUF_CONFIG_MAPPING
    fields: dict[str, Any] = {}
    for key, field in mapping[name].items():
        if field is not None and (value := values.get(key)) is not None:
            fields[field] = value
    for key, field in mapping["tokenizer"].items():
        if field is not None and (value := file.metadata.get(f"tokenizer.{key}")) is not None:
            fields[field] = value
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if not isinstance(fields.get(field), int) or fields[field] < 1:  # some architectures have one a layer
            raise ModelLoadError(f"the GGUF file states no single {field}")
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.setdefault(field, None)  # the classes' own defaults are another model's

    heads = fields["num_attention_heads"]
    fields.setdefault("num_key_value_heads", heads)
    head_dim = values.get("attention.key_length", fields["hidden_size"] // heads)
    fields["head_dim"] = head_dim
    fields["vocab_size"] = _check_sizes(file, fields)
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    if values.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelNotSupported("rotary embeddings over a part of each head are not supported in GGUF files")
    if rope := _rope_scaling(values):
        fields["rope_scaling"] = rope
    if name == "gemma2":
        for field in ("attn_logit_softcapping", "final_logit_softcapping"):
            fields[field] = values.get(field, 50.0 if field.startswith("attn") else 30.0)
    if name.startswith("gemma"):
        # the two 27B models, known by their depth, scale by the width of a head as if heads filled the model
        wide = (name, fields["num_hidden_layers"]) in {("gemma2", 46), ("gemma3", 62)}
        fields["query_pre_attn_scalar"] = fields["hidden_size"] // heads if wide else head_dim
    if name == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    config: PreTrainedConfig = AutoConfig.for_model(ARCHITECTURES[name].model_type, **fields)
    return config


def read_weights(file: GGUFFile, config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every weight under transformers' name, as `dtype`.

    Raises:
        ModelNotSupported: the file has a tensor that this architecture is not known to have.
    """
    import torch

    architecture = ARCHITECTURES[file.architecture]
    weights: dict[str, torch.Tensor] = {}
    for full_name in file.tensors:
        if full_name == _ROPE_FACTORS:
            continue  # no weight: see rope_factors
        stem, _, suffix = full_name.rpartition(".")
        layer = _LAYER.fullmatch(stem)
        name = layer[2] if layer else stem
        if name not in architecture.names:
            raise ModelNotSupported(f"tensor {full_name!r} has no place in a {config.model_type} model")
        place = f"model.layers.{layer[1]}." if layer else ""
        # only one-dimensional tensors are changed in value, and those in the precision of the file
        wide = torch.float32 if len(file.tensors[full_name].shape) == 1 else dtype
        tensor = architecture.undo(file.read(full_name, wide), name, config).to(dtype)
        weights[f"{place}{architecture.names[name]}.{suffix}"] = tensor.contiguous()
    return weights


def rope_factors(file: GGUFFile) -> torch.Tensor | None:
    """What the rotary frequencies are divided by (Llama 3.1 and later), if anything."""
    import torch

    return file.read(_ROPE_FACTORS, torch.float32) if _ROPE_FACTORS in file.tensors else None


def _check_sizes(file: GGUFFile, fields: Mapping[str, Any]) -> int:
    """Refuse numbers that the tensors do not bear out, before anything of that size is built.

    Returns:
        The size of the vocabulary.
    """
    embedding = file.tensors.get("token_embd.weight")
    queries = file.tensors.get(f"blk.{fields['num_hidden_layers'] - 1}.attn_q.weight")
    hidden_size = fields["hidden_size"]
    if embedding is None or embedding.shape[1:] != (hidden_size,):
        raise ModelLoadError(f"the GGUF file has no token embedding (token_embd.weight) of width {hidden_size}")
    rows = fields["num_attention_heads"] * fields["head_dim"]
    if queries is None or queries.shape != (rows, hidden_size):
        raise ModelLoadError(
            f"the GGUF file states {fields['num_hidden_layers']} layers of {fields['num_attention_heads']} heads of "
            f"{fields['head_dim']}, but the tensors of its last layer are missing or of another size"
        )
    return embedding.shape[0]


def _rope_scaling(values: _Values) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelNotSupported(f"rope scaling of type {kind!r} is not supported")
    scaling = {"rope_type": kind, "factor": values.get("rope.scaling.factor", 1.0)}
    if kind == "yarn" and (length := values.get("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = length
    return scaling


@attrs.frozen
class _Values:
    """The metadata of one architecture, by keys without its name."""

    metadata: Mapping[str, Any]
    architecture: str

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)
