"""StepCosts: what a step costs by the number of tokens in it, measured when a model is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from trio_llm.core.executor import Executor
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import Row, SamplingTask, StepPlan


@attrs.frozen
class StepCosts:
    """Time of a step by the number of tokens in it, in any unit: straight lines between measured points."""

    points: tuple[tuple[int, float], ...] = ((1, 1.0), (65, 2.0))
    """Two or more, ascending; the last line goes on.  The default is that of a model that is
    bound by memory until some sixty tokens."""

    def __call__(self, num_tokens: float) -> float:
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
