"""What int8 costs in quality: `python bench/quality.py --model smollm2 text.txt ...`.

The texts are cut into windows, and each window is read three times: with the weights as they are, in
float32, with linear layers in int8 as `--quantization int8` computes them, and with keys and values in
bfloat16 as well, as the engine does by default.  Reported are the perplexity of each and how often the
last two would choose the same next token as the first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from report import arguments, write
from torch.nn import functional

from trio_llm.config import EngineSettings
from trio_llm.core.attention import SequenceSpan
from trio_llm.core.kernels import load
from trio_llm.core.model import PagedModel, SpanInput, num_probe_blocks
from trio_llm.core.page_attention import PageBackend
from trio_llm.core.quantization import quantize
from trio_llm.models.loader import load_model


def windows(tokenizer: Any, texts: Sequence[str], length: int, limit: int | None) -> list[torch.Tensor]:
    """The texts' tokens in windows of `length`, `limit` tokens at most; what is left of each text is dropped."""
    found: list[torch.Tensor] = []
    for text in texts:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        found += ids[: len(ids) // length * length].view(-1, length)
    return found[: limit // length] if limit else found


Model = Callable[[torch.Tensor], torch.Tensor]
"""The logits of a window's tokens."""


def own(model: Any) -> Model:
    """As transformers computes it."""

    def logits(part: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=part[None], use_cache=False).logits[0]
        return found

    return logits


def in_engine(model: Any, window: int) -> Model:
    """As the engine computes it, with pages in bfloat16."""
    kernels = load()
    assert kernels is not None, "there is no C++ compiler"
    paged = PagedModel(model, PageBackend(kernels), kv_dtype=torch.bfloat16)
    table = range(-(-window // paged.backend.block_size))
    paged.allocate(max(len(table), num_probe_blocks(paged.backend.block_size)))
    paged.fuse_layers()

    def logits(part: torch.Tensor) -> torch.Tensor:
        return paged.forward([SpanInput(part.tolist(), SequenceSpan(0, len(part), table))], range(len(part)))

    return logits


def read(model: Model, parts: Sequence[torch.Tensor]) -> tuple[float, torch.Tensor]:
    """The mean surprise of a token in nats, and the likeliest token at each place."""
    total, count, choices = 0.0, 0, []
    with torch.inference_mode():
        for part in parts:
            logits = model(part)
            total += functional.cross_entropy(logits[:-1], part[1:], reduction="sum").item()
            count += len(part) - 1
            choices.append(logits.argmax(-1))
    return total / count, torch.cat(choices)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, repeats=None)
    parser.add_argument("texts", type=Path, nargs="+", help="text files")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--max-tokens", type=int, help="tokens of text to read at most")
    args = parser.parse_args(argv)

    loaded = load_model(args.model, settings=EngineSettings(device="cpu", dtype="float32"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in args.texts]
    parts = windows(loaded.tokenizer, texts, args.window, args.max_tokens)
    if not parts:
        parser.error(f"the texts are shorter than a window of {args.window} tokens")
    exact, choices = read(own(loaded.model), parts)
    quantize(loaded.model, load())
    rounded, rounded_choices = read(own(loaded.model), parts)
    whole, whole_choices = read(in_engine(loaded.model, args.window), parts)
    figures = {
        "model": args.model,
        "tokens": sum(len(part) for part in parts),
        "window": args.window,
        "perplexity_float32": math.exp(exact),
        "perplexity_int8": math.exp(rounded),
        "perplexity_loss": math.exp(rounded - exact) - 1,
        "greedy_agreement": (choices == rounded_choices).double().mean().item(),
        "perplexity_int8_bfloat16_kv": math.exp(whole),
        "perplexity_loss_bfloat16_kv": math.exp(whole - exact) - 1,
        "greedy_agreement_bfloat16_kv": (choices == whole_choices).double().mean().item(),
    }
    for name, value in figures.items():
        print(f"{name:20} {value:.4f}" if isinstance(value, float) else f"{name:20} {value}")
    write(args, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
