"""Speculation: how many of a drafter's guesses a step verifies.

A draft costs time: it is one more token in the step.  How much, says a cost curve that is
measured when the model is loaded; what it brings, says a running estimate of how often
guesses are right.  Each step takes the drafts that make the most tokens a second, and none
if none do: in a large batch, where every token costs, and in text that cannot be guessed.

Guesses are judged whether they are drafted or not, by comparing them with the tokens that
came.  So a sequence that cannot be guessed costs no model time at all, and one that
begins to repeat itself is noticed at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import attrs
import structlog

from trio_llm.config import EngineSettings
from trio_llm.core.drafter import Drafter, NgramDrafter
from trio_llm.core.executor import Executor
from trio_llm.core.request import Sequence
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import Row, SamplingTask, StepPlan

logger = structlog.get_logger(__name__)

MARGIN = 0.05
"""By how much a step with drafts must promise to be better; less is not worth an error of the estimates."""

PRIOR = (0.05, 0.4, 0.6, 0.8, 0.9)
"""How likely a guess is right after 0, 1, 2-3, 4-7, 8 and more right ones in a row, until it is known better."""

LEARNING_RATE = 1 / 8


@attrs.frozen
class StepCosts:
    """Time of a step by the number of tokens in it, in any unit: straight lines between measured points."""

    points: tuple[tuple[int, float], ...] = ((1, 1.0), (65, 2.0))
    """Two or more, ascending; the last line goes on.  The default is that of a model that is
    bound by memory until some sixty tokens."""

    def __call__(self, num_tokens: int) -> float:
        after = next((i for i, (size, _) in enumerate(self.points) if size >= num_tokens), len(self.points) - 1)
        (low, low_cost), (high, high_cost) = self.points[max(after, 1) - 1 : max(after, 1) + 1]
        return low_cost + (high_cost - low_cost) * (num_tokens - low) / (high - low)

    @classmethod
    def measure(cls, executor: Executor, *, clock: Callable[[], float] = time.perf_counter) -> StepCosts:
        """Time steps of an executor on which no sequence runs yet.  Writes into its first blocks."""
        info = executor.info
        limit = min(info.num_blocks * info.block_size, info.max_model_len)
        sizes = [size for size in (1, 2, 3, 5, 9, 17, 33) if size <= limit]
        params = SamplingParams(temperature=1.0).resolved(SamplingParams(), max_tokens=limit, seed=0)
        points: list[tuple[int, float]] = []
        executor.admit(-1, SamplingTask(params))
        try:
            for size in sizes:
                blocks = tuple(range(-(-size // info.block_size)))
                row = Row(
                    -1, (0,) * size, 0, 0, blocks, num_drafts=size - 1, sample=True, block_copies=(), output_index=0
                )
                times = []
                for _ in range(3):  # the first also warms up
                    start = clock()
                    executor.collect(executor.launch(StepPlan((row,))))
                    times.append(clock() - start)
                points.append((size, min(times)))
        finally:
            executor.release(-1)
        if len(points) < 2:
            return cls()
        # fewer tokens never cost more, whatever the clock says: what disturbs it only adds
        return cls(tuple((size, min(cost for _, cost in points[i:])) for i, (size, _) in enumerate(points)))


@attrs.define(eq=False)
class _Record:
    """What is known of the guesses for one sequence."""

    guess: Seq[int] = ()
    guessed_at: int = 0
    """Tokens of the sequence when the guess was made."""
    streak: int = 0
    """Guesses that were right, one after another."""
    chances: list[float] = attrs.field(factory=lambda: list(PRIOR))
    """Of a guess to be right, by the streak before it."""
    is_off: bool = False

    def judge(self, tokens: Seq[int]) -> None:
        """Compare the guess with what came."""
        for guess, token in zip(self.guess, tokens[self.guessed_at :], strict=False):
            bucket = _bucket(self.streak)
            self.chances[bucket] += LEARNING_RATE * ((guess == token) - self.chances[bucket])
            self.streak = self.streak + 1 if guess == token else 0
            if guess != token:
                break
        self.guess = ()

    def reaches(self) -> Iterable[float]:
        """For each token of the guess the chance that it and all before it are right, while it counts."""
        reach = 1.0
        for position in range(len(self.guess)):
            reach *= self.chances[_bucket(self.streak + position)]
            if reach < MARGIN:
                return
            yield reach


def _bucket(streak: int) -> int:
    return min(streak.bit_length(), len(PRIOR) - 1)


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
        self._records: dict[int, _Record] = {}

    def propose(self, sequences: Seq[Sequence], num_tokens: int, room: int) -> None:
        """Give the sequences their `draft_token_ids` for the next step.

        Args:
            sequences: those with one token to compute.
            num_tokens: tokens of the step without drafts.
            room: drafts that the step's budget has room for.
        """
        if not sequences:
            return
        candidates: list[tuple[float, int]] = []
        for place, sequence in enumerate(sequences):
            record = self._records.setdefault(sequence.id, _Record())
            if not record.is_off:
                record.guess, record.guessed_at = self._guess(sequence, record), sequence.num_tokens
                candidates += [(-reach, place) for reach in record.reaches()]
        # the chances fall along a sequence, so the best few of all are a beginning of each
        candidates.sort()
        lengths = [0] * len(sequences)
        for _, place in candidates[: self._best_count([-reach for reach, _ in candidates[:room]], num_tokens)]:
            lengths[place] += 1
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.draft_token_ids = list(self._records[sequence.id].guess[:length])

    def observe(self, sequence: Sequence) -> None:
        """A step took the sequence further."""
        record = self._records.setdefault(sequence.id, _Record())
        if record.is_off:
            return
        record.judge(sequence.token_ids)
        try:
            self.drafter.observe(sequence)
        except Exception as error:
            self.turn_off(sequence, error)

    def turn_off(self, sequence: Sequence, error: Exception) -> None:
        """No drafts for this sequence any more: they failed, or it did with them."""
        logger.warning("drafting failed, off", request_id=sequence.request.id, index=sequence.index, error=repr(error))
        record = self._records.setdefault(sequence.id, _Record())
        record.is_off, record.guess = True, ()

    def release(self, sequence_id: int) -> None:
        """Forget a sequence; idempotent."""
        if self._records.pop(sequence_id, None) is not None:
            self.drafter.release(sequence_id)

    def _guess(self, sequence: Sequence, record: _Record) -> Seq[int]:
        try:
            guess = self.drafter.propose(sequence, self.max_tokens)[: self.max_tokens]
            if not all(0 <= token < self.vocab_size for token in guess):
                raise ValueError(f"the drafter proposes tokens that are not in the vocabulary of {self.vocab_size}")
            return guess
        except Exception as error:
            self.turn_off(sequence, error)
            return ()

    def _best_count(self, reaches: Seq[float], num_tokens: int) -> int:
        """How many drafts, the likeliest first, make the most tokens for the time."""
        best, best_speed = 0, (1 + MARGIN) * num_tokens / self.costs(num_tokens)
        expected = float(num_tokens)
        for count, reach in enumerate(reaches, start=1):
            expected += reach
            speed = expected / self.costs(num_tokens + count)
            if speed > best_speed:
                best, best_speed = count, speed
        return best


def speculation_for(settings: EngineSettings, vocab_size: int, costs: StepCosts | None = None) -> Speculation | None:
    """What the settings ask for; None for no speculation."""
    if settings.speculative_method == "off":
        return None
    drafter = NgramDrafter(max_n=settings.prompt_lookup_max, min_n=settings.prompt_lookup_min)
    return Speculation(drafter, max_tokens=settings.num_speculative_tokens, vocab_size=vocab_size, costs=costs)
