"""EngineCore: the engine without threads, text or a clock of its own.  Requests in, steps, tokens out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import structlog

from trio_llm.config import EngineSettings
from trio_llm.core.block_pool import BlockPool
from trio_llm.core.executor import Executor
from trio_llm.core.faults import TokenLimit, first_parts, is_out_of_memory, smaller_parts, without_frames
from trio_llm.core.pace import Pace
from trio_llm.core.prefix_cache import PrefixCache
from trio_llm.core.queues import Queues
from trio_llm.core.request import FinishReason, Request, Sequence
from trio_llm.core.scheduler import Scheduler
from trio_llm.core.speculation import Speculation, speculation_for
from trio_llm.core.step import CoreStatistics, Row, SamplingTask, SequenceOutput, StepPlan
from trio_llm.errors import ContextLengthExceeded, RequestFailed, TrioLLMError

logger = structlog.get_logger(__name__)


class EngineCore:
    """Scheduler and executor as one machine.  Synchronous; all calls from one thread.

    Args:
        executor: runs the steps; closed with the core.
        settings: limits and the token budget.
        speculation: who drafts; None is what the settings say.
        clock: what steps are timed by, in seconds, so that `max_mixed_step_ratio` can be kept; None times none.
    """

    def __init__(
        self,
        executor: Executor,
        settings: EngineSettings,
        speculation: Speculation | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.executor = executor
        self._clock = clock
        info = executor.info
        self.speculation = speculation or speculation_for(settings, info.vocab_size)
        self.max_model_len = min(info.max_model_len, settings.max_model_len or info.max_model_len)
        self.pool = BlockPool(info.num_blocks, info.block_size)
        self.queues = Queues(self.pool, credit_window=settings.credit_window)
        self.scheduler = Scheduler(
            self.queues,
            PrefixCache(self.pool, enabled=settings.enable_prefix_caching),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            pace=Pace(
                max_ratio=None if clock is None else settings.max_mixed_step_ratio,
                max_tokens=settings.max_num_mixed_prompt_tokens or settings.max_num_batched_tokens,
            ),
            max_model_len=self.max_model_len,
        )
        self._requests: dict[str, Request] = {}
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._token_limit = TokenLimit(settings.max_num_batched_tokens)
        self._num_failed_steps = 0
        self._num_out_of_memory = 0

    @property
    def max_total_tokens(self) -> int:
        """The most tokens, prompt and output, that a sequence can ever have: what the context
        and the whole KV memory allow."""
        return min(self.max_model_len, self.pool.num_blocks * self.pool.block_size)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextLengthExceeded: it could never fit, even alone.
        """
        limit = self.max_total_tokens
        wanted = 1 if request.params.max_tokens is None else request.params.max_tokens
        prompt = len(request.prompt_token_ids)
        if prompt + wanted > limit:
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens and {wanted} are wanted, but at most {limit} fit",
                field="prompt",
                limit=limit,
                prompt_tokens=prompt,
            )
        assert request.id not in self._requests, "the engine gives every request its own id"
        self._requests[request.id] = request
        most = self.max_model_len if request.params.max_tokens is None else prompt + request.params.max_tokens
        request.max_num_tokens = min(most, self.max_model_len)
        prompt_token_ids = tuple(request.prompt_token_ids)
        for sequence in self.queues.add(request):
            task = SamplingTask(
                request.params,
                sequence.index,
                prompt_token_ids,
                request.eos_token_ids,
                request.bad_words,
                request.grammar,
            )
            self.executor.admit(sequence.id, task)
            if self.speculation is not None:
                self.speculation.admit(sequence.id, task)

    def finish(self, request_id: str, index: int | None = None) -> None:
        """End one choice of a request, or all of them; idempotent, and gives no output."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for sequence in request.sequences:
            if index is None or sequence.index == index:
                self.queues.finish(sequence)
        self._forget_finished(request)

    def acknowledge(self, request_id: str, index: int, num_tokens: int) -> None:
        """The reader of a choice took `num_tokens` more tokens: credit to go on."""
        request = self._requests.get(request_id)
        if request is not None:
            self.queues.acknowledge(request.sequences[index], num_tokens)

    def has_work(self) -> bool:
        """Whether step() would compute anything now."""
        return self.queues.has_work()

    def step(self, now: float = 0.0) -> list[SequenceOutput]:
        """Plan, execute and commit one step.

        A step that raises is run again in parts, so that only those who cannot go on fail: row by
        row, or in halves where memory ran out (see `faults`).

        Args:
            now: the time by the caller's clock; outputs say by it when their requests were started.

        Raises:
            Exception: every row failed, and the executor says that it is broken.
        """
        self.scheduler.now = now
        self.scheduler.max_step_tokens = self._token_limit.current
        plan = self.scheduler.schedule(None if self.speculation is None else self.speculation.propose)
        if not plan.rows:
            return []
        outputs, error = self._try(plan)
        if error is None:
            self._num_steps += 1
            self._token_limit.went_well()
        else:
            logger.warning("step failed, trying it in parts", rows=len(plan.rows), error=repr(error))
            outputs = self._execute_in_parts(plan, error)
        # by request, not by output: two choices of one may end in the same step
        for request_id in {output.request_id for output in outputs if output.finish_reason is not None}:
            self._forget_finished(self._requests[request_id])
        return outputs

    def _execute(self, plan: StepPlan) -> list[SequenceOutput]:
        began = self._clock() if self._clock is not None else 0.0
        result = self.executor.collect(self.executor.launch(plan))
        num_tokens = plan.num_tokens
        if self._clock is not None:
            self.scheduler.pace.learn(plan, num_tokens, self._clock() - began)
        self._num_computed_tokens += num_tokens
        sequences = [self.queues.sequence(row.sequence_id) for row in plan.rows]
        outputs = self.scheduler.update(plan, result)
        if self.speculation is not None:
            for place, sequence in enumerate(sequences):
                if place not in result.failures and not sequence.is_finished:
                    self.speculation.observe(sequence, plan.rows[place].block_copies)
        for place, error in result.failures.items():
            if not self._recovers(plan.rows[place], sequences[place], error):
                outputs.append(self._fail(sequences[place], error))
        return outputs

    def _recovers(self, row: Row, sequence: Sequence, error: Exception) -> bool:
        """Whether a row that failed by itself may not be at fault, so that its sequence goes on another way."""
        if row.num_drafts:
            # a wrong guess may have done it: none any more
            if self.speculation is not None:
                self.speculation.turn_off(sequence, error)
            return True
        return isinstance(error, FloatingPointError) and self.scheduler.distrust(sequence)

    def _try(self, plan: StepPlan) -> tuple[list[SequenceOutput], Exception | None]:
        try:
            return self._execute(plan), None
        except Exception as error:
            return [], without_frames(error)

    def _execute_in_parts(self, plan: StepPlan, error: Exception) -> list[SequenceOutput]:
        self._num_failed_steps += 1
        outputs: list[SequenceOutput] = []
        largest = num_failed = 0
        ran_out = is_out_of_memory(error)
        parts = deque(first_parts(plan, out_of_memory=ran_out))
        while parts:
            part = parts.popleft()
            result, failure = self._try(part)
            outputs += result
            if failure is None:
                largest = max(largest, part.num_tokens)
            elif is_out_of_memory(failure) and (smaller := smaller_parts(part)):
                ran_out = True
                parts.extendleft(reversed(smaller))
            elif len(part.rows) > 1:
                parts.extendleft(reversed(first_parts(part, out_of_memory=False)))
            else:
                num_failed += 1
                outputs.append(self._fail(self.queues.sequence(part.rows[0].sequence_id), failure))
        if ran_out:
            self._num_out_of_memory += 1
            self._token_limit.ran_out(largest)
        if num_failed == len(plan.rows):
            self.executor.check()
        return outputs

    def _fail(self, sequence: Sequence, error: Exception) -> SequenceOutput:
        # no traceback: renderers that show local variables would show the prompt
        logger.error("sequence failed", request_id=sequence.request.id, index=sequence.index, error=repr(error))
        self.queues.finish(sequence)
        failure = (
            error
            if isinstance(error, TrioLLMError)
            else RequestFailed(f"the request failed in the engine: {type(error).__name__}")
        )
        if failure is not error:
            failure.__cause__ = error
        return SequenceOutput(sequence.request.id, sequence.index, (), FinishReason.ERROR, failure)

    def _forget_finished(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.is_finished:
                self.executor.release(sequence.id)
                if self.speculation is not None:
                    self.speculation.release(sequence.id)
        if all(sequence.is_finished for sequence in request.sequences):
            self._requests.pop(request.id, None)

    def statistics(self) -> CoreStatistics:
        return CoreStatistics(
            num_running=self.queues.num_running,
            num_waiting=self.queues.num_waiting,
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free_blocks,
            num_preemptions=self.queues.num_preemptions,
            num_cache_queries=self.scheduler.prefix_cache.num_queries,
            num_cache_hits=self.scheduler.prefix_cache.num_hits,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_drafts=self.scheduler.num_drafts,
            num_draft_tokens=self.scheduler.num_draft_tokens,
            num_accepted_tokens=self.scheduler.num_accepted_tokens,
            num_failed_steps=self._num_failed_steps,
            num_out_of_memory=self._num_out_of_memory,
        )

    def check(self) -> None:
        """Assert the invariants; for tests after every step, and cheap enough when idle."""
        self.scheduler.check()
        live = {s.id for request in self._requests.values() for s in request.sequences if not s.is_finished}
        assert live == self.queues.live_ids(), "a sequence lives without its request, or the reverse"

    def close(self) -> None:
        """Close executor and drafter; idempotent."""
        if self.speculation is not None:
            self.speculation.close()
        self.executor.close()
