"""What tests of parsers share: cutting texts, and tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trio_llm.prompt.events import Event, joined


def parse(make: Callable[[], Any], pieces: Sequence[str]) -> list[Event]:
    """The events of a text in pieces, with neighbours joined."""
    parser = make()
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


@pytest.fixture
def check_every_cut() -> Callable[[Callable[[], Any], str], list[Event]]:
    """check_every_cut(make, text): cut into single characters and into two, a text gives what it gives whole; that."""

    def check(make: Callable[[], Any], text: str) -> list[Event]:
        whole = parse(make, [text])
        assert parse(make, list(text)) == whole
        for cut in range(len(text)):
            assert parse(make, [text[:cut], text[cut:]]) == whole
        return whole

    return check


def _byte_tokenizer(
    *, special: Sequence[str] = (), added: Sequence[str] = (), template: str | None = None
) -> PreTrainedTokenizerFast:
    """A token for each byte, an end token, and further tokens, special or not."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", *special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)


ByteTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(scope="session")
def byte_tokenizer() -> ByteTokenizer:
    """byte_tokenizer(special=[...], added=[...], template=...): a tokenizer of bytes."""
    return _byte_tokenizer
