"""Pieces of text joined are the full decode, whatever the tokenizer and wherever the tokens are cut."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trio_llm.engine.detokenizer import REPLACEMENT, Detokenizer, TokenDecoder

# letters of one to four bytes, emoji sequences with joiners, combining marks, a real U+FFFD, and what breaks words
ALPHABET = "ab Z.,'\n\t é한龜€😀👩‍🚀🇩🇪é\ufffd0"
texts = st.text(alphabet=st.one_of(st.sampled_from(ALPHABET), st.characters(codec="utf-8")), max_size=24)


@attrs.define
class Bytes:
    """A tokenizer whose tokens are given byte strings."""

    vocabulary: list[bytes]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self.vocabulary[token] for token in token_ids).decode(errors="replace")


def expected(decoder: TokenDecoder, prompt: list[int], output: list[int]) -> str:
    """The text of an output as a continuation of its prompt, by decoding everything at once."""
    before, whole = decoder.decode(prompt), decoder.decode(prompt + output)
    # a character that the prompt left incomplete belongs to the output that completes it
    return whole[len(before if whole.startswith(before) else before.rstrip(REPLACEMENT)) :]


def pieces(decoder: TokenDecoder, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = Detokenizer(decoder, prompt)
    return [*("".join(detokenizer.push(token)) for token in output), detokenizer.flush()]


@given(
    vocabulary=st.lists(st.one_of(st.binary(max_size=3), texts.map(str.encode)), min_size=1, max_size=8),
    prompt=st.lists(st.integers(0, 7), max_size=12),
    output=st.lists(st.integers(0, 7), max_size=60),
)
@example(vocabulary=[b"\xf0", b"\x9f", b"\x98", b"\x80"], prompt=[0, 1], output=[2, 3, 0, 1])
@example(vocabulary=[b"\xff"], prompt=[], output=[0] * 60)
@example(vocabulary=[b"\xf0\x9f\x98", b"a"], prompt=[1], output=[0] * 50)
@example(vocabulary=[b"", b"a"], prompt=[1], output=[0] * 40 + [1])
def test_any_bytes_in_any_tokens(vocabulary: list[bytes], prompt: list[int], output: list[int]) -> None:
    size = len(vocabulary)
    prompt, output = [token % size for token in prompt], [token % size for token in output]
    decoder = TokenDecoder(Bytes(vocabulary))
    assert "".join(pieces(decoder, prompt, output)) == expected(decoder, prompt, output)


@given(text=texts, cut=st.integers(0, 200))
def test_never_half_a_character(text: str, cut: int) -> None:
    output = list(text.encode())[:cut]
    decoder = TokenDecoder(Bytes([bytes([byte]) for byte in range(256)]))
    *given_, last = pieces(decoder, [], output)
    assert "".join([*given_, last]) == bytes(output).decode(errors="replace")
    complete = bytes(output).decode(errors="ignore")
    if REPLACEMENT not in text:
        assert "".join(given_) == complete
        assert last in ("", REPLACEMENT)


def trained(kind: str) -> Any:
    """A small tokenizer of a real kind, as transformers wraps it; each caller's own."""
    return copy.deepcopy(_trained(kind))


@functools.cache
def _trained(kind: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    corpus = ["the quick brown fox jumps over the lazy dog. ", "don't stop, it's fine", "Größe 한국어 naïve"] * 3
    special = ["<s>", "</s>", "<unk>"]
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special)
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence(
            ([normalizers.Prepend("▁")] if kind == "llama" else []) + [normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            + ([decoders.Strip(content=" ", left=1)] if kind == "llama" else [])
        )
        trainer = trainers.BpeTrainer(
            vocab_size=360, special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        )
    tokenizer.train_from_iterator(corpus, trainer)
    if kind in ("llama", "gemma"):
        # the byte tokens were special for the trainer only
        import json

        state = json.loads(tokenizer.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
        tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


KINDS = ["byte-level", "llama", "gemma", "wordpiece"]


def test_what_one_test_does_to_a_tokenizer_is_not_seen_by_others() -> None:
    made = trained("byte-level")
    made.chat_template = "mine"
    made.add_tokens(["<mine>"])
    assert trained("byte-level").chat_template is None
    assert len(trained("byte-level")) == len(made) - 1


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)  # the first call trains the tokenizer
@given(prompt_text=texts, text=texts, cut=st.integers(0, 100), prompt_cut=st.integers(0, 100))
def test_real_kinds(kind: str, prompt_text: str, text: str, cut: int, prompt_cut: int) -> None:
    tokenizer = trained(kind)
    prompt, output = tokenizer.encode(prompt_text)[:prompt_cut], tokenizer.encode(text)[:cut]
    decoder = TokenDecoder(tokenizer)
    joined = "".join(pieces(decoder, prompt, output))
    assert joined == expected(decoder, prompt, output)
    alone = "".join(pieces(decoder, [], output))
    assert alone == tokenizer.decode(output, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)  # the first call trains the tokenizer
@given(data=st.data())
def test_real_kinds_random_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = trained(kind)
    output = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=80))
    assert "".join(pieces(TokenDecoder(tokenizer), [], output)) == tokenizer.decode(output, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_some_special_tokens_can_be_kept(kind: str, data: st.DataObject) -> None:
    tokenizer = trained(kind)
    output = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    decoder = TokenDecoder(tokenizer, keep=[1])
    assert decoder.vanishing_ids == {0, 2}
    expected = tokenizer.decode([token for token in output if token not in (0, 2)], skip_special_tokens=False)
    assert "".join(pieces(decoder, [], output)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_kinds_are_what_they_say(kind: str) -> None:
    decoder = TokenDecoder(trained(kind))
    assert bool(decoder.byte_ids) == (kind in ("llama", "gemma"))
    assert decoder.vanishing_ids == {0, 1, 2}


def test_leading_space_of_a_continuation() -> None:
    """SentencePiece drops the first space of a text; of a continuation it is no first space."""
    tokenizer = trained("llama")
    decoder = TokenDecoder(tokenizer)
    prompt, output = tokenizer.encode("the quick"), tokenizer.encode("brown")
    assert "".join(pieces(decoder, prompt, output)) == " brown"
    assert "".join(pieces(decoder, [], output)) == "brown"


def test_characters_are_not_held_back() -> None:
    decoder = TokenDecoder(trained("byte-level"))
    output = trained("byte-level").encode("the fox é 😀.")
    given_ = list(itertools.accumulate(pieces(decoder, [], output)))
    for number, text in enumerate(given_[:-1], 1):
        assert text == decoder.decode(output[:number]).rstrip(REPLACEMENT)


def test_cost_of_a_token_is_bounded() -> None:
    """Every decode sees a small window, however long the output and however broken."""
    longest = 0

    class Counting(Bytes):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return Bytes.decode(self, token_ids, skip_special_tokens=skip_special_tokens)

    for vocabulary in ([b"a"], [b"\xff"], [b"\xf0\x9f\x98"], [b"\xf0", b"\x9f", b"\x98"]):
        decoder = TokenDecoder(Counting(vocabulary))
        pieces(decoder, [], [number % len(vocabulary) for number in range(2000)])
    assert longest <= 16


def test_text_of_a_byte_run_is_not_the_next_tokens() -> None:
    """So that a stop string in it ends the output at the right token."""
    tokenizer = trained("llama")
    detokenizer = Detokenizer(TokenDecoder(tokenizer), [])
    tokens = tokenizer.convert_tokens_to_ids(["a", "<0x0A>", "<0xE2>", "<0x82>", "<0xAC>", "b"])
    assert [detokenizer.push(token) for token in tokens] == [("", "a")] + [("", "")] * 4 + [("\n€", "b")]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_decoded_without_the_tokenizer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a text has begun: else the tokenizer is asked once a token, and again when the window is cut."""
    tokenizer = trained(kind)
    decoder = TokenDecoder(tokenizer)
    detokenizer = Detokenizer(decoder, tokenizer.encode("the lazy"))
    output = tokenizer.encode("dogs and foxes, é 😀 and 한국어, jump over it, and it jumps over them") * 3
    head = detokenizer.push(output[0])
    calls = []
    decode = decoder.decode

    def counted(token_ids: list[int]) -> str:
        calls.append(token_ids)
        return decode(token_ids)

    monkeypatch.setattr(decoder, "decode", counted)
    tail = [detokenizer.push(token) for token in output[1:]]
    assert "".join(itertools.chain(head, *tail, [detokenizer.flush()])) == expected(
        TokenDecoder(tokenizer), tokenizer.encode("the lazy"), output
    )
    assert (calls == []) == (kind == "byte-level")


@pytest.mark.parametrize("keep", [(), (1,)])
def test_special_tokens_of_byte_level_vocabularies(keep: tuple[int, ...]) -> None:
    tokenizer = trained("byte-level")
    tokenizer.add_tokens(["<a b>", "Ġ<plain>"])
    output = [*tokenizer.encode("é"), 1, len(tokenizer) - 2, 0, *tokenizer.encode("😀")[:2], 1, len(tokenizer) - 1, 9]
    for skip in (True, False):
        decoder = TokenDecoder(tokenizer, skip_special_tokens=skip, keep=keep)
        assert decoder.bytes_of is not None
        shown = [token for token in output if token not in decoder.vanishing_ids]
        assert "".join(pieces(decoder, [], output)) == tokenizer.decode(shown, skip_special_tokens=False)
