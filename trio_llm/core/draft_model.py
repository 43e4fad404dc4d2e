"""DraftModel: a smaller model of the same vocabulary guesses what the large one will say.

It has pages of its own for its keys and values, but no blocks of its own: a sequence's block
table leads to both models' pages, so there is one allocator, and one idea of who holds what.

What the draft model has computed is not counted by sequence.  Each block says what the draft
model's pages hold there: a hash of all tokens before, and the tokens themselves.  How far it has come in a
sequence is read off its blocks.  A block that is found in the prefix cache, shared by a fork,
given away by a preemption or written for a guess that turned out wrong serves as far as it
holds the sequence's own tokens, and nothing has to be told, undone or invalidated.

The rest is caught up on when a guess is wanted, and not before: a draft model whose guesses
do not pay computes nothing, not even prompts.  A long prompt is caught up on over several
steps, so that nobody waits long for it, and choices that share it wait for the first of them.

Guesses are drawn with the sequence's own parameters and the very noise that the token will
be drawn with (see `sampler`), so that two models that nearly agree draw the same token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import attrs

from trio_llm.core.block_pool import BlockHash, block_hash, root_hash
from trio_llm.core.executor import Executor
from trio_llm.core.request import Sequence
from trio_llm.core.step import Row, SamplingTask, StepPlan
from trio_llm.core.step_costs import StepCosts


@attrs.frozen
class _Content:
    """What the draft model's pages of a block hold."""

    before: BlockHash
    """The hash of all tokens before the block."""
    token_ids: tuple[int, ...]
    """From the block's beginning on."""


@attrs.define(eq=False)
class _State:
    """What the draft model's executor knows of a sequence, and what was looked up for it."""

    table: list[int]
    """The sequence's block table; after a preemption it has another one."""
    before: BlockHash
    """The hash of all tokens of the `num_full` leading blocks."""
    is_admitted: bool = False
    """Whether the executor knows the sequence."""
    num_full: int = 0
    """Leading blocks that are known to hold the sequence's tokens: no one else writes anything but them."""
    num_blocks_sent: int = 0
    num_outputs: int = 0
    """Outputs that the executor was told of, and after them ..."""
    guess: list[int] = attrs.field(factory=list)
    """... those that it made up itself."""


@attrs.define(eq=False)
class _Guess:
    """A guess in the making."""

    sequence: Sequence
    wanted: int
    state: _State
    token_ids: list[int] = attrs.field(factory=list)


class DraftModel:
    """A Drafter that runs a model.

    Args:
        executor: runs the draft model, with as many blocks of the same size as the target's, and its vocabulary.
        vocab_size: tokens that the draft model itself knows.
        max_tokens: the most that one of its forwards computes.
        costs: what its forwards cost, in the unit of the target's steps.
    """

    prior = (0.1,)
    """Low: it has to show what it can do, by probes, before it is relied on."""

    def __init__(self, executor: Executor, *, vocab_size: int, max_tokens: int, costs: StepCosts) -> None:
        self.executor = executor
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.costs = costs
        self._size = executor.info.block_size
        self._contents: dict[int, _Content] = {}
        self._tasks: dict[int, SamplingTask] = {}
        self._states: dict[int, _State] = {}
        self._copies: dict[int, tuple[int, int]] = {}
        """By sequence: a block that was copied for it (source, destination) in the target's pages."""

    def admit(self, sequence_id: int, task: SamplingTask) -> None:
        # nobody reads its log-probabilities
        params = attrs.evolve(task.params, logprobs=None, prompt_logprobs=None)
        self._tasks[sequence_id] = attrs.evolve(task, params=params)

    def observe(self, sequence: Sequence, block_copies: Seq[tuple[int, int]] = ()) -> None:
        for source, destination in block_copies:
            # done with its next forward, if that is still worth something
            if source in self._contents:
                self._copies[sequence.id] = source, destination

    def backlog(self, sequence: Sequence) -> int | None:
        if sequence.num_tokens > self.executor.info.max_model_len:
            return None
        return min(sequence.num_tokens - self._begin(sequence)[0], self.max_tokens)

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> Seq[Seq[int]]:
        try:
            return self._propose(wanted)
        except Exception:
            # how far the executor came is not known: it meets these sequences anew
            for sequence, _ in wanted:
                self._forget(sequence.id)
            raise

    def release(self, sequence_id: int) -> None:
        self._forget(sequence_id)
        self._tasks.pop(sequence_id, None)

    def close(self) -> None:
        self._contents.clear()
        self.executor.close()

    def _propose(self, wanted: Seq[tuple[Sequence, int]]) -> Seq[Seq[int]]:
        guesses = [_Guess(sequence, self._most(sequence, count), self._state(sequence)) for sequence, count in wanted]
        active = self._catch_up([guess for guess in guesses if guess.wanted > 0])
        while active := [guess for guess in active if self._goes_on(guess)]:
            self._run(active, [self._row(guess, guess.token_ids[-1:], self._end(guess)) for guess in active])
        for guess in guesses:
            guess.state.guess = guess.token_ids
        return [guess.token_ids for guess in guesses]

    def _catch_up(self, guesses: Seq[_Guess]) -> list[_Guess]:
        """Compute what is missing, as far as it fits in one forward, with the first guess of all that are then there.

        Returns:
            Those whose guess has begun.
        """
        begins = [(*self._begin(guess.sequence), guess) for guess in guesses]
        # who lags far behind may not hold up the others
        begins.sort(key=lambda entry: entry[-1].sequence.num_tokens - entry[0] > self._size)
        taking_part: list[_Guess] = []
        rows: list[Row] = []
        room = self.max_tokens
        written: set[int] = set()
        for begin, copies, guess in begins:
            sequence, state = guess.sequence, guess.state
            tokens = sequence.token_ids[begin : begin + room]
            end = begin + len(tokens)
            blocks = state.table[begin // self._size : -(-end // self._size)]
            if not tokens or not written.isdisjoint(blocks):
                continue  # another computes what they share: that serves both in the next step
            if max(tokens) >= self.vocab_size:
                raise ValueError("the draft model does not know a token of the sequence")
            written.update(blocks)
            room -= len(tokens)
            taking_part.append(guess)
            if copies:
                del self._copies[sequence.id]
            rows.append(self._row(guess, tokens, begin, copies))
            if rows[-1].sample:
                state.num_outputs, state.guess = sequence.num_output_tokens, []
        self._run(taking_part, rows)
        return [guess for guess in taking_part if guess.token_ids]

    def _row(self, guess: _Guess, tokens: Seq[int], start: int, copies: tuple[tuple[int, int], ...] = ()) -> Row:
        sequence, state = guess.sequence, guess.state
        if not state.is_admitted:
            self.executor.admit(sequence.id, self._tasks[sequence.id])
            state.is_admitted = True
        num_prior = state.num_blocks_sent
        state.num_blocks_sent = len(state.table)
        sample = start + len(tokens) >= sequence.num_tokens
        return Row(
            sequence_id=sequence.id,
            token_ids=tuple(tokens),
            start=start,
            num_prior_blocks=num_prior,
            new_blocks=tuple(state.table[num_prior:]),
            num_drafts=0,
            sample=sample,
            output_index=sequence.num_output_tokens + len(guess.token_ids),
            unseen_outputs=self._unseen(sequence, state) if sample and not guess.token_ids else (),
            block_copies=copies,
        )

    def _run(self, guesses: Seq[_Guess], rows: Seq[Row]) -> None:
        """Run a forward, lengthen the guesses, and note what the blocks hold by then."""
        if not rows:
            return
        held = [self._held_before(guess, row) for guess, row in zip(guesses, rows, strict=True)]
        for guess, row in zip(guesses, rows, strict=True):
            # if the forward fails, nobody knows what they hold
            for block in guess.state.table[
                row.start // self._size : -(-(row.start + len(row.token_ids)) // self._size)
            ]:
                self._contents.pop(block, None)
        result = self.executor.collect(self.executor.launch(StepPlan(tuple(rows))))
        for error in result.failures.values():
            raise error  # whose row it is shows when each is asked for alone; what its blocks hold may be no numbers
        for guess, row, content, sampled in zip(guesses, rows, held, result.token_ids, strict=True):
            self._deposit(guess.state.table, row, content)
            guess.token_ids += sampled

    def _held_before(self, guess: _Guess, row: Row) -> _Content:
        """What the first block that a row writes holds before what it writes."""
        state = guess.state
        first, offset = divmod(row.start, self._size)
        if row.block_copies:
            held = self._contents[row.block_copies[0][0]]
        elif offset:
            held = self._contents[state.table[first]]
        elif first == state.num_full:
            return _Content(state.before, ())
        else:
            previous = self._contents[state.table[first - 1]]
            return _Content(block_hash(previous.before, previous.token_ids), ())
        return _Content(held.before, held.token_ids[:offset])

    def _deposit(self, table: Seq[int], row: Row, held: _Content) -> None:
        before, tokens = held.before, held.token_ids + row.token_ids
        for block in table[row.start // self._size :]:
            self._contents[block] = _Content(before, tokens[: self._size])
            if len(tokens) <= self._size:
                break
            before, tokens = block_hash(before, tokens[: self._size]), tokens[self._size :]

    def _begin(self, sequence: Sequence) -> tuple[int, tuple[tuple[int, int], ...]]:
        """How many of the sequence's leading tokens need not be computed, and a copy of a block that takes."""
        state = self._state(sequence)
        while True:
            begin = state.num_full * self._size
            tokens = tuple(sequence.token_ids[begin : begin + self._size])
            block = state.table[state.num_full] if state.num_full < len(state.table) else -1
            num_held = self._num_held(block, state.before, tokens)
            if num_held < self._size:
                break
            state.num_full += 1
            state.before = block_hash(state.before, tokens)
        # of the last token the logits are wanted
        last = sequence.num_tokens - 1
        source, destination = self._copies.get(sequence.id, (-1, -1))
        if destination == block and (num_copied := self._num_held(source, state.before, tokens)) > num_held:
            # something of the block is always left to compute, which notes what it holds
            return min(begin + min(num_copied, self._size - 1), last), ((source, destination),)
        return min(begin + num_held, last), ()

    def _num_held(self, block: int, before: BlockHash, tokens: tuple[int, ...]) -> int:
        """How many of a block's tokens, with this before them, the draft model's pages hold."""
        content = self._contents.get(block)
        if content is None or content.before != before:
            return 0
        if content.token_ids == tokens:
            return len(tokens)
        same = (ours == theirs for ours, theirs in zip(content.token_ids, tokens, strict=False))
        return next(
            (place for place, is_same in enumerate(same) if not is_same), min(len(content.token_ids), len(tokens))
        )

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.id)
        if state is None:
            state = self._states[sequence.id] = _State(sequence.block_table, _root(sequence))
        elif state.table is not sequence.block_table:
            # preempted meanwhile: other blocks, the same tokens
            state.table, state.before = sequence.block_table, _root(sequence)
            state.num_full = state.num_blocks_sent = 0
        return state

    def _unseen(self, sequence: Sequence, state: _State) -> tuple[int, ...]:
        """The last outputs, of which the executor was not told, or made up others."""
        outputs = sequence.token_ids[len(sequence.request.prompt_token_ids) + state.num_outputs :]
        for ours, theirs in zip(state.guess, outputs, strict=False):
            if ours != theirs:
                break
            outputs = outputs[1:]
        return tuple(outputs)

    def _most(self, sequence: Sequence, count: int) -> int:
        return min(count, self.executor.info.max_model_len - sequence.num_tokens + 1)

    def _end(self, guess: _Guess) -> int:
        """Position of the last token of the guess."""
        return guess.sequence.num_tokens + len(guess.token_ids) - 1

    def _goes_on(self, guess: _Guess) -> bool:
        return len(guess.token_ids) < guess.wanted and guess.token_ids[-1] not in guess.sequence.request.eos_token_ids

    def _forget(self, sequence_id: int) -> None:
        self._copies.pop(sequence_id, None)
        state = self._states.pop(sequence_id, None)
        if state is not None and state.is_admitted:
            self.executor.release(sequence_id)


def _root(sequence: Sequence) -> BlockHash:
    return root_hash(sequence.request.cache_salt)
