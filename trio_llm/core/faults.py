"""What a step that failed still allows: which parts of it to try by themselves.

A step that raised committed nothing, so any part of it is a step of its own.  Where memory
ran out, less at once may do: halves, and halves of these, down to one token of one sequence.
Any other exception belongs to some row, and the rows by themselves show whose it is.
"""

from __future__ import annotations

import sys

import attrs

from trio_llm.core.step import Row, StepPlan

RECOVERY_STEPS = 16
"""Steps that must go well before a token limit that memory forced on the engine is doubled."""

OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What the CPU's allocator, CUDA beside torch's allocator, and cuBLAS say: they have no class of their own for it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: CUDA's and other accelerators' own error, the CPU allocator's, or Python's."""
    torch = sys.modules.get("torch")  # where nobody has imported it, nobody has raised its errors
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def without_frames(error: Exception) -> Exception:
    """The error without its traceback and those of what led to it: they hold the tensors of the step that failed."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def first_parts(plan: StepPlan, *, out_of_memory: bool) -> list[StepPlan]:
    """What to run in place of a step that raised; a row alone that can be no smaller gets a second chance."""
    if out_of_memory:
        return smaller_parts(plan) or [plan]
    return [StepPlan((row,)) for row in plan.rows]


def smaller_parts(plan: StepPlan) -> list[StepPlan]:
    """The halves of a plan, or of a row alone its first half; none of one token of one row."""
    if len(plan.rows) > 1:
        middle = len(plan.rows) // 2
        return [StepPlan(plan.rows[:middle]), StepPlan(plan.rows[middle:])]
    row = _shorter(plan.rows[0])
    return [] if row is None else [StepPlan((row,))]


def _shorter(row: Row) -> Row | None:
    """The row without its drafts, else its first half; what is left out stays to be computed in a later step."""
    if row.num_drafts:
        return attrs.evolve(row, token_ids=row.token_ids[: len(row.token_ids) - row.num_drafts], num_drafts=0)
    if len(row.token_ids) == 1:
        return None
    return attrs.evolve(row, token_ids=row.token_ids[: len(row.token_ids) // 2], sample=False)


@attrs.define
class TokenLimit:
    """The token budget of a step: the configured one, less for a while after memory ran out.

    It falls to the largest part that went through, and doubles after RECOVERY_STEPS steps without a fault.
    """

    configured: int
    current: int = attrs.field(init=False)
    _num_good_steps: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.current = self.configured

    def ran_out(self, largest_part: int) -> None:
        """Memory ran out in a step, of which parts up to `largest_part` tokens went through."""
        self.current = max(1, min(self.current, largest_part))
        self._num_good_steps = 0

    def went_well(self) -> None:
        """A whole step went through."""
        if self.current == self.configured:
            return
        self._num_good_steps += 1
        if self._num_good_steps == RECOVERY_STEPS:
            self.current = min(2 * self.current, self.configured)
            self._num_good_steps = 0
