"""Tokenizers from GGUF metadata, against transformers' own reading of the same file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trio_llm.config import EngineSettings
from trio_llm.errors import ModelLoadError, ModelNotSupported
from trio_llm.models.gguf_tokenizer import build_tokenizer, end_token_ids
from trio_llm.models.loader import LoadedModel, load_model

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces  and\ttabs\t\tand\n\nlines \r\n  ",
    "It's what we'll see: they're, I'd, you've, O'Neill'S",
    "naïve café, Ünïcödé, ﬁligature, e\u0301 and é",
    "日本語のテキストと中文文本。한국어도",
    "Привет, мир! שלום עולם مرحبا بالعالم",
    "👩‍👩‍👧‍👦 🎉 🇩🇪 emoji\ufe0f",
    "\u200b\u00a0zero width and nbsp\u2028",
    "def f(x):\n    return {'a': [x, x**2], \"b\": None}  # comment\n",
    '<div class="x">&nbsp;</div>',
    "SELECT * FROM t WHERE a <> 'b' AND c >= ?;",
    "1234567890 12.5e-3 3rd 0x1F v2.0.1",
    "The year 1999, page 7 of 120",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|im_end|>x<|im_start|> y <|im_end|>",
    "<repo_name>a<file_sep>b<jupyter_code>c",
    "not special: <|im_|> <|im_end| > < |endoftext|>",
    "word" * 200,
    "\x00\x01\x7f control",
    "[INST] x [/INST] <s> </s> <unk>",
]
MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Count 1 to 3,\n  please."},
    {"role": "assistant", "content": "1 2 3"},
    {"role": "user", "content": "Thanks 🙏"},
]


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    return tokenizer


@pytest.mark.parametrize("text", CORPUS)
def test_smollm2_agrees_with_transformers(text: str, smollm2: LoadedModel, theirs: PreTrainedTokenizerBase) -> None:
    ids = smollm2.tokenizer(text)["input_ids"]
    assert ids == theirs(text)["input_ids"]
    assert smollm2.tokenizer.decode(ids) == text
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_smollm2_has_the_vocabulary_and_template_of_transformers(
    smollm2: LoadedModel, theirs: PreTrainedTokenizerBase
) -> None:
    ours = smollm2.tokenizer
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.chat_template == theirs.chat_template
    for prompt in (False, True):
        assert ours.apply_chat_template(MESSAGES, add_generation_prompt=prompt, return_dict=False) == (
            theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, return_dict=False)
        )


@pytest.mark.parametrize("text", ["x  1", "\n\n2024", "sum = \t7", "    42", "a ½", "١٢ ٣"])
def test_smollm2_splits_at_digits_as_it_was_trained(text: str, smollm2: LoadedModel) -> None:
    """Where transformers' reading of the file is not the model's: see the module's docstring."""
    tokenizer = smollm2.tokenizer
    pieces = re.findall(r"\d|½|[^\d½]+", text)
    expected = [token for piece in pieces for token in tokenizer(piece)["input_ids"]]
    assert tokenizer(text)["input_ids"] == expected
    assert tokenizer.decode(expected) == text


def test_a_bos_is_added_when_the_file_says_so(
    tiny_model: Callable[..., Any], make_gguf: Callable[..., Path], smollm2: LoadedModel
) -> None:
    tokenizer = load_model(
        str(make_gguf("llama", tiny_model("llama"))), settings=EngineSettings(device="cpu")
    ).tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("hex")["input_ids"]) == ["<s>", "he", "x"]
    assert tokenizer("a", add_special_tokens=False)["input_ids"] == tokenizer("a")["input_ids"][1:]
    assert smollm2.tokenizer("a")["input_ids"] == smollm2.tokenizer("a", add_special_tokens=False)["input_ids"]


def byte_level(**changes: Any) -> dict[str, Any]:
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<|endoftext|>", "a", "b", "c", "ab", "abc", "<|eot_id|>", "<think>"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def test_llama_3_takes_whole_words_and_a_bos() -> None:
    tokenizer = build_tokenizer(byte_level(**{"tokenizer.ggml.pre": "llama-bpe"}))
    assert tokenizer.convert_ids_to_tokens(tokenizer("abc")["input_ids"]) == ["<|endoftext|>", "abc"]
    tokenizer = build_tokenizer(byte_level())
    assert tokenizer.convert_ids_to_tokens(tokenizer("abc")["input_ids"]) == ["ab", "c"]


def test_tokens_of_the_user_are_whole_but_not_special() -> None:
    tokenizer = build_tokenizer(byte_level())
    assert tokenizer.convert_ids_to_tokens(tokenizer("a<think>b")["input_ids"]) == ["a", "<think>", "b"]
    assert tokenizer.decode([7, 6], skip_special_tokens=True) == "<think>"


def test_a_sentencepiece_vocabulary() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-9.0, -8.0, -7.0, -3.0, -2.0, -1.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab é")["input_ids"]) == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer("ab é")["input_ids"], skip_special_tokens=True) == "ab é"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokenizer.ggml.tokens": None}, ModelLoadError, "has no tokenizer"),
        ({"tokenizer.ggml.merges": None}, ModelLoadError, "has no tokenizer.ggml.scores"),
        ({"tokenizer.ggml.eos_token_id": 99}, ModelLoadError, "eos_token_id is 99, outside the vocabulary"),
        ({"tokenizer.ggml.model": "rwkv"}, ModelNotSupported, "tokenizer of type 'rwkv' is not supported"),
        ({"tokenizer.ggml.pre": "tomorrow"}, ModelNotSupported, "pre-tokenizer 'tomorrow'"),
    ],
)
def test_tokenizers_that_cannot_be_right_are_refused(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        build_tokenizer(byte_level(**changes))


def test_end_tokens_are_those_named_and_those_known() -> None:
    assert end_token_ids(byte_level()) == {0, 6}
    assert end_token_ids(byte_level(**{"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 4})) == {
        0,
        3,
        4,
        6,
    }
    assert end_token_ids(byte_level(**{"tokenizer.ggml.token_type": [1] * 8})) == {0}
    assert end_token_ids({}) == frozenset()
