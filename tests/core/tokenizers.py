"""Tokenizers of each kind that structured output works with, and one real one."""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trio_llm.models.catalogue import resolve
from trio_llm.models.gguf import GGUFFile
from trio_llm.models.gguf_tokenizer import build_tokenizer

SPECIAL = ["<unk>", "<s>", "</s>"]
END = 2


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """A token for each byte, and a few longer ones."""
    merges = [("t", "r"), ("u", "e"), ("tr", "ue"), ('"', ":"), ("}", "}"), (",", '"'), ("1", "2")]
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)


@functools.cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """Pieces with a mark for the blank before them, and bytes for what is in no piece, as Llama 2 has them."""
    pieces = ["▁", *map(chr, range(33, 127)), "▁t", "ru", "tr", "▁{", "é"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "t"), ("r", "u"), ("t", "r"), ("▁", "{")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)


@functools.cache
def smollm2() -> PreTrainedTokenizerBase:
    """That of the catalogue's model, made from its GGUF file; its end tokens are 0 and 2."""
    path = resolve("smollm2")
    assert isinstance(path, Path)
    return build_tokenizer(GGUFFile(path).metadata)
