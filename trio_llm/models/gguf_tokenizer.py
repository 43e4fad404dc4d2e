"""The tokenizer and chat template that a GGUF file describes.

transformers has converters from GGUF metadata to its own tokenizers; they do the work
here, fed from our header.  They stop short in three places, which this module mends:

* Byte-level vocabularies whose text was split at every digit ("smollm" and its kin)
  get GPT-2's split from transformers.  The merges hide most of the difference, but not
  white space before a digit: the model learned "a", "  ", "1" where transformers makes
  "a", " ", " ", "1".
* A pre-tokenizer that nobody here knows also falls back to GPT-2's split without a
  word.  It is refused: a model that reads wrong tokens only seems to work.
* Llama 3 and Tekken vocabularies take a whole word that is in the vocabulary before
  they try merges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trio_llm.errors import ModelLoadError, ModelNotSupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_DIGIT_SPLIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_GPT2_SPLIT = frozenset({"default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais"})
_WHOLE_WORDS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
_LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe"})

_CONTROL = 3
_END_TOKENS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)
"""Control tokens that end a turn or a text in every vocabulary that has them."""

_PREFIX = "tokenizer.ggml."


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, with its chat template.

    Args:
        metadata: of the file's header.

    Raises:
        ModelNotSupported: a kind of tokenizer, or a pre-tokenizer, that is not known.
        ModelLoadError: the metadata contradict themselves.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    tokens = metadata.get(_PREFIX + "tokens")
    if not tokens:
        raise ModelLoadError("the GGUF file has no tokenizer (tokenizer.ggml.tokens)")
    parts = {
        ours: metadata[f"tokenizer.{theirs}"]
        for theirs, ours in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{theirs}" in metadata
    }
    kind, split = parts.get("tokenizer_type"), parts.get("pre_tokenizer_type", "default")
    try:
        backend, _ = convert_gguf_tokenizer(str(metadata["general.architecture"]), parts)
    except ValueError as error:
        raise ModelNotSupported(f"tokenizer of type {kind!r} is not supported: {error}") from error
    except KeyError as error:
        raise ModelLoadError(f"the GGUF file has no tokenizer.ggml.{error.args[0]}") from error
    if kind == "gpt2":
        _set_split(backend, split)

    def special(name: str) -> str | None:
        token_id = metadata.get(f"{_PREFIX}{name}_token_id")
        if token_id is None:
            return None
        if not 0 <= token_id < len(tokens):
            raise ModelLoadError(f"tokenizer.ggml.{name}_token_id is {token_id}, outside the vocabulary")
        return str(tokens[token_id])

    adds_bos = kind == "llama" or split in _LLAMA3  # where the file does not say
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special("bos"),
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        add_bos_token=bool(metadata.get(_PREFIX + "add_bos_token", adds_bos)),
        add_eos_token=bool(metadata.get(_PREFIX + "add_eos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,  # text must come back as the model wrote it
    )


def end_token_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Every token after which the model has nothing more to say.

    The file names one end of text and perhaps one end of turn.  Files made before there
    was a key for the turn lack the latter, so control tokens that mean it wherever
    they occur are added by their text.
    """
    named = (metadata.get(f"{_PREFIX}{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = metadata.get(_PREFIX + "tokens", [])
    types = metadata.get(_PREFIX + "token_type", [])
    by_text = (
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _END_TOKENS
    )
    return frozenset(token_id for token_id in (*named, *by_text) if token_id is not None)


def _set_split(backend: Tokenizer, split: str) -> None:
    """Cut text the way a byte-level vocabulary was trained, where transformers does not."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if split in _DIGIT_SPLIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif split not in _GPT2_SPLIT and split not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ModelNotSupported(
            f"pre-tokenizer {split!r} (tokenizer.ggml.pre) is not known, and a wrong one would feed the model wrong "
            f"tokens; use the model's Hugging Face directory instead"
        )
    if split in _WHOLE_WORDS_FIRST:
        backend.model.ignore_merges = True
