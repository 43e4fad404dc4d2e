"""Log-probabilities in the shapes of the API: chat's, the older one of completions, and vLLM's of prompts."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from trio_llm.core.step import TokenLogprobs
from trio_llm.engine.choice import Choice, Delta
from trio_llm.engine.token_bytes import TokenBytes
from trio_llm.server.openai.wire import ChatLogprobs, PromptLogprobs, TextLogprobs, TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def of_text(part: Delta | Choice) -> Sequence[TokenLogprobs]:
    """The log-probabilities of the tokens that are part of the text: all but an end token that is not shown."""
    return part.logprobs[:-1] if part.end_is_hidden else part.logprobs


def chat_logprobs(scored: Iterable[TokenLogprobs], tokens: TokenBytes) -> ChatLogprobs:
    """The shape of chat completions."""
    return ChatLogprobs(
        content=[
            {
                **_entry(entry.token_id, entry.logprob, tokens),
                "top_logprobs": [_entry(token, logprob, tokens) for token, logprob in entry.top],
            }
            for entry in scored
        ]
    )


def _entry(token_id: int, logprob: float, tokens: TokenBytes) -> TokenLogprob:
    token = tokens[token_id]
    data = None if token.bytes is None else list(token.bytes)
    return {"token": token.text, "logprob": max(logprob, LOWEST), "bytes": data}


class TextLogprobWriter:
    """The shape of completions, for one choice, in pieces.

    Every token has its place in it, the end token too: evaluation harnesses ask for an echo and one
    token, and drop the last place.

    Args:
        tokens: of the generation.
        text: what the answer's text begins with: the prompt if it is echoed.
    """

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._offset = 0
        # a token may begin inside a character: it stands where the character does
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, token_ids: Sequence[int], scored: Sequence[TokenLogprobs], text: str) -> TextLogprobs:
        """Those of a prompt that the answer repeats.

        Args:
            scored: of all tokens but the first.
            text: of the prompt.
        """
        spelled = b"".join(self._tokens[token].bytes or b"" for token in token_ids).decode(errors="replace")
        # SentencePiece begins a text with a space that is not in it
        self._offset = len(text) - len(spelled) if spelled.endswith(text) else 0
        first = self._tokens[token_ids[0]].text
        body = TextLogprobs(
            tokens=[first], token_logprobs=[None], top_logprobs=[None], text_offset=[self._advance(token_ids[0])]
        )
        self._write(scored, body)
        self._offset = len(text)
        self._decoder.reset()
        return body

    def write(self, scored: Sequence[TokenLogprobs], into: TextLogprobs | None = None) -> TextLogprobs:
        """Those of the next tokens.

        Args:
            into: what they are added to.
        """
        body = TextLogprobs() if into is None else into
        self._write(scored, body)
        return body

    def _write(self, scored: Sequence[TokenLogprobs], body: TextLogprobs) -> None:
        for entry in scored:
            body.tokens.append(self._tokens[entry.token_id].text)
            body.token_logprobs.append(max(entry.logprob, LOWEST))
            top: dict[str, float] = {}
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                # several tokens may have the same text: the likeliest stands for all
                top.setdefault(self._tokens[token_id].text, max(logprob, LOWEST))
            body.top_logprobs.append(top)
            body.text_offset.append(self._advance(entry.token_id))

    def _advance(self, token_id: int) -> int:
        before = max(self._offset, 0)
        self._offset += len(self._decoder.decode(self._tokens[token_id].bytes or b""))
        return before


def prompt_logprobs(scored: Iterable[TokenLogprobs], tokens: TokenBytes) -> PromptLogprobs:
    """vLLM's shape, of a prompt's tokens after the first.

    A token that is not among the likeliest has no rank: it is not known.
    """
    body: PromptLogprobs = [None]
    for entry in scored:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        body.append(
            {
                str(token): {
                    "logprob": max(logprob, LOWEST),
                    "rank": ranks.get(token),
                    "decoded_token": tokens[token].text,
                }
                for token, logprob in ((entry.token_id, entry.logprob), *entry.top)
            }
        )
    return body
