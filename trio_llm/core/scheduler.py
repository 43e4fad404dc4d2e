"""Scheduler: which tokens of which sequences the next step computes.

`schedule()` reserves blocks and gives a StepPlan; `update()` commits what came of it.
Only update() moves counters, so a step that raised leaves nothing to undo.

Who runs, who waits and who gives way is the queues' (see `queues`).  In a step, sequences with one token to go
come before those with a prompt to go: a long prompt cannot starve who is decoding, nor slow it by much, since
beside it prompts come in small pieces (see `pace`); and since the budget is above the number of sequences, who is
decoding cannot starve a prompt.  Drafts come last: they take only budget and blocks that nobody else wants in this
step.

Blocks are shared in two ways.  A full block can be found by its content when a sequence is
admitted (prefix caching).  And the choices of one request share its prompt: the first
computes it, the others fork from it, copying the last block if the prompt ends inside it.
Nobody writes into a block that is shared or can be found.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trio_llm.core.pace import Pace, PromptShare
from trio_llm.core.prefix_cache import PrefixCache
from trio_llm.core.queues import Queues
from trio_llm.core.request import FinishReason, Sequence, Status
from trio_llm.core.step import Row, SequenceOutput, StepPlan, StepResult

Draft = Callable[[list[tuple[Sequence, int]], int, int, Callable[[Sequence, int], int]], None]
"""See `Speculation.propose`."""


class Scheduler:
    """Token-budget scheduling with continuous batching, chunked prefill and preemption.

    Touches no tensor.  Of a request it sees tokens only.

    Args:
        queues: all sequences, and the KV blocks they hold.
        prefix_cache: which blocks can be found by their content.
        max_num_seqs: rows in a step.
        max_num_batched_tokens: token budget of a step, above max_num_seqs.
        pace: of these, what prompts may have where others decode.
        max_model_len: tokens of a sequence, prompt and output.
    """

    def __init__(
        self,
        queues: Queues,
        prefix_cache: PrefixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pace: Pace,
        max_model_len: int,
    ) -> None:
        self.queues = queues
        self.pool = queues.pool
        self.prefix_cache = prefix_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_step_tokens = max_num_batched_tokens
        """The budget of the next step: less than the above while memory is short."""
        self.pace = pace
        self.max_model_len = max_model_len
        self.now = 0.0
        """The time, as who steps the engine has it."""
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def distrust(self, sequence: Sequence) -> bool:
        """A sequence's keys and values seem broken: nobody finds its blocks from now on.

        Returns:
            Whether some of them came from others, who may be at fault: then it waits to compute all by itself.
        """
        self.pool.forget(sequence.block_table)
        if not sequence.has_shared:
            return False
        sequence.shares = False
        self.queues.preempt(sequence)
        return True

    def schedule(self, draft: Draft | None = None) -> StepPlan:
        """Choose and reserve the next step; an empty plan only when there is no work.

        Args:
            draft: called once it is known who takes part, to give sequences their `draft_token_ids`.
        """
        rows: dict[int, Row] = {}
        budget = self.max_step_tokens
        # the budget is above the rows, so that a prompt gets something beside any number who decode
        max_rows = max(1, min(self.max_num_seqs, budget - 1))
        may_admit = True

        ready = self.queues.ready()
        prefilling = [sequence for sequence in ready if len(sequence.token_ids) - sequence.num_computed_tokens > 1]
        decoding = [sequence for sequence in ready if len(sequence.token_ids) - sequence.num_computed_tokens == 1]
        if max_rows == 1:
            # it goes to the first of all, whatever it does
            decoding, candidates = [], ready[:1]
        else:
            # one is kept for a prompt
            decoding = decoding[: max_rows - bool(prefilling)]
            candidates = decoding + prefilling
        prompts = self._prompt_share(len(decoding), len(prefilling), max_rows, budget)
        for sequence in candidates:
            start = sequence.num_computed_tokens
            is_prompt = len(sequence.token_ids) - start > 1
            # if all who decode had to give way, prompts are alone
            limit = min(budget, prompts.most(start, len(sequence.token_ids))) if is_prompt and rows else budget
            if limit == 0 or len(rows) == max_rows:
                break
            while sequence.status is Status.RUNNING:
                row = self._reserve(sequence, limit)
                if row is not None:
                    rows[sequence.id] = row
                    budget -= len(row.token_ids)
                    if is_prompt:
                        prompts.take(start, len(row.token_ids))
                    break
                victim = self.queues.victim()
                # to take from a paused one costs nobody a turn: whether it is there changes nothing for the others
                may_admit = may_admit and self.queues.is_paused(victim)
                # the last of all has no row yet unless it decodes
                budget += rows.pop(victim.id, None) is not None
                self.queues.preempt(victim)

        while may_admit and budget > 0 and len(rows) < max_rows:
            newcomer = self.queues.first_waiting()
            if newcomer is None or (rows and not prompts.most(0, newcomer.num_tokens)):
                break
            copies = self._admit(newcomer)
            if copies is None:
                break
            start = newcomer.num_computed_tokens
            limit = min(budget, max(1, prompts.most(start, newcomer.num_tokens))) if rows else budget
            row = self._reserve(newcomer, limit, copies)
            assert row is not None, "room was made for it"
            rows[newcomer.id] = row
            budget -= len(row.token_ids)
            prompts.take(start, len(row.token_ids))
        if draft is not None:
            self._draft(list(rows.values()), budget, draft)
        with_drafts = {sequence.id for sequence in self.queues.running if sequence.draft_token_ids}
        for row in [row for row in rows.values() if row.sequence_id in with_drafts and row.sample]:
            rows[row.sequence_id] = drafted = self._with_drafts(row, budget)
            budget -= drafted.num_drafts
        return StepPlan(tuple(rows.values()))

    def _prompt_share(self, num_decoding: int, num_prefilling: int, max_rows: int, budget: int) -> PromptShare:
        if not num_decoding:
            return PromptShare(budget)
        return self.pace.share(num_decoding, min(num_prefilling + self.queues.num_next, max_rows - num_decoding))

    def _draft(self, rows: list[Row], budget: int, draft: Draft) -> None:
        sequences = [self.queues.sequence(row.sequence_id) for row in rows if row.sample and len(row.token_ids) == 1]
        decoding = [(sequence, most) for sequence in sequences if (most := self._most_drafts(sequence)) > 0]
        draft(decoding, sum(len(row.token_ids) for row in rows), budget, self._reserve_drafts)

    def _with_drafts(self, row: Row, budget: int) -> Row:
        """Drafts come last of all: they take what nobody else wanted of budget and blocks."""
        sequence = self.queues.sequence(row.sequence_id)
        drafts = sequence.draft_token_ids[: max(0, min(budget, self._most_drafts(sequence)))]
        drafts = drafts[: self._reserve_drafts(sequence, len(drafts))]
        return attrs.evolve(
            row,
            token_ids=(*row.token_ids, *drafts),
            num_drafts=len(drafts),
            new_blocks=tuple(sequence.block_table[sequence.num_blocks_sent :]),
        )

    def _most_drafts(self, sequence: Sequence) -> int:
        """Drafts that credit and length leave room for: one token is sure to come, drafts or not."""
        credit = self.queues.credit_window - (sequence.num_output_tokens - sequence.num_acknowledged)
        return min(credit, self._room(sequence)) - 1

    def _reserve_drafts(self, sequence: Sequence, count: int) -> int:
        """Take blocks for the next token and `count` drafts; gives the number of drafts that have some.

        Every running sequence is left a block for its next token: nobody is preempted for a draft.
        """
        missing = self.pool.blocks_for(sequence.num_tokens + count) - len(sequence.block_table)
        if missing > 0:
            spare = max(0, self.pool.num_free_blocks - len(self.queues.running))
            sequence.block_table += self.pool.allocate(min(missing, spare)) or []
        return min(count, len(sequence.block_table) * self.pool.block_size - sequence.num_tokens)

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Commit a step that was executed; gives what is new for each sequence that sampled.

        A sequence that came to its natural end is finished here; of a row that failed nothing is committed.
        """
        wanted = [row.sample and place not in result.failures for place, row in enumerate(plan.rows)]
        assert [bool(tokens) for tokens in result.token_ids] == wanted, "not the plan's result"
        outputs = []
        for place, (row, sampled) in enumerate(zip(plan.rows, result.token_ids, strict=True)):
            sequence = self.queues.sequence(row.sequence_id)
            if sequence.draft_token_ids:
                sequence.draft_token_ids = []
            if place in result.failures:
                continue
            sequence.num_blocks_sent = row.num_prior_blocks + len(row.new_blocks)
            sequence.num_computed_tokens = row.start + len(row.token_ids) - row.num_drafts
            if row.score:
                # after a preemption it starts again
                sequence.request.prompt_logprobs[row.start :] = result.prompt_logprobs[sequence.id]
            if row.sample:
                outputs.append(self._commit_tokens(sequence, row, sampled, result))
            else:
                self.prefix_cache.offer(sequence)
        return outputs

    def _commit_tokens(
        self, sequence: Sequence, row: Row, sampled: tuple[int, ...], result: StepResult
    ) -> SequenceOutput:
        request = sequence.request
        if row.num_drafts:
            self.num_drafts += 1
            self.num_draft_tokens += row.num_drafts
            self.num_accepted_tokens += len(sampled) - 1
        if request.leader is sequence:
            self.queues.let_follow(sequence)
        tokens, reason = self._until_end(sequence, sampled)
        self.queues.extend(sequence, tokens)
        # each accepted draft has its keys and values in the cache already
        sequence.num_computed_tokens += len(tokens) - 1
        self.prefix_cache.offer(sequence)
        if reason is not None:
            self.queues.finish(sequence)
        return SequenceOutput(
            request.id,
            sequence.index,
            tokens,
            reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            started_at=request.started_at or 0.0,
            logprobs=result.logprobs.get(sequence.id, ())[: len(tokens)],
            prompt_logprobs=tuple(request.prompt_logprobs) if row.score else None,
            is_first=row.output_index == 0,
        )

    def _until_end(self, sequence: Sequence, sampled: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """What of the tokens is wanted, and why that is the end of the sequence, if it is."""
        request, params = sequence.request, sequence.request.params
        room = self._room(sequence)
        if room <= 0:
            return (), FinishReason.LENGTH  # only the prompt was wanted
        eos_token_ids, stop_token_ids = request.eos_token_ids, params.stop_token_ids
        for count, token in enumerate(sampled, start=1):
            is_eos = token in eos_token_ids
            if is_eos or token in stop_token_ids:
                # a grammar's end comes only where the text is complete, and may be the only token that can
                may_end = sequence.num_output_tokens + count > params.min_tokens
                if may_end or (is_eos and request.grammar is not None):
                    return sampled[:count], FinishReason.STOP
            if count == room:
                return sampled[:count], FinishReason.LENGTH
        return sampled, None

    def _room(self, sequence: Sequence) -> int:
        """Tokens that the sequence may still get."""
        return sequence.request.max_num_tokens - len(sequence.token_ids)

    def _reserve(self, sequence: Sequence, budget: int, block_copies: tuple[tuple[int, int], ...] = ()) -> Row | None:
        """A row of at most `budget` tokens with its blocks allocated, or None if there are none."""
        start, table = sequence.num_computed_tokens, sequence.block_table
        pending = sequence.token_ids[start : start + budget]
        end = start + len(pending)
        missing = self.pool.blocks_for(end) - len(table)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is None:
                return None
            table += blocks
        num_sent = sequence.num_blocks_sent
        return Row(
            sequence.id,
            tuple(pending),
            start,
            num_prior_blocks=num_sent,
            new_blocks=tuple(table[num_sent:]),
            num_drafts=0,
            sample=end == len(sequence.token_ids),
            output_index=sequence.num_output_tokens,
            score=self._scores(sequence),
            block_copies=block_copies,
        )

    def _scores(self, sequence: Sequence) -> bool:
        """Whether it computes the prompt for a request that wants to know its log-probabilities."""
        request = sequence.request
        return request.params.prompt_logprobs is not None and request.leader is sequence

    def _admit(self, newcomer: Sequence) -> tuple[tuple[int, int], ...] | None:
        """Let the first of the waiting run, with all blocks that it can share.

        All its tokens must find room at once (with less, admission and preemption would chase
        each other); who is paused gives way to it.

        Returns:
            Blocks to copy before its first step, or None if there is no room.
        """
        shared, source = self._shareable(newcomer)
        self.pool.hold(shared)
        needed = self.pool.blocks_for(newcomer.num_tokens) - len(shared)
        paused = [sequence.block_table for sequence in self.queues.running if self.queues.is_paused(sequence)]
        if needed > self.pool.num_free_blocks + self.pool.num_freed_by(paused):
            self.pool.free(shared)
            return None
        while needed > self.pool.num_free_blocks:
            victim = self.queues.victim()
            if victim is newcomer.fork_of:
                source = None  # the partial block goes with it; the full ones are held
            self.queues.preempt(victim)
        self.queues.let_in(newcomer)
        if newcomer.request.started_at is None:
            newcomer.request.started_at = self.now
        newcomer.block_table = shared
        newcomer.has_shared = bool(shared or source is not None)
        newcomer.num_hashed_blocks = len(shared)
        newcomer.num_computed_tokens = len(shared) * self.pool.block_size
        self.prefix_cache.count(newcomer)
        newcomer.fork_of = None
        if source is None:
            return ()
        blocks = self.pool.allocate(1)
        assert blocks is not None, "there was room for more"
        newcomer.block_table = shared + blocks
        newcomer.num_computed_tokens = newcomer.num_tokens - 1
        return ((source, blocks[0]),)

    def _shareable(self, newcomer: Sequence) -> tuple[list[int], int | None]:
        """Full blocks that the newcomer can share, and a partial one that it can copy.

        The last token is always left to compute: its logits are wanted.
        """
        num_full, rest = divmod(newcomer.num_tokens - 1, self.pool.block_size)
        leader = newcomer.fork_of if newcomer.shares else None
        # the leader may have been preempted meanwhile, and be on its way again
        if leader is not None and leader.num_computed_tokens >= newcomer.num_tokens - 1:
            return leader.block_table[:num_full], leader.block_table[num_full] if rest else None
        if self._scores(newcomer) or not newcomer.shares:
            return [], None  # what is found is not computed, and has no logits
        return self.prefix_cache.find(newcomer, num_full), None

    def check(self) -> None:
        """Assert the invariants of queues, counters and blocks."""
        self.queues.check()
        for sequence in map(self.queues.sequence, self.queues.live_ids()):
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens <= self.max_model_len
            assert sequence.num_blocks_sent <= len(sequence.block_table)
            assert sequence.num_computed_tokens <= len(sequence.block_table) * self.pool.block_size
            # what will be written must belong to it alone
            first = sequence.num_computed_tokens // self.pool.block_size
            assert all(map(self.pool.is_writable, sequence.block_table[first:]))
