"""Packed encoders against transformers' own forward, each text alone."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoConfig, AutoModel

from trio_llm.core.encoder import EncoderModel
from trio_llm.core.linear import speed_up_linears
from trio_llm.errors import ModelNotSupported

COMMON = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    # large enough that attention looks at something: with the usual 0.02 it averages
    "initializer_range": 0.3,
    "pad_token_id": 1,
}
ARCHITECTURES = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    "electra": {"embedding_size": 32},
    "albert": {"embedding_size": 16},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
    "nomic_bert": {"head_dim": 8},
    "eurobert": {"num_key_value_heads": 2, "head_dim": 8},
    # a decoder that is used as one is causal here too
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6},
}
TEXTS = [[5, 6, 7, 8, 9, 10, 11] * 3, [20], [30] * 13 + [3, 4, 5, 99], [150, 7, 150], [1, 1, 40, 1]]


def build(architecture, **overrides):
    """A random model in eval mode."""
    settings = {**COMMON, **ARCHITECTURES.get(architecture, {}), **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **settings)
        return AutoModel.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@functools.cache
def reference(architecture):
    """The hidden states of each text alone.  (A token that is the padding's is RoBERTa's to misplace.)"""
    model = build(architecture)
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([text])).last_hidden_state[0] for text in texts_for(architecture)]


def texts_for(architecture):
    return TEXTS[:-1] if "roberta" in architecture else TEXTS


def encoder(architecture, **options):
    model = build(architecture)
    speed_up_linears(model)
    return EncoderModel(model, **options)


POOLED = {
    "mean": lambda states: states.mean(0),
    "cls": lambda states: states[0],
    "lasttoken": lambda states: states[-1],
}


def check(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_alone_and_among_neighbours(architecture):
    texts = texts_for(architecture)
    packed = encoder(architecture, pooling="mean", normalize=False)
    packed.probe(64)
    expected = [POOLED["mean"](states) for states in reference(architecture)]
    for vector, own in zip(packed.embed(texts), expected, strict=True):
        check(vector, own)
    for vector, own in zip(packed.embed(texts[::-1]), expected[::-1], strict=True):
        check(vector, own)
    for text, own in zip(texts, expected, strict=True):
        (vector,) = packed.embed([text])
        check(vector, own)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", POOLED)
def test_pooling_and_dimensions(pooling, normalize):
    vectors = encoder("bert", pooling=pooling, normalize=normalize).embed(TEXTS, [None, 32, 8, 1, None])
    for vector, states, size in zip(vectors, reference("bert"), [32, 32, 8, 1, 32], strict=True):
        own = POOLED[pooling](states)
        if normalize or size < 32:
            own = torch.nn.functional.normalize(own[:size], dim=0)
        assert vector.shape == (size,) and vector.dtype is torch.float32
        check(vector, own)


def test_more_packed_tokens_than_positions():
    texts = [[10 + n, 11, 12, 13, 14] for n in range(60)]
    vectors = encoder("bert").embed(texts)
    check(vectors[59], encoder("bert").embed(texts[59:])[0])


def test_texts_that_see_each_other_are_refused(monkeypatch):
    packed = encoder("bert")
    packed.probe(64)
    attend = packed._attention.attend

    def attend_to_all(module, query, key, value, options):
        packed._attention.texts = [slice(0, query.shape[2])]
        return attend(module, query, key, value, options)

    monkeypatch.setattr(packed._attention, "attend", attend_to_all)
    with pytest.raises(ModelNotSupported, match="packed texts"):
        packed.probe(64)


@pytest.mark.parametrize("architecture", ["mpnet", "t5"])
def test_what_cannot_be_packed_is_refused(architecture):
    with pytest.raises(ModelNotSupported):
        encoder(architecture).probe(64)
