"""Which architectures run: the table in docs/models.md, made by running them.

Each decoder that transformers knows is built small, with random weights.  It goes through what a
model goes through when it is loaded (the gate and the probe), and if it is let in, the engine
generates with it: three prompts at once, in chunks, beside each other's decoding.  The logits of
every token are compared with those of a second copy of the model that computes each text by
itself, in one piece and with transformers' own attention.

    python docs/architectures.py            # run all, write the table
    python docs/architectures.py llama phi  # run these, print their rows
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trio_llm.config import EngineSettings
from trio_llm.core.attention import SdpaBackend
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.linear import speed_up_linears
from trio_llm.core.model import PagedModel
from trio_llm.core.request import Request
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import StepPlan
from trio_llm.core.torch_executor import TorchExecutor
from trio_llm.errors import ModelNotSupported

DOCUMENT = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- architectures: begin, written by docs/architectures.py -->", "<!-- architectures: end -->"

NOT_RUN = "Not run, since no small configuration was made of them (most read images or sound as well): "

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 64, 4
NUM_TOKENS = 10
PROMPTS = [[5, 6, 7, 8, 9, 10, 11] * 3, [20], [30] * 13 + [3, 4, 5, 99]]
MAX_PARAMETERS = 10**8

TOLERANCE = 1e-3
"""Largest difference of two logits, relative to the largest of them, of a model that runs rightly."""
BOUNDS = (1e-5, 1e-4, TOLERANCE)
"""What is written of a difference is the first of these that it is below: its digits differ from machine to machine."""

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # large enough that attention looks at something: with the usual 0.02 it averages
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # other names for the same
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 64,
    "rotary_dim": 8,
    "d_model": 32,
    "ffn_dim": 64,
    "num_layers": 4,
    "num_heads": 4,
    "word_embed_proj_dim": 32,
    "ffn_hidden_size": 64,
    # experts
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
"""Multi-head latent attention."""

WINDOW = 8
"""Tokens, for those that have a sliding window: fewer than the prompts."""

MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 8}
PER_LAYER: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160}

SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "sarvam_mla", "youtu"),
        LATENT,
    ),
    **dict.fromkeys(("bamba", "granitemoehybrid"), MAMBA),
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon": {"head_dim": ...},
    "gemma3_text": {"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    "gemma3n_text": {**PER_LAYER, "num_kv_shared_layers": 0, "laurel_rank": 8},
    "gemma4_text": {**PER_LAYER, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8, "attention_dropout": 0.0},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a configuration needs beside SMALL; `...` takes something away from it."""

ROPE: dict[str, Any] = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16}
LONG_FACTORS: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2 with convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "llama4_text without chunks": ("llama4_text", {"layer_types": ["full_attention"] * 4}),
    "llama4_text without chunks and temperature tuning": (
        "llama4_text",
        {"layer_types": ["full_attention"] * 4, "attn_temperature_tuning": False},
    ),
    "llama with dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}),
    "llama with yarn rope": ("llama", {"rope_parameters": {"rope_type": "yarn", **ROPE}}),
    "mixtral with a window": ("mixtral", {"sliding_window": WINDOW}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "phi3 with a window": ("phi3", {"sliding_window": WINDOW}),
    "phi3 with longrope": ("phi3", {"rope_parameters": {"rope_type": "longrope", **LONG_FACTORS, **ROPE}}),
    "qwen2 with a window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3_5_text without linear attention": ("qwen3_5_text", {"layer_types": ["full_attention"] * 4}),
    "qwen3_next without linear attention": ("qwen3_next", {"layer_types": ["full_attention"] * 4}),
}
"""Configurations that make a difference, beside an architecture's own defaults."""


@attrs.frozen
class Row:
    """What came of one architecture."""

    architecture: str
    model_class: str
    result: str
    """served, refused, wrong or not run"""
    difference: float | None = None
    remarks: str = ""

    def __str__(self) -> str:
        difference = "" if self.difference is None else f"below {bound(self.difference):.0e}"
        return f"| {self.architecture} | {self.model_class} | {self.result} | {difference} | {self.remarks} |"


def bound(difference: float) -> float:
    return next((limit for limit in BOUNDS if difference < limit), float("inf"))


def build(architecture: str) -> PreTrainedModel:
    """A small random model, the same every time."""
    model_type, changes = VARIANTS.get(architecture, (architecture, {}))
    settings = SMALL | SPECIAL.get(model_type, {}) | changes
    settings = {name: value for name, value in settings.items() if value is not ...}
    config = AutoConfig.for_model(model_type, **settings)
    if getattr(config, "sliding_window", None):
        config = AutoConfig.for_model(model_type, **settings | {"sliding_window": WINDOW})
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config, dtype=torch.float32).num_parameters()
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size} parameters, which is not small")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval().requires_grad_(False)
    return model


class Recorder(TorchExecutor):
    """Keeps the logits of every token, by sequence and output index."""

    def __init__(self, model: PagedModel) -> None:
        super().__init__(model, num_blocks=NUM_BLOCKS, max_model_len=128)
        self.logits: dict[tuple[int, int], Tensor] = {}

    def launch(self, plan: StepPlan) -> Any:
        handle = super().launch(plan)
        sampled = [row for row in plan.rows if row.sample]
        for row, logits in zip(sampled, handle.logits, strict=True):
            self.logits[row.sequence_id, row.output_index] = logits.clone()
        return handle


def run(architecture: str) -> Row:
    """Build an architecture, load it, and if it is let in generate with it."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[VARIANTS.get(architecture, (architecture,))[0]]
    try:
        model, own = build(architecture), build(architecture)
    except Exception as error:
        return Row(architecture, name, "not run", remarks=str(error))
    try:
        speed_up_linears(model)
        paged = PagedModel(model, SdpaBackend(CPU, BLOCK_SIZE))
        paged.allocate(NUM_BLOCKS)
        paged.probe()
    except ModelNotSupported as error:
        line = re.sub(r" \(relative difference [^)]*\)", "", error.message)
        return Row(architecture, name, "refused", remarks=line.removeprefix(type(model).__name__).strip())
    difference = generate_and_compare(paged, own)
    return Row(architecture, name, "served" if difference < TOLERANCE else "wrong", difference, remarks(paged))


def generate_and_compare(paged: PagedModel, own: PreTrainedModel) -> float:
    """The largest difference of a logit from the model's own, relative to the largest logit."""
    executor = Recorder(paged)
    core = EngineCore(executor, EngineSettings(max_num_seqs=3, max_num_batched_tokens=7))
    params = SamplingParams(temperature=0).resolved(SamplingParams(), max_tokens=NUM_TOKENS, seed=0)
    requests = [Request(str(number), prompt, params) for number, prompt in enumerate(PROMPTS)]
    for request in requests:
        core.add(request)
    while core.has_work():
        core.step()
        core.check()
    worst = 0.0
    for request in requests:
        (sequence,) = request.sequences
        ids = torch.tensor([sequence.token_ids[:-1]], dtype=torch.int64, device=CPU)
        with torch.inference_mode():
            expected = own(input_ids=ids, use_cache=False).logits[0, -NUM_TOKENS:]
        found = torch.stack([executor.logits[sequence.id, index] for index in range(NUM_TOKENS)])
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


def remarks(paged: PagedModel) -> str:
    """What is special about the attention, and whether there are experts."""
    config = paged.model.config.get_text_config()
    specs = paged.specs
    sliding = [spec.sliding_window is not None for spec in specs]
    softcap = getattr(config, "attn_logit_softcapping", None)
    found = {
        "sliding window in every layer": all(sliding),
        "sliding window in some layers": any(sliding) and not all(sliding),
        "soft-capped scores": softcap is not None,
        "attention sinks": softcap is None and not all(spec.is_plain for spec in specs),
        "latent attention (expanded in the cache)": hasattr(config, "kv_lora_rank") and bool(config.kv_lora_rank),
        "heads of several sizes": len({(spec.num_kv_heads, spec.key_dim) for spec in specs}) > 1,
        "experts": any(child.endswith("experts") for child, _ in paged.model.named_modules()),
    }
    return ", ".join(remark for remark, holds in found.items() if holds)


def table(rows: Sequence[Row]) -> str:
    served, refused, rest = (
        sorted((row for row in rows if row.result == result), key=lambda row: row.architecture)
        for result in ("served", "refused", "not run")
    )
    versions = f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]}"
    lines = [
        f"Run with {versions}: {len(served)} served, {len(refused)} refused, {len(rest)} not run.",
        "",
        "| Architecture | Class | Result | Difference | Remarks |",
        "|---|---|---|---|---|",
        *map(str, served + refused),
        "",
        f"{NOT_RUN}{', '.join(row.architecture for row in rest)}.",
    ]
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    transformers.logging.set_verbosity_error()
    rows = [run(name) for name in names or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]]
    wrong = [row for row in rows if row.result == "wrong"]
    for row in wrong if not names else rows:
        print(row)
    if wrong:
        print(f"{len(wrong)} run wrongly and are not refused", file=sys.stderr)
        return 1
    if not names:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
