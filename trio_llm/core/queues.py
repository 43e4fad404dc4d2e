"""Queues: where every sequence is, who goes before whom, and who gives way.

A sequence runs (it holds blocks and may be in the next step), waits (for a place, and holds none), is parked
(preempted while its reader lags, it waits for the reader before it may wait for a place), or follows (another choice
of its request computes the prompt for it).

The order is the same everywhere: priority, then arrival, then choice.  It decides who is admitted first and,
read backwards, who is preempted first, so the first of all can always finish and there is no deadlock.
"""

from __future__ import annotations

import bisect
import heapq
import itertools

from trio_llm.core.block_pool import BlockPool
from trio_llm.core.request import Request, Sequence, Status

COMPACT_ABOVE = 16
"""Finished sequences that may stay in the queue, beside as many as wait."""


class Queues:
    """All sequences that have not ended, each in one queue.

    Args:
        pool: takes back the blocks of those who end or give way.
        credit_window: output tokens a sequence may be ahead of its reader; who is as far is paused.
    """

    def __init__(self, pool: BlockPool, *, credit_window: int) -> None:
        self.pool = pool
        self.credit_window = credit_window
        self.running: list[Sequence] = []
        """Sorted by order."""
        self.num_preemptions = 0
        self._sequences: dict[int, Sequence] = {}
        self._num_paused = 0
        """Of the running: those whose reader is a whole window behind."""
        self._waiting: list[tuple[tuple[int, int, int], int, Sequence]] = []
        """A heap by order; finished sequences stay until they surface."""
        self.num_next = 0
        """Of those in the heap, who has not ended: waits for a place, and for nothing else."""
        self._arrivals = itertools.count()
        self._ids = itertools.count()
        self._pushes = itertools.count()

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self.running)

    def sequence(self, sequence_id: int) -> Sequence:
        """The live sequence of that id."""
        return self._sequences[sequence_id]

    def live_ids(self) -> set[int]:
        """Ids of all sequences that have not ended."""
        return set(self._sequences)

    def has_work(self) -> bool:
        """Whether anybody could be in a step."""
        return len(self.running) > self._num_paused or self.first_waiting() is not None

    # --- coming and going ---

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request; gives the sequences made for it, one for each choice."""
        request.arrival = next(self._arrivals)
        for index in range(request.params.n):
            sequence = Sequence(next(self._ids), request, index, list(request.prompt_token_ids))
            request.sequences.append(sequence)
            self._sequences[sequence.id] = sequence
            sequence.status = Status.FOLLOWING
        self._lead(request)
        return request.sequences

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, whatever its state; idempotent.  The only place that frees for good."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._leave_running(sequence)
        self.num_next -= sequence.status is Status.WAITING
        sequence.status = Status.FINISHED
        self._release_blocks(sequence)
        del self._sequences[sequence.id]
        if sequence.request.leader is sequence:
            self._lead(sequence.request)
        self._compact()

    # --- choices of one request ---

    def _lead(self, request: Request) -> None:
        """Have the first choice that is left compute the prompt for those that follow."""
        following = [sequence for sequence in request.sequences if sequence.status is Status.FOLLOWING]
        request.leader = following[0] if following else None
        if request.leader is not None:
            self._wait(request.leader)

    def let_follow(self, leader: Sequence) -> None:
        """The prompt is computed: the other choices may fork."""
        request = leader.request
        if request.leader is leader:
            request.leader = None
            for sequence in request.sequences:
                if sequence.status is Status.FOLLOWING:
                    sequence.fork_of = leader
                    self._wait(sequence)

    # --- readers ---

    def is_paused(self, sequence: Sequence) -> bool:
        """Whether its reader is a whole window behind."""
        return sequence.num_output_tokens - sequence.num_acknowledged >= self.credit_window

    def extend(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """A running sequence got tokens."""
        ahead = sequence.num_output_tokens - sequence.num_acknowledged
        sequence.token_ids += tokens
        self._num_paused += ahead < self.credit_window <= ahead + len(tokens)

    def acknowledge(self, sequence: Sequence, num_tokens: int) -> None:
        """The reader took `num_tokens` more output tokens."""
        was_paused = self.is_paused(sequence)
        sequence.num_acknowledged = min(sequence.num_acknowledged + num_tokens, sequence.num_output_tokens)
        if was_paused and not self.is_paused(sequence):
            if sequence.status is Status.RUNNING:
                self._num_paused -= 1
            elif sequence.status is Status.PARKED:
                self._wait(sequence)

    # --- who runs ---

    def ready(self) -> list[Sequence]:
        """Those who run and are not paused, in order."""
        if not self._num_paused:
            return self.running.copy()
        return [sequence for sequence in self.running if not self.is_paused(sequence)]

    def first_waiting(self) -> Sequence | None:
        """Who is let in next; None if nobody waits."""
        while self._waiting and self._waiting[0][-1].status is Status.FINISHED:
            heapq.heappop(self._waiting)
        return self._waiting[0][-1] if self._waiting else None

    def let_in(self, newcomer: Sequence) -> None:
        """The first of the waiting runs from now on."""
        assert self._waiting[0][-1] is newcomer, "somebody waits before it"
        heapq.heappop(self._waiting)
        newcomer.status = Status.RUNNING
        self.num_next -= 1
        bisect.insort(self.running, newcomer, key=lambda other: other.order)

    def victim(self) -> Sequence:
        """Who gives way: the last of the paused, else the last of all."""
        if self._num_paused:
            return next(sequence for sequence in reversed(self.running) if self.is_paused(sequence))
        return self.running[-1]

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks; its tokens are kept, their keys and values recomputed later."""
        self._leave_running(sequence)
        self._release_blocks(sequence)
        self.num_preemptions += 1
        if self.is_paused(sequence):
            sequence.status = Status.PARKED
        else:
            self._wait(sequence)

    def _leave_running(self, sequence: Sequence) -> None:
        position = bisect.bisect_left(self.running, sequence.order, key=lambda other: other.order)
        assert self.running[position] is sequence
        del self.running[position]
        self._num_paused -= self.is_paused(sequence)

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_blocks_sent = 0
        sequence.num_hashed_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.draft_token_ids = []

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self.num_next += 1
        heapq.heappush(self._waiting, (sequence.order, next(self._pushes), sequence))

    def _compact(self) -> None:
        """Forget finished sequences once they are most of the heap: who waits long would keep them, and their prompts."""
        if len(self._waiting) > 2 * self.num_waiting + COMPACT_ABOVE:
            self._waiting = [entry for entry in self._waiting if entry[-1].status is not Status.FINISHED]
            heapq.heapify(self._waiting)

    def check(self) -> None:
        """Assert the invariants: each sequence in one queue, and blocks with those who run alone."""
        running = {sequence.id for sequence in self.running}
        waiting = [sequence.id for *_, sequence in self._waiting if sequence.status is not Status.FINISHED]
        parked = {s.id for s in self._sequences.values() if s.status in {Status.PARKED, Status.FOLLOWING}}
        assert len(running) == len(self.running), "a sequence runs twice"
        assert sorted([*running, *waiting, *parked]) == sorted(self._sequences), "a sequence is in no queue, or in two"
        assert self.num_next == len(waiting)
        assert self.running == sorted(self.running, key=lambda sequence: sequence.order)
        assert self._num_paused == sum(map(self.is_paused, self.running))
        for sequence in self._sequences.values():
            assert sequence.status is not Status.FINISHED
            if sequence.status is Status.FOLLOWING:
                assert sequence.request.leader is not None, "a choice follows nobody"
            if sequence.status is not Status.RUNNING:
                assert not sequence.block_table and sequence.num_computed_tokens == 0
        self.pool.check(sequence.block_table for sequence in self._sequences.values())
