"""A model without a model: tokens that are a function of prompt, seed and choice, and faults on demand.

`reference` is the same function with no engine at all; whatever the engine does with batches,
blocks, drafts and faults, it must give these tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random

import attrs
import torch

from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.request import FinishReason
from trio_llm.core.sampling_params import SamplingParams, StructuredOutput
from trio_llm.core.step import Row, SamplingTask, StepPlan, StepResult
from trio_llm.engine.simulation import ByteTokenizer

VOCAB_SIZE = 128
LETTERS = b"abcdefghijklmnop"
END = ord("\n")
UNSPEAKABLE = 127
"""The token that the tokenizer cannot decode."""


class BrokenTokenizer(ByteTokenizer):
    """Cannot decode one token."""

    def decode(self, token_ids: Sequence[int], **options: object) -> str:
        if UNSPEAKABLE in token_ids:
            raise UnicodeError("unspeakable")
        return super().decode(token_ids, **options)


@attrs.frozen
class Poison:
    """What is wrong with a request: its `kind`, from output `index` of choice `choice` on."""

    kind: str
    index: int = 0
    choice: int = 0


@attrs.frozen
class Form:
    """A structured output: so many letters, then the end."""

    length: int
    refused: bool = False
    """It cannot be compiled."""

    @property
    def structure(self) -> StructuredOutput:
        """What a request for it says."""
        return StructuredOutput("regex", "(" if self.refused else f"[a-p]{{{self.length}}}")

    def allow(self, token: int, output_index: int) -> int:
        """The token, or what comes in its place where the form does not allow it."""
        if output_index >= self.length:
            return END
        return LETTERS[0] if token == END else token


def next_token(context: list[int], key: int, output_index: int, poison: Poison | None, choice: int) -> int:
    """The model.  It repeats itself now and then, so that drafts can be right."""
    if (
        poison is not None
        and poison.kind == "tokenizer raises"
        and (choice, output_index) == (poison.choice, poison.index)
    ):
        return UNSPEAKABLE
    value = zlib.crc32(bytes(context), key + choice)
    if value % 4 and len(context) > 5 and context[-5] in LETTERS:
        return context[-5]
    return END if value % 25 == 0 else LETTERS[(value >> 8) % len(LETTERS)]


def reference(
    prompt: Sequence[int],
    params: SamplingParams,
    choice: int,
    poison: Poison | None,
    eos: frozenset[int],
    form: Form | None = None,
) -> tuple[list[int], str, FinishReason]:
    """Tokens, text and reason of one choice that nothing disturbs, worked out with no engine at all."""
    assert params.seed is not None and params.max_tokens is not None
    context, key = list(prompt), params.seed & 0xFFFFFF
    tokens: list[int] = []
    text = ""
    while len(tokens) < params.max_tokens:
        token = next_token(context, key, len(tokens), poison, choice)
        if form is not None:
            token = form.allow(token, len(tokens))
        tokens.append(token)
        context.append(token)
        if token in eos or token in params.stop_token_ids:
            return tokens, text, FinishReason.STOP
        text += chr(token)
        for stop in sorted(params.stop, key=len, reverse=True):
            if text.endswith(stop):
                return tokens, text[: -len(stop)], FinishReason.STOP
    return tokens, text, FinishReason.LENGTH


class Crash(Exception):
    """Breaks the engine for good."""


def cuda_out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def cpu_out_of_memory() -> Exception:
    return RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")


class SimulatedExecutor(FakeExecutor):
    """Runs plans with `next_token`; some steps fail, and rows of poisoned requests always do.

    Args:
        random: decides which steps fail.
        fault_rate: how many of the steps.
        poisons: by the seed of the request.
    """

    def __init__(self, info: ExecutorInfo, random: Random, fault_rate: float, poisons: dict[int, Poison]) -> None:
        super().__init__(info=info)
        self.random = random
        self.fault_rate = fault_rate
        self.poisons = poisons
        self.counts: dict[str, int] = {}
        """Faults that happened, by kind."""
        self.num_collected = 0
        self.is_dead = False
        self._poisoned: dict[int, Poison] = {}
        self._fault: str | None = None
        self._limit = 0
        self._num_tries = 0
        """Launches in this turn; what raises once does so in the first, or it could hit a row alone."""

    def begin_turn(self) -> None:
        """A step may follow: choose whether it fails."""
        random = self.random
        self._fault = None
        self._num_tries = 0
        if random.random() < self.fault_rate:
            self._fault = random.choice(
                ["launch raises once", "collect raises once", "CUDA out of memory", "CPU out of memory"]
            )
            self._limit = random.choice([1, 1, 2, 4])

    def admit(self, sequence_id: int, task: SamplingTask) -> None:
        params, index = task.params, task.choice
        assert params.seed is not None
        poison = self.poisons.get(params.seed)
        if poison is not None and (poison.choice == index or poison.kind == "admit raises"):
            if poison.kind == "admit raises" and index == params.n - 1:
                self._count(poison.kind)
                raise ValueError("this request cannot be prepared")
            self._poisoned[sequence_id] = poison
        super().admit(sequence_id, task)

    def release(self, sequence_id: int) -> None:
        self._poisoned.pop(sequence_id, None)
        super().release(sequence_id)

    def launch(self, plan: StepPlan) -> StepPlan:
        if self.is_dead:
            raise Crash("the device is gone")
        self._num_tries += 1
        match self._fault:
            case "launch raises once" if self._num_tries == 1:
                self._fail_once(RuntimeError("injected"))
            case "CUDA out of memory" if plan.num_tokens > self._limit:
                self._count("CUDA out of memory")
                raise cuda_out_of_memory()
            case "CPU out of memory" if plan.num_tokens > self._limit:
                self._count("CPU out of memory")
                raise cpu_out_of_memory()
        for row in plan.rows:
            match self._poison(row):
                case "row raises":
                    self._count("row raises")
                    raise ValueError("this row raises")
                case "row runs out of memory":
                    self._count("row runs out of memory")
                    raise cuda_out_of_memory() if self.random.random() < 0.5 else cpu_out_of_memory()
        return plan

    def collect(self, handle: StepPlan) -> StepResult:
        result = super().collect(handle)
        self.num_collected += 1
        if self._fault == "collect raises once" and self._num_tries == 1:
            self._fail_once(RuntimeError("injected"))
        failures: dict[int, Exception] = {}
        for place, row in enumerate(handle.rows):
            match self._poison(row) if row.sample else None:
                case "row is not finite":
                    self._count("row is not finite")
                    failures[place] = FloatingPointError("not finite")
                case "processor raises":
                    self._count("processor raises")
                    failures[place] = ValueError("the form has no next token")
        if not failures:
            return result
        tokens = tuple(() if place in failures else each for place, each in enumerate(result.token_ids))
        return attrs.evolve(result, token_ids=tokens, failures=failures)

    def check(self) -> None:
        if self.is_dead:
            raise Crash("the device is gone")

    def _fail_once(self, error: Exception) -> None:
        assert self._fault is not None
        self._count(self._fault)
        raise error

    def _poison(self, row: Row) -> str | None:
        poison = self._poisoned.get(row.sequence_id)
        return poison.kind if poison is not None and row.output_index >= poison.index else None

    def _count(self, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def _sample(self, row: Row) -> tuple[int, ...]:
        task = self.sequences[row.sequence_id]
        params, choice = task.params, task.choice
        assert params.seed is not None
        key, poison = params.seed & 0xFFFFFF, self.poisons.get(params.seed)
        form = task.grammar

        def choose(context: list[int], index: int) -> int:
            token = next_token(context, key, index, poison, choice)
            return form.allow(token, index) if isinstance(form, Form) else token

        self.next_token = choose
        return super()._sample(row)
