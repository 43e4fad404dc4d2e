"""Speculation: how many of a drafter's guesses a step verifies.

A draft costs time: it is one more token in the step, and guessing it may take a forward of
another model.  How much, say cost curves that are measured when the models are loaded; what
it brings, says a running estimate of how often guesses are right.  Each step takes the
drafts that make the most tokens a second, and none if none do: in a large batch, where every
token costs, and in text that cannot be guessed.

Guesses are judged whether they are drafted or not, by comparing them with the tokens that
came.  Guesses that cost nothing are made all the time, so a sequence that cannot be guessed
costs no model time at all, and one that begins to repeat itself is noticed at once.  Those
that cost something are made where they pay; where none do, one is made now and then to see
whether it is still so, paid from PROBE_SHARE of the time that steps take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import attrs
import structlog

from trio_llm.config import EngineSettings
from trio_llm.core.drafter import Drafter, NgramDrafter
from trio_llm.core.request import Sequence
from trio_llm.core.step import SamplingTask
from trio_llm.core.step_costs import StepCosts
from trio_llm.errors import ConfigurationError

logger = structlog.get_logger(__name__)

MARGIN = 0.05
"""By how much a step with drafts must promise to be better; less is not worth an error of the estimates."""

LEARNING_RATE = 1 / 8
"""Weight of the newest guess in what is known of its sequence ..."""
COMMON_LEARNING_RATE = 1 / 32
"""... and of all sequences: one that was right by chance may not have all others caught up on."""

PROBE_SHARE = 0.015
"""Of the time that steps take: what may be spent to see whether guesses that do not pay would do so by now."""

STAKE = 4.0
"""Steps of one token: what may be saved up for that, and is there at the start."""

MEMORY = 64
"""Tokens without a guess after which a sequence is taken to be like all others again; and the
most over which it is reckoned that a drafter's backlog is spread."""

PAUSE = 16
"""Steps without drafts after guesses failed through no one's fault, as where memory ran out."""


@attrs.define(eq=False)
class _Record:
    """What is known of the guesses for one sequence."""

    guess: Seq[int] = ()
    guessed_at: int = 0
    """Tokens of the sequence when the guess was made."""
    streak: int = 0
    """Guesses that were right, one after another."""
    chances: list[float] = attrs.field(factory=list)
    """Of a guess to be right, by the streak before it; empty until one was judged."""
    is_off: bool = False

    def judged(self, tokens: Seq[int]) -> Iterable[tuple[int, bool]]:
        """Compare the guess with what came: of each guess that can be judged the streak before it, and whether
        it was right."""
        for guess, token in zip(self.guess, tokens[self.guessed_at :], strict=False):
            yield self.streak, guess == token
            self.streak = self.streak + 1 if guess == token else 0
            if guess != token:
                break
        self.guess = ()


def _bucket(streak: int, chances: Seq[float]) -> int:
    return min(streak.bit_length(), len(chances) - 1)


def _learn(chances: list[float], streak: int, is_right: bool, rate: float) -> None:
    bucket = _bucket(streak, chances)
    chances[bucket] += rate * (is_right - chances[bucket])


class Speculation:
    """A drafter, and how far to trust it.

    Args:
        drafter: makes the guesses.
        max_tokens: the most that are drafted for one sequence in one step.
        vocab_size: guesses outside of it are the drafter's failure.
        costs: what steps cost.
    """

    def __init__(self, drafter: Drafter, *, max_tokens: int, vocab_size: int, costs: StepCosts | None = None) -> None:
        self.drafter = drafter
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size
        self.costs = costs or StepCosts()
        self._chances = list(drafter.prior)
        """Of guesses for a sequence of which nothing is known."""
        self._records: dict[int, _Record] = {}
        self._savings = self._most_savings = STAKE * self.costs(1)
        """Time that may be spent on a guess that does not pay."""
        self._num_paused_steps = 0

    def admit(self, sequence_id: int, task: SamplingTask) -> None:
        """Prepare for a new sequence."""
        self._records[sequence_id] = _Record()
        self.drafter.admit(sequence_id, task)

    def propose(
        self, decoding: Seq[tuple[Sequence, int]], num_tokens: int, room: int, reserve: Callable[[Sequence, int], int]
    ) -> None:
        """Give the sequences their `draft_token_ids` for the next step.

        Args:
            decoding: sequences with one token to compute, and the most drafts that each can use.
            num_tokens: tokens of the step without drafts.
            room: drafts that the step's budget has room for.
            reserve: takes blocks for a number of drafts of a sequence; gives the number that has blocks.
        """
        self._savings = min(self._savings + PROBE_SHARE * self.costs(num_tokens), self._most_savings)
        for sequence, _ in decoding:
            sequence.draft_token_ids = []
            self._records[sequence.id].guess = ()
        if self._num_paused_steps:
            self._num_paused_steps -= 1
            return
        decoding = [(sequence, most) for sequence, most in decoding if not self._records[sequence.id].is_off]
        chosen = self._choose(decoding, num_tokens, room)
        chosen = [(sequence, reserve(sequence, count)) for sequence, count in chosen]
        if self.drafter.costs is None:
            wanted = [(sequence, self.max_tokens) for sequence, _ in decoding]
        else:
            wanted = [(sequence, count) for sequence, count in chosen if count] or self._probe(decoding)
        if wanted and not self._guess(wanted):
            self._num_paused_steps = PAUSE
        for sequence, count in chosen:
            sequence.draft_token_ids = list(self._records[sequence.id].guess[:count])

    def observe(self, sequence: Sequence, block_copies: Seq[tuple[int, int]] = ()) -> None:
        """A step took the sequence further, after it copied blocks (source, destination) for it."""
        record = self._records[sequence.id]
        if record.is_off:
            return
        for streak, is_right in record.judged(sequence.token_ids):
            record.chances = record.chances or list(self._chances)
            _learn(record.chances, streak, is_right, LEARNING_RATE)
            if self.drafter.costs is not None:
                # a model is right about as often in all texts; what was said before is said again in some
                _learn(self._chances, streak, is_right, COMMON_LEARNING_RATE)
        try:
            self.drafter.observe(sequence, block_copies)
        except Exception as error:
            self.turn_off(sequence, error)

    def turn_off(self, sequence: Sequence, error: Exception) -> None:
        """No drafts for this sequence any more: they failed, or it did with them."""
        logger.warning("drafting failed, off", request_id=sequence.request.id, index=sequence.index, error=repr(error))
        record = self._records[sequence.id]
        record.is_off, record.guess = True, ()

    def release(self, sequence_id: int) -> None:
        """Forget a sequence; idempotent."""
        if self._records.pop(sequence_id, None) is not None:
            self.drafter.release(sequence_id)

    def close(self) -> None:
        """Close the drafter; idempotent."""
        self.drafter.close()

    def _choose(self, decoding: Seq[tuple[Sequence, int]], num_tokens: int, room: int) -> list[tuple[Sequence, int]]:
        """How many guesses for which sequences make the most tokens for the time."""
        candidates: list[tuple[float, int, int]] = []
        backlogs: dict[int, float] = {}
        for place, (sequence, most) in enumerate(decoding):
            reaches = list(self._reaches(sequence, min(most, self.max_tokens)))
            backlog = self.drafter.backlog(sequence) if reaches else None
            if backlog is not None:
                backlogs[place] = self._spread(backlog, most)
                candidates += [(-reach, place, depth) for depth, reach in enumerate(reaches)]
        # the chances fall along a sequence, so the best few of all are a beginning of each
        candidates.sort()
        best, best_speed = 0, (1 + MARGIN) * num_tokens / self.costs(num_tokens)
        expected, drafting = float(num_tokens), 0.0
        forwards = [0.0] * self.max_tokens
        """Tokens in each of the drafter's forwards: one makes a guess for every sequence."""
        for count, (reach, place, depth) in enumerate(candidates[:room], start=1):
            expected -= reach
            if self.drafter.costs is not None:
                before = self.drafter.costs(forwards[depth]) if forwards[depth] else 0.0
                forwards[depth] += 1 if depth else backlogs[place]
                drafting += self.drafter.costs(forwards[depth]) - before
            speed = expected / (self.costs(num_tokens + count) + drafting)
            if speed > best_speed:
                best, best_speed = count, speed
        counts: dict[int, int] = {}
        for _, place, _ in candidates[:best]:
            counts[place] = counts.get(place, 0) + 1
        return [(decoding[place][0], count) for place, count in counts.items()]

    def _reaches(self, sequence: Sequence, most: int) -> Iterable[float]:
        """For each of so many guesses the chance that it and all before it are right, while it counts."""
        record = self._records[sequence.id]
        is_known = record.chances and (self.drafter.costs is None or sequence.num_tokens - record.guessed_at <= MEMORY)
        chances = record.chances if is_known else self._chances
        reach = 1.0
        for position in range(most):
            reach *= chances[_bucket(record.streak + position, chances)]
            if reach < MARGIN:
                return
            yield reach

    def _spread(self, backlog: int, most: int) -> float:
        """Tokens to reckon with for a drafter's backlog: one that is made up for once serves the steps that follow."""
        if backlog <= self.max_tokens + 1:
            return backlog
        return 1 + (backlog - 1) / min(most + 1, MEMORY)

    def _probe(self, decoding: Seq[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """One guess, if there are the savings for it: for the sequence for which it costs least."""
        assert self.drafter.costs is not None
        if self._savings < self.drafter.costs(1):
            return []
        backlogs = [(backlog, place) for place, (sequence, _) in enumerate(decoding)
                    if (backlog := self.drafter.backlog(sequence)) is not None]  # fmt: skip
        if not backlogs:
            return []
        backlog, place = min(backlogs)
        price = self.drafter.costs(backlog)
        self._most_savings = max(STAKE * self.costs(1), price)
        if self._savings < price:
            return []
        self._savings -= price
        return [(decoding[place][0], 1)]

    def _guess(self, wanted: Seq[tuple[Sequence, int]]) -> bool:
        """Have the drafter guess.  Where it fails, it is asked for each sequence alone, and is off
        for those for which it fails again.

        Returns:
            False where it failed, and for none of them alone.
        """
        try:
            guesses = list(self.drafter.propose(wanted))
            if len(guesses) != len(wanted):
                raise ValueError(f"the drafter gave {len(guesses)} guesses for {len(wanted)} sequences")
        except Exception as error:
            if len(wanted) == 1:
                self.turn_off(wanted[0][0], error)
                return True
            logger.warning("drafting failed, trying it in parts", sequences=len(wanted), error=repr(error))
            for one in wanted:
                self._guess([one])
            return any(self._records[sequence.id].is_off for sequence, _ in wanted)
        for (sequence, most), guess in zip(wanted, guesses, strict=True):
            self._take(sequence, most, guess)
        return True

    def _take(self, sequence: Sequence, most: int, guess: Seq[int]) -> None:
        record = self._records[sequence.id]
        try:
            guess = guess[:most]
            if not all(0 <= token < self.vocab_size for token in guess):
                raise ValueError(f"the drafter proposes tokens that are not in the vocabulary of {self.vocab_size}")
        except Exception as error:
            self.turn_off(sequence, error)
        else:
            record.guess, record.guessed_at = guess, sequence.num_tokens


def speculation_for(
    settings: EngineSettings, vocab_size: int, costs: StepCosts | None = None, draft_model: Drafter | None = None
) -> Speculation | None:
    """What the settings ask for; None for no speculation.

    Raises:
        ConfigurationError: they ask for a draft model, and there is none.
    """
    drafter: Drafter | None = None
    if settings.speculative_method == "ngram":
        drafter = NgramDrafter(max_n=settings.prompt_lookup_max, min_n=settings.prompt_lookup_min)
    elif settings.speculative_method == "draft_model":
        drafter = draft_model
        if drafter is None:
            raise ConfigurationError(
                "a draft model needs a model beside it that the engine loads itself", field="speculative_method"
            )
    if drafter is None:
        return None
    return Speculation(drafter, max_tokens=settings.num_speculative_tokens, vocab_size=vocab_size, costs=costs)
