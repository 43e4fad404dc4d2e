"""Choice: one continuation of a prompt, how it grows, and where in its tokens it ends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import attrs

from trio_llm.core.request import FinishReason
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import SequenceOutput, TokenLogprobs
from trio_llm.engine.detokenizer import Detokenizer, StopMatcher, TokenDecoder


@attrs.frozen
class Delta:
    """What is new for one choice.

    The text may be empty while it is held back, and lags behind the tokens then.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the choice's last delta."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of token_ids, where the request asks for them."""

    end_is_hidden: bool = False
    """Whether the last of token_ids is an end token that is no part of the text."""
    stop_string: str | None = None
    """Which of the stop strings ended the choice, where one did."""
    texts: tuple[str, ...] = ()
    """What of the text came with each of token_ids, where these are several."""

    def by_token(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The text in as many parts as there are tokens, each with its own."""
        if self.texts:
            for text, token in zip(self.texts, self.token_ids, strict=True):
                yield text, (token,)
        else:
            yield self.text, self.token_ids


@attrs.define(eq=False)
class Choice:
    """One continuation of the prompt, as far as it was made."""

    index: int
    token_ids: list[int] = attrs.field(factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    """One for each of token_ids, where the request asks for them."""
    end_is_hidden: bool = False
    """Whether the last of token_ids is an end token that is no part of the text."""
    stop_string: str | None = None
    """Which of the stop strings ended it, where one did."""
    _pieces: list[str] = attrs.field(factory=list)

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces[:] = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def extend(self, delta: Delta) -> None:
        """Take in what is new."""
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.end_is_hidden = delta.end_is_hidden
        self.stop_string = delta.stop_string
        if delta.text:
            self._pieces.append(delta.text)


class Track:
    """A choice in the making: its text so far and its credit."""

    def __init__(self, choice: Choice, decoder: TokenDecoder, prompt_token_ids: list[int], params: SamplingParams):
        self.choice = choice
        self.num_ahead = 0
        """Tokens that the core gave and that were not acknowledged."""
        self.num_taken = 0
        """Of these, what the reader took."""
        self.last_output: float | None = None
        self._detokenizer = Detokenizer(decoder, prompt_token_ids)
        self._matcher = StopMatcher(params.stop, include_match=params.include_stop_str_in_output)
        self._has_stops = bool(params.stop)
        self._shows_end = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens

    def absorb(self, output: SequenceOutput) -> Delta:
        """What an output of the core means for the reader: its tokens up to the first end."""
        pieces: list[str] = []
        borders: list[int] = []
        """Where in pieces those of each token begin."""
        reason = None
        num_kept = 0
        end_is_hidden = False
        ends = output.finish_reason is FinishReason.STOP
        for token in output.token_ids:
            num_kept += 1
            borders.append(len(pieces))
            if ends and num_kept == len(output.token_ids) and not self._shows_end:
                end_is_hidden = True
                break  # an end token is counted, but it is no text
            late, own = self._detokenizer.push(token)
            if not self._has_stops:
                pieces += (late, own)
                continue
            num_before = len(self.choice.token_ids) + num_kept - 1
            piece, stopped = self._matcher.push(late, may_stop=self._may_stop(num_before))
            pieces.append(piece)
            if stopped:
                num_kept -= 1
            else:
                piece, stopped = self._matcher.push(own, may_stop=self._may_stop(num_before + 1))
                pieces.append(piece)
            if stopped:
                reason = FinishReason.STOP
                break
        if reason is None and output.finish_reason is not None:
            tail, stopped = self.flush(num_kept)
            pieces.append(tail)
            reason = FinishReason.STOP if stopped else output.finish_reason
        texts: tuple[str, ...] = ()
        if num_kept > 1:
            bounds = [*borders[:num_kept], len(pieces)]
            texts = tuple("".join(pieces[begin:end]) for begin, end in pairwise(bounds))
        return Delta(
            self.choice.index,
            "".join(pieces),
            output.token_ids[:num_kept],
            reason,
            output.logprobs[:num_kept],
            end_is_hidden,
            self._matcher.match,
            texts,
        )

    def flush(self, num_new: int = 0) -> tuple[str, bool]:
        """The text held back, now that no token follows, and whether a stop string ends it.

        Args:
            num_new: tokens that the choice does not have yet.
        """
        may_stop = self._may_stop(len(self.choice.token_ids) + num_new)
        text, stopped = self._matcher.push(self._detokenizer.flush(), may_stop=may_stop)
        return (text, True) if stopped else (text + self._matcher.flush(), False)

    def _may_stop(self, num_tokens: int) -> bool:
        """Whether a stop string that is complete with so many tokens ends the choice."""
        return num_tokens > self._min_tokens or self._min_tokens == 0
