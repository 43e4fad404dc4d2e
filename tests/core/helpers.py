"""Shared pieces of the core's tests: requests, a driver, and the tokens that a fake model must give."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

from trio_llm.config import EngineSettings
from trio_llm.core.engine_core import EngineCore
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.request import FinishReason, Request
from trio_llm.core.request import Sequence as TokenSequence
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import SamplingTask, SequenceOutput, StepPlan
from trio_llm.core.step_costs import StepCosts

VOCAB_SIZE = 40
MAX_STEPS = 5000

Outputs = dict[tuple[str, int], list[int]]


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    n: int = 1,
    seed: int = 0,
    priority: int = 0,
    eos: Iterable[int] = (),
    **fields: object,
) -> Request:
    """A greedy request unless `fields` says otherwise."""
    params = SamplingParams(**{"n": n, "temperature": 0.0, **fields})
    resolved = params.resolved(SamplingParams(), max_tokens=max_tokens, seed=seed)
    return Request(request_id, list(prompt), resolved, frozenset(eos), priority)


def next_token(context: Sequence[int], output_index: int) -> int:
    """The fake model: depends on every token before, their order, and the output index."""
    return zlib.crc32(repr((list(context), output_index)).encode()) % VOCAB_SIZE


def expected_tokens(request: Request) -> list[int]:
    """What `request` must give, worked out with no engine at all."""
    tokens: list[int] = []
    assert request.params.max_tokens is not None
    while len(tokens) < request.params.max_tokens:
        tokens.append(next_token([*request.prompt_token_ids, *tokens], len(tokens)))
        if tokens[-1] in request.eos_token_ids or tokens[-1] in request.params.stop_token_ids:
            break
    return tokens


class FaultyExecutor(FakeExecutor):
    """A FakeExecutor of `next_token` that raises where it is told to, before or after it did the work.

    `fail_launch` and `fail_collect` see the plan and may raise.
    """

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 128) -> None:
        info = ExecutorInfo(
            num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB_SIZE, max_model_len=max_model_len
        )
        super().__init__(info=info, next_token=next_token)
        self.fail_collect = lambda plan: None

    def collect(self, handle: StepPlan):
        result = super().collect(handle)
        self.fail_collect(handle)
        return result


class FakeDrafter:
    """Guesses what `guess` gives for a sequence and a number of tokens; costs nothing."""

    prior: Sequence[float] = (0.05, 0.4, 0.6, 0.8, 0.9)
    costs: StepCosts | None = None

    def __init__(self, guess: Callable[[TokenSequence, int], Sequence[int]] = lambda sequence, count: ()) -> None:
        self.guess = guess
        self.released: list[int] = []

    def admit(self, sequence_id: int, task: SamplingTask) -> None:
        pass

    def observe(self, sequence: TokenSequence, block_copies: Sequence[tuple[int, int]] = ()) -> None:
        pass

    def backlog(self, sequence: TokenSequence) -> int | None:
        return 0

    def propose(self, wanted: Sequence[tuple[TokenSequence, int]]) -> Sequence[Sequence[int]]:
        return [self.guess(sequence, count) for sequence, count in wanted]

    def release(self, sequence_id: int) -> None:
        self.released.append(sequence_id)

    def close(self) -> None:
        pass


def make_core(
    executor: FakeExecutor | None = None, clock: Callable[[], float] | None = None, **settings: int
) -> EngineCore:
    return EngineCore(
        FaultyExecutor() if executor is None else executor,
        EngineSettings(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, **settings}),
        clock=clock,
    )


def random_clock(seed: int) -> Callable[[], float]:
    """A clock by which every step takes another time, up to a second, and one in ten a minute."""
    numbers = random.Random(seed)
    times = itertools.accumulate(numbers.choice([1] * 9 + [60]) * numbers.random() for _ in itertools.count())
    return lambda: next(times)


def gather(outputs: Outputs, reasons: dict[tuple[str, int], FinishReason], step: Iterable[SequenceOutput]) -> None:
    """Add a step's outputs; a sequence may end once and give nothing after that."""
    for output in step:
        key = output.request_id, output.index
        assert key not in reasons, f"{key} gives output after its end"
        outputs.setdefault(key, []).extend(output.token_ids)
        if output.finish_reason is not None:
            reasons[key] = output.finish_reason


def run(
    core: EngineCore, requests: Iterable[Request], *, before_step=lambda core: None, acknowledge: bool = True
) -> tuple[Outputs, dict[tuple[str, int], FinishReason]]:
    """Add the requests and step until nothing is left to do, checking the invariants all the way."""
    outputs: Outputs = {}
    reasons: dict[tuple[str, int], FinishReason] = {}
    for request in requests:
        core.add(request)
    for _ in range(MAX_STEPS):
        if not core.has_work():
            break
        before_step(core)
        step = core.step()
        core.check()
        gather(outputs, reasons, step)
        if acknowledge:
            for output in step:
                core.acknowledge(output.request_id, output.index, len(output.token_ids))
    else:
        raise AssertionError(f"no end after {MAX_STEPS} steps")
    return outputs, reasons


def is_idle(core: EngineCore) -> bool:
    """Nothing runs or waits and every block is free."""
    statistics = core.statistics()
    return statistics.num_running == statistics.num_waiting == 0 and statistics.num_free_blocks == statistics.num_blocks


def count_calls(function: Callable[[], object]) -> int:
    """Calls of functions, Python's own included, that `function` makes."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what a collection calls (hypothesis has a hook there) is not the product's
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return num_calls
