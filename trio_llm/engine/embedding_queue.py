"""The requests for embeddings that wait, and whose texts make the next step."""

from __future__ import annotations

from array import array
from collections import deque

import attrs
import trio

from trio_llm.errors import TrioLLMError


@attrs.define(eq=False)
class Job:
    """One request."""

    texts: list[list[int]]
    """Their token ids."""
    dimensions: int | None
    vectors: list[array[float] | None] = attrs.field(
        default=attrs.Factory(lambda job: [None] * len(job.texts), takes_self=True), init=False
    )
    num_taken: int = 0
    """Texts that a step has computed or computes now: always the first."""
    num_done: int = 0
    error: TrioLLMError | None = None
    over: trio.Event = attrs.field(factory=trio.Event)
    """Set when all vectors are there, or there is an error."""

    def take(self, place: int, vector: array[float]) -> None:
        """The vector of one text is there."""
        self.vectors[place] = vector
        self.num_done += 1
        if self.num_done == len(self.texts):
            self.over.set()

    def fail(self, error: TrioLLMError) -> None:
        """It gets an error, unless it is over already."""
        if not self.over.is_set():
            self.error = error
            self.over.set()


class EmbeddingQueue:
    """Gives the texts of those who wait, one of each in turn, so that a large request holds up none.

    Args:
        max_num_seqs: texts in one step.
        max_num_batched_tokens: tokens in one step, unless one text alone has more.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.num_texts = 0
        """That wait."""
        self.num_tokens = 0
        """Of those."""
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._jobs: deque[Job] = deque()
        """Those with texts that no step has taken; the first gives the next text."""

    def add(self, job: Job) -> None:
        """Let a request wait."""
        self._jobs.append(job)
        self._count(job, 1)

    def remove(self, job: Job) -> None:
        """Take out what of a request still waits."""
        if job in self._jobs:
            self._jobs.remove(job)
            self._count(job, -1)

    def next_batch(self) -> list[tuple[Job, int]]:
        """Take the texts of the next step: each as its request and its place there."""
        batch: list[tuple[Job, int]] = []
        num_tokens = 0
        while self._jobs and len(batch) < self._max_num_seqs:
            job = self._jobs[0]
            length = len(job.texts[job.num_taken])
            if batch and num_tokens + length > self._max_num_batched_tokens:
                break
            batch.append((job, job.num_taken))
            num_tokens += length
            job.num_taken += 1
            self._jobs.popleft()
            if job.num_taken < len(job.texts):
                self._jobs.append(job)
        self.num_texts -= len(batch)
        self.num_tokens -= num_tokens
        return batch

    def _count(self, job: Job, sign: int) -> None:
        waiting = job.texts[job.num_taken :]
        self.num_texts += sign * len(waiting)
        self.num_tokens += sign * sum(map(len, waiting))
