"""Token ids to text as they arrive, and the stop strings in it.

Never half a character, never a lost one: the pieces joined are what decoding all ids at
once gives.  A tokenizer only has to decode; what is special about it (tokens that vanish,
byte-fallback tokens) is found out once, by `TokenDecoder`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Any

from trio_llm.engine.byte_level import byte_level
from trio_llm.prompt.vocabulary import special_token_ids

REPLACEMENT = "\ufffd"
"""What an incomplete or wrong byte sequence decodes to."""

CONTEXT = 6
"""Tokens of text already given that stay in the window: a character has at most four
bytes, and a leading space is dropped only at the very start of a text."""
WINDOW = 12
"""Tokens in the window at which it is cut down to CONTEXT."""


class TokenDecoder:
    """A tokenizer's decode() and what is known about its vocabulary; one for each engine.

    Args:
        tokenizer: anything with `decode(ids, skip_special_tokens=...)`.
        skip_special_tokens: leave special tokens out of the text.
        keep: special tokens that are text even so.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True, keep: Collection[int] = ()) -> None:
        adds_nothing = _adds_nothing(tokenizer)
        self._decode: Callable[..., str] = tokenizer.backend_tokenizer.decode if adds_nothing else tokenizer.decode
        self.bytes_of = byte_level(tokenizer) if adds_nothing else None
        """The bytes of single tokens, where a text is the UTF-8 of its tokens' bytes and nothing else."""
        self._skip_special_tokens = skip_special_tokens
        special = special_token_ids(tokenizer)
        self.vanishing_ids = frozenset(token for token in special if self.decode([token]) == "").difference(keep)
        """Special tokens that are no text: those that skip_special_tokens leaves out."""
        if keep:
            # decode() leaves out all or none, so those that vanish must not be given to it
            self._skip_special_tokens = False
        self.byte_ids = self._find_byte_ids(tokenizer)
        """SentencePiece's byte-fallback tokens, if it has any."""

    def decode(self, token_ids: list[int]) -> str:
        """The text of these tokens."""
        text: str = self._decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The end of a prompt that its continuation must be decoded with."""
        context: list[int] = []
        for token in reversed(prompt_token_ids):
            # a run of byte tokens can only be decoded whole
            if len(context) >= CONTEXT and context[-1] not in self.byte_ids:
                break
            if token not in self.vanishing_ids:
                context.append(token)
        return context[::-1]

    def _find_byte_ids(self, tokenizer: Any) -> frozenset[int]:
        convert = getattr(tokenizer, "convert_tokens_to_ids", None)
        if convert is None:
            return frozenset()
        ids = convert([f"<0x{byte:02X}>" for byte in range(256)])
        if not all(isinstance(token, int) for token in ids):
            return frozenset()
        character = "€"
        works = self.decode([ids[byte] for byte in character.encode()]) == character
        return frozenset(ids) if works else frozenset()


def _adds_nothing(tokenizer: Any) -> bool:
    """Whether the tokenizer's decode only calls another, which takes a third of the time."""
    kind = type(tokenizer)
    return (
        getattr(tokenizer, "clean_up_tokenization_spaces", True) is False
        and getattr(kind.decode, "__qualname__", "") == "PreTrainedTokenizerBase.decode"
        and getattr(getattr(kind, "_decode", None), "__qualname__", "") == "TokenizersBackend._decode"
    )


_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one choice, piece by piece.

    The tokens are decoded in a small window that moves along; what is new is the part of
    the window's text that was not given before.  Held back is only what the next token can
    still change: a trailing incomplete character, or a run of byte-fallback tokens, which
    decode to characters or not at all as a whole.  Where a text is but the bytes of its tokens, these
    are decoded without a window, once the text has parted from the prompt.

    Args:
        decoder: of the engine.
        prompt_token_ids: what the choice continues.  A character that the prompt begins
            and the output completes belongs to the output.
    """

    def __init__(self, decoder: TokenDecoder, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._window = decoder.context(prompt_token_ids)
        self._prompt: list[int] | None = self._window.copy()
        """The prompt's part of the window; None once a piece was given."""
        self._num_given = 0
        """Characters of the window's text that were given."""
        self._limit = WINDOW
        self._utf8: codecs.IncrementalDecoder | None = None
        """Holds the bytes of an incomplete character; None while there is a window."""

    def push(self, token_id: int) -> tuple[str, str]:
        """Take the next token.

        Returns:
            Text of the tokens before it that only now is certain, and its own text as far
            as it is certain; either may be empty.
        """
        if token_id in self._decoder.vanishing_ids:
            return "", ""
        if self._utf8 is not None and self._decoder.bytes_of is not None:
            return "", self._utf8.decode(self._decoder.bytes_of[token_id])
        if token_id in self._decoder.byte_ids:
            self._window.append(token_id)
            return "", ""
        late = self.flush() if self._window and self._window[-1] in self._decoder.byte_ids else ""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        # of SentencePiece's tokens only the byte runs are uncertain
        is_open = text.endswith(REPLACEMENT) and not self._decoder.byte_ids
        piece = self._give(text, len(text) - is_open)
        if self._decoder.bytes_of is not None and self._prompt is None and not is_open:
            self._utf8 = _UTF8(errors="replace")
        elif len(self._window) >= self._limit:
            self._cut(text)
        return late, piece

    def flush(self) -> str:
        """The text held back, as it stands: no token will follow."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        text = self._decoder.decode(self._window)
        return self._give(text, len(text))

    def _give(self, text: str, end: int) -> str:
        if self._prompt is not None:
            before = self._decoder.decode(self._prompt)
            self._num_given = len(before if text.startswith(before) else before.rstrip(REPLACEMENT))
        piece = text[self._num_given : end]
        if piece:
            self._num_given = end
            self._prompt = None
        return piece

    def _cut(self, text: str) -> None:
        """Drop the front of the window, if what stays still decodes the same way."""
        held = text[self._num_given :]
        window = self._window[-CONTEXT:]
        tail = self._decoder.decode(window)
        if self._prompt is None and len(tail) > len(held) and tail.endswith(held):
            self._window = window
            self._num_given = len(tail) - len(held)
            self._limit = WINDOW
        else:
            # only invisible tokens or a long broken character: look again later
            self._limit = 2 * len(self._window)


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces.

    The first match is the one that is complete first, and of those that are complete at
    the same character the longest: so it depends on the text alone and not on where the
    tokens are cut.  Held back is exactly the longest end of the text that a stop string
    could begin with (Knuth, Morris and Pratt's automaton: constant time for a character).

    Args:
        stops: what ends the text.
        include_match: let the match itself be part of the text.
    """

    def __init__(self, stops: Sequence[str], *, include_match: bool = False) -> None:
        self._include_match = include_match
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self.match: str | None = None
        """The stop string that ended the text."""
        self._matched = [0] * len(self._stops)
        """For each stop string, how much of it the text ends with."""
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Take the next piece of text.

        Args:
            may_stop: whether a match that is complete in this piece ends the text.

        Returns:
            The text that can be given now, and whether a stop string ended it.
        """
        if not self._stops:
            return piece, False
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            longest = 0
            for number, (stop, borders) in enumerate(self._stops):
                length = self._matched[number]
                while length and stop[length] != character:
                    length = borders[length - 1]
                length += stop[length] == character
                if length == len(stop):
                    if may_stop:
                        longest = max(longest, length)
                    length = borders[-1]  # where it ends nothing, another may have begun in it
                self._matched[number] = length
            if longest:
                self._held = ""
                self.match = text[end - longest : end]
                return text[: end if self._include_match else end - longest], True
        # what will be given in any case need not be held back
        split = len(text) - (0 if self._include_match else max(self._matched))
        self._held = text[split:]
        return text[:split], False

    def flush(self) -> str:
        """The text held back: no stop string will come of it."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = borders[length - 1]
        length += stop[length] == stop[position]
        borders[position] = length
    return borders
