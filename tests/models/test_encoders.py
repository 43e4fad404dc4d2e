"""Which models are for embeddings, and what their files say of how vectors are made."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, BertTokenizerFast

from trio_llm.config import EngineSettings
from trio_llm.core.encoder import build_encoder
from trio_llm.errors import ConfigurationError, ModelLoadError, ModelNotSupported
from trio_llm.models.encoders import load_encoder, task_of

SETTINGS = EngineSettings(device="cpu")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def save(directory, architecture="bert", auto_class=AutoModel, **overrides):
    """A small random model with a tokenizer."""
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 32, **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class.from_config(AutoConfig.for_model(architecture, **sizes))
    model.save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(directory / "vocab.txt")).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("architectures", "modules", "task"),
    [
        (["LlamaForCausalLM"], None, "generate"),
        (["GPT2LMHeadModel"], None, "generate"),
        (["OpenAIGPTDoubleHeadsModel"], None, "generate"),
        (["Gemma3ForConditionalGeneration"], None, "generate"),
        ([], None, "generate"),
        (None, None, "generate"),
        (["BertModel"], None, "embed"),
        (["RobertaForMaskedLM"], None, "embed"),
        (["MistralModel"], None, "embed"),
        (["Qwen3ForCausalLM"], MODULES, "embed"),
    ],
)
def test_tasks(tmp_path, architectures, modules, task):
    write(tmp_path / "config.json", {"architectures": architectures})
    if modules is not None:
        write(tmp_path / "modules.json", modules)
    assert task_of(str(tmp_path)) == task


def test_tasks_of_the_catalogue():
    assert (task_of("smollm2"), task_of("all-minilm-l6-v2")) == ("generate", "embed")


def test_broken_files(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json of .* is not valid JSON"):
        task_of(str(tmp_path))


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (None, None, ("mean", True)),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean", False)),
        ([*MODULES, NORMALIZE], {"pooling_mode_cls_token": True}, ("cls", True)),
        (MODULES, {"pooling_mode_lasttoken": True, "include_prompt": True}, ("lasttoken", False)),
        (MODULES, {"pooling_mode": "cls"}, ("cls", False)),
        (MODULES, {"pooling_mode_max_tokens": True}, "max_tokens"),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "and"),
        (MODULES, {}, "not stated"),
        ([*MODULES, DENSE], {"pooling_mode_mean_tokens": True}, "Dense"),
        (MODULES[1:], {"pooling_mode_mean_tokens": True}, "steps Pooling"),
    ],
)
def test_pooling(tmp_path, modules, pooling, expected):
    save(tmp_path)
    if modules is not None:
        write(tmp_path / "modules.json", modules)
        write(tmp_path / "1_Pooling" / "config.json", pooling)
    if isinstance(expected, str):
        with pytest.raises(ModelNotSupported, match=expected):
            load_encoder(str(tmp_path), settings=SETTINGS)
    else:
        loaded = load_encoder(str(tmp_path), settings=SETTINGS)
        assert (loaded.pooling, loaded.normalize) == expected


@pytest.mark.parametrize(
    ("architecture", "stated", "wanted", "expected"),
    [
        ("bert", None, None, 32),
        ("bert", 8, None, 8),
        ("bert", 100, None, 32),
        ("bert", 8, 20, 20),
        ("bert", None, 33, ConfigurationError),
        ("roberta", None, None, 30),
    ],
)
def test_longest_text(tmp_path, architecture, stated, wanted, expected):
    save(tmp_path, architecture, pad_token_id=1)
    if stated is not None:
        write(tmp_path / "sentence_bert_config.json", {"max_seq_length": stated})
    settings = EngineSettings(device="cpu", max_model_len=wanted)
    if isinstance(expected, int):
        loaded = load_encoder(str(tmp_path), settings=settings)
        assert loaded.max_model_len == expected
        (vector,) = build_encoder(loaded).embed([[5] * expected])
        assert vector.shape == (16,)
    else:
        with pytest.raises(expected, match="33, but the model's context is 32"):
            load_encoder(str(tmp_path), settings=settings)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [({}, set()), ({"matryoshka_dimensions": [4, 8]}, {4, 8}), ({"is_matryoshka": True}, None)],
)
def test_dimensions(tmp_path, declared, expected):
    save(tmp_path, **declared)
    assert load_encoder(str(tmp_path), settings=SETTINGS).dimensions == expected


def test_a_head_is_left_off_and_no_pooler_is_missed(tmp_path):
    save(tmp_path, auto_class=AutoModelForMaskedLM)
    assert task_of(str(tmp_path)) == "embed"
    loaded = load_encoder(str(tmp_path), settings=SETTINGS)
    assert type(loaded.model).__name__ == "BertModel"
    assert loaded.tokenizer.encode("a b") == [2, 5, 6, 3]


def test_missing_weights_are_refused(tmp_path):
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", {**config, "num_hidden_layers": 2})
    with pytest.raises(ModelLoadError, match="weights are missing"):
        load_encoder(str(tmp_path), settings=SETTINGS)


def test_gguf_files_are_refused(tmp_path):
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ModelNotSupported, match="GGUF"):
        load_encoder(str(tmp_path / "some.gguf"), settings=SETTINGS)
