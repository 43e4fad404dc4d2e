"""A draft model is loaded beside its target, if it speaks the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from trio_llm import open_engine
from trio_llm.config import EngineSettings
from trio_llm.errors import ConfigurationError, ModelLoadError
from trio_llm.models.draft import load_draft_model
from trio_llm.models.loader import load_model

MakeDirectory = Callable[..., Path]
MakeModel = Callable[..., PreTrainedModel]


def settings_for(draft: Path | str) -> EngineSettings:
    return EngineSettings(
        device="cpu", speculative_method="draft_model", speculative_model=str(draft), max_num_seqs=4, revision="v1"
    )


def test_a_model_of_the_same_vocabulary(make_directory: MakeDirectory, tiny_model: MakeModel) -> None:
    target = load_model(str(make_directory(tiny_model("llama"), "large")), settings=EngineSettings(device="cpu"))
    # its embeddings are padded, and that is no difference
    draft = make_directory(tiny_model("qwen2", num_hidden_layers=1, vocab_size=320), "small")
    loaded = load_draft_model(target, settings_for(draft))
    assert loaded.name == "small"
    assert loaded.model.config.vocab_size == 320


@pytest.mark.parametrize("change", ["swapped", "added"])
def test_another_vocabulary_is_refused(change: str, make_directory: MakeDirectory, tiny_model: MakeModel) -> None:
    target = load_model(str(make_directory(tiny_model("llama"), "large")), settings=EngineSettings(device="cpu"))
    draft = make_directory(tiny_model("llama"), "small")
    path = draft / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    if change == "swapped":
        first, second = target.tokenizer.convert_ids_to_tokens([10, 11])
        text = text.replace(f'"{first}": 10', f'"{second}": 10').replace(f'"{second}": 11', f'"{first}": 11')
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigurationError, match="small has another vocabulary than large: 2 of 261 tokens differ"
                           ", the first is 10, ") as caught:  # fmt: skip
            load_draft_model(target, settings_for(draft))
        assert caught.value.field == "speculative_model"
    else:
        # a token behind the last is padding
        tokenizer = Tokenizer.from_str(text)
        tokenizer.add_tokens(["<|extra|>"])
        path.write_text(tokenizer.to_str(), encoding="utf-8")
        loaded = load_draft_model(target, settings_for(draft))
        assert len(loaded.tokenizer) == len(target.tokenizer) + 1


def test_one_that_is_not_there(make_directory: MakeDirectory, tiny_model: MakeModel, tmp_path: Path) -> None:
    target = load_model(str(make_directory(tiny_model("llama"), "large")), settings=EngineSettings(device="cpu"))
    with pytest.raises(ModelLoadError, match="draft model: ") as caught:
        load_draft_model(target, settings_for(tmp_path / "missing.gguf"))
    assert caught.value.field == "speculative_model"


async def test_an_engine_with_a_draft_model_gives_the_text_of_one_without(
    make_directory: MakeDirectory, tiny_model: MakeModel
) -> None:
    target = str(make_directory(tiny_model("llama"), "large"))
    draft = str(make_directory(tiny_model("llama"), "small"))
    texts = []
    for fields in ({}, {"speculative_method": "draft_model", "speculative_model": draft, "num_speculative_tokens": 4}):
        async with open_engine(target, device="cpu", max_num_seqs=4, **fields) as engine:
            async with engine.generate("hello", temperature=1.0, seed=3, max_tokens=60, ignore_eos=True) as generation:
                async for _ in generation:
                    pass
            texts.append(generation.text)
            core = await engine.settled()
            assert core.num_free_blocks == core.num_blocks
            assert core.num_accepted_tokens <= core.num_draft_tokens
    assert texts[0] == texts[1] != ""
