"""Models of random weights in the shape of known ones, and what a decode step of them must read.

Deciding the next token of a few sequences is bound by memory: all weights are read, and the keys and values of every
sequence.  How near a step comes to the time of that alone says how much of it is anything else.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import attrs

from trio_llm.config import EngineSettings
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.engine.simulation import ByteTokenizer
from trio_llm.models.loader import LoadedModel, resolve_device, resolve_dtype

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
SHAPES = {"llama-8b": LLAMA_3_8B, "tiny": TINY}

COPIED = {"cuda": 2**30, "cpu": 2**26}
"""Bytes of a copy that is to show how fast memory is: more than any cache holds."""
COPIES = 10
"""In a row, so that the wait for the last of them counts for little."""


def build(shape: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A Llama, made where and as it is to be: a GPU's model need not fit into the memory beside it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # small weights: with the usual 0.02 what is rounded to bfloat16 grows from layer to layer of a random model, and the
    # probe would refuse it
    config = AutoConfig.for_model("llama", **SHAPES[shape], tie_word_embeddings=False, initializer_range=0.005)
    torch.manual_seed(0)
    auto_class: Any = AutoModelForCausalLM
    with device:
        model: PreTrainedModel = auto_class.from_config(config, dtype=dtype)
    model.eval().requires_grad_(False)
    return model


def random_model(shape: str, settings: EngineSettings) -> LoadedModel:
    """What the loader gives, but of no file and with a token for each byte."""
    began = time.monotonic()
    device = resolve_device(settings)
    model = build(shape, device, resolve_dtype(settings, device))
    return LoadedModel(
        name=shape,
        model=model,
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        defaults=SamplingParams(),
        eos_token_ids=frozenset(),
        max_model_len=SHAPES[shape]["max_position_embeddings"],
        load_seconds=time.monotonic() - began,
    )


def weight_bytes(model: PreTrainedModel) -> int:
    """Of the weights that every step reads: all but the embeddings, of which it reads a row for each token."""
    embedding = model.get_input_embeddings().weight
    return sum(weight.nbytes for weight in model.parameters() if weight is not embedding)


def copy_speed(device: torch.device) -> float:
    """Bytes a second that a large copy within a device's memory reads and writes, together; the best of five."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    target = source.clone()
    best = math.inf
    for _ in range(5):
        wait()
        began = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source)
        wait()
        best = min(best, time.perf_counter() - began)
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()  # keys and values get what is free
    return 2 * COPIED[device.type] * COPIES / best


FIGURES = ("bytes_read", "bytes_per_second", "share_of_copy_speed")
"""What `Reading.figures` gives."""


@attrs.frozen
class Reading:
    """What a step must read, and how fast that could be."""

    weights: int
    """Bytes, once a step."""
    per_token: int
    """Bytes of the keys and values of a token of a sequence's context, in all layers."""
    copy_speed: float
    """Bytes a second."""

    def figures(self, num_tokens: int, seconds: float) -> dict[str, float]:
        """Of a step in which the sequences together attend to so many tokens."""
        num_bytes = self.weights + self.per_token * num_tokens
        speed = num_bytes / seconds
        return dict(zip(FIGURES, (num_bytes, speed, speed / self.copy_speed), strict=True))
