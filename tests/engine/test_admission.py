"""What the engine lets in, and what it says to the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.engine.engine import Engine
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.registry import Registry
from trio_llm.engine.simulation import ByteTokenizer, FakeModel, open_simulation
from trio_llm.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, QueueFull
from trio_llm.prompt.chat_template import Conversation
from trio_llm.prompt.truncation import Dropped, Truncation

OpenFake = Callable[..., AbstractAsyncContextManager[Engine]]


async def refused(engine: Engine, prompt: Any, **fields: Any) -> InvalidRequest | QueueFull:
    with pytest.raises((InvalidRequest, QueueFull)) as caught:
        async with engine.generate(prompt, **fields):
            raise AssertionError("unreachable")
    return caught.value


async def test_prompts_of_every_kind(open_fake: OpenFake) -> None:
    async with open_fake() as engine:
        messages = [{"role": "user", "content": "hi"}]
        prompts: list[Any] = ["hello", [1, 2], (1, 2), messages, Conversation(messages)]
        for prompt in prompts:
            async with engine.generate(prompt, max_tokens=1) as generation:
                async for _ in generation:
                    pass
            assert generation.usage.completion_tokens == 1
        assert bytes(generation.prompt_token_ids) == b"user: hi\nassistant: "


@pytest.mark.parametrize("prompt", ["", [], ["a"], [1.0], [True], [None], {}, [128], [-1], [[1]]])
async def test_prompts_that_are_none(open_fake: OpenFake, prompt: Any) -> None:
    async with open_fake() as engine:
        error = await refused(engine, prompt)
        assert error.field == "prompt"
        assert engine.statistics().num_requests == 0
        assert sum(engine.statistics().finished.values()) == 0


async def test_parameters_are_checked_at_once(open_fake: OpenFake) -> None:
    async with open_fake() as engine:
        with pytest.raises(InvalidRequest) as caught:
            engine.generate("hello", temperature=-1)
        assert caught.value.field == "temperature"


async def test_the_context(open_fake: OpenFake) -> None:
    async with open_fake(max_model_len=100) as engine:
        error = await refused(engine, [1] * 100)
        assert isinstance(error, ContextLengthExceeded)
        assert error.field == "prompt"
        assert error.details == {"limit": 100, "prompt_tokens": 100, "max_tokens": None}
        error = await refused(engine, [1] * 90, max_tokens=11)
        assert isinstance(error, ContextLengthExceeded)
        assert error.field == "max_tokens"
        for number in ("100", "90", "11"):
            assert number in error.message
        async with engine.generate([1] * 90, max_tokens=10) as generation:
            async for _ in generation:
                pass
        assert generation.usage.total_tokens == 100


async def test_the_smallest_limit_counts() -> None:
    small_pool = FakeExecutor(ExecutorInfo(num_blocks=5, block_size=4, vocab_size=128, max_model_len=128))
    async with open_engine(FakeModel(), executor=small_pool) as engine:
        assert engine.max_model_len == 20
        assert isinstance(await refused(engine, [1] * 20), ContextLengthExceeded)
        async with engine.generate([1] * 19) as generation:
            assert len([delta async for delta in generation]) == 1
    async with open_engine(FakeModel(max_model_len=7), executor=FakeExecutor()) as engine:
        assert engine.max_model_len == 7


async def test_the_queue(autojump_clock: MockClock) -> None:
    async with open_simulation(
        max_num_seqs=2, max_num_batched_tokens=8, max_num_queued_reqs=1, seconds_per_turn=1
    ) as engine:
        async with engine.generate([1], n=2, max_tokens=3) as first, engine.generate([1], max_tokens=3):
            assert isinstance(await refused(engine, [1]), QueueFull)
            assert (await refused(engine, [1], n=4)).field == "n"
            first.abort()
            async with engine.generate([1], n=2, max_tokens=3) as second:
                assert isinstance(await refused(engine, [1]), QueueFull)
                second.abort()
        async with engine.generate([1], max_tokens=2) as generation:
            assert len([delta async for delta in generation]) == 2


async def test_the_queue_in_tokens(autojump_clock: MockClock) -> None:
    async with open_simulation(max_num_queued_tokens=20, seconds_per_turn=1) as engine:
        async with engine.generate([1] * 15, max_tokens=3) as first:
            error = await refused(engine, [1] * 6)
            assert isinstance(error, QueueFull)
            assert error.details["limit"] == 20
            for number in ("15", "20"):
                assert number in error.message
            async with engine.generate([1] * 5, max_tokens=3) as second:
                # who has a first token waits no more
                await anext(first)
                await anext(second)
                async with engine.generate([1] * 20, n=2, max_tokens=3) as third:
                    assert isinstance(await refused(engine, [1]), QueueFull)
                    third.abort()
                # alone in the queue, a prompt may be longer than it
                async with engine.generate([1] * 50, max_tokens=3):
                    assert isinstance(await refused(engine, [1]), QueueFull)
        assert engine._num_queued_tokens == 0
        async with engine.generate([1] * 15, max_tokens=1) as last:
            assert len([delta async for delta in last]) == 1
        assert engine.statistics().admitted == 5


async def test_seeds_and_defaults(open_fake: OpenFake) -> None:
    model = FakeModel(defaults=SamplingParams(temperature=0.6, top_p=0.9))
    async with open_fake(model=model) as engine:
        first, second = engine.generate([1], top_p=0.5), engine.generate([1], SamplingParams(seed=7), temperature=0)
        async with first, second:
            assert first.params.seed != engine.generate([1]).params.seed
            assert first.params.seed is not None and 0 <= first.params.seed < 2**64
            assert (first.params.temperature, first.params.top_p, first.params.top_k) == (0.6, 0.5, 0)
            assert first.params.max_tokens == engine.max_model_len - 1
            assert (second.params.temperature, second.params.top_p, second.params.seed) == (0, 0.9, 7)
        assert first.request_id.startswith("req-")
        assert first.request_id != second.request_id


async def test_abort_during_tokenising(open_fake: OpenFake) -> None:
    """A request has its id from the moment it is entered."""
    async with open_fake() as engine:
        generation = engine.generate("hello", request_id="mine")

        async def abort() -> None:
            while not engine.abort("mine"):
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(abort)
            async with generation:
                async for _ in generation:
                    pass
        assert generation.finish_reason in ("abort", "length")


async def test_registry() -> None:
    async with open_simulation() as engine:
        registry = Registry({"a": engine})
        registry["b"] = engine
        assert registry.get("a") is registry["b"] is engine
        assert (list(registry), len(registry), "c" in registry) == (["a", "b"], 2, False)
        assert registry.engines() == [engine]
        with pytest.raises(ModelNotFound, match="'c' is not served here; served: 'a', 'b'") as caught:
            registry.get("c")
        assert caught.value.field == "model"
        del registry["a"]
        with pytest.raises(ModelNotFound):
            del registry["a"]
        assert registry.items() == [("b", engine)]


async def test_a_prompt_that_is_too_long_can_be_cut(open_fake: OpenFake) -> None:
    async with open_fake(max_model_len=100) as engine:
        messages = [{"role": "user", "content": "x" * 60}, {"role": "user", "content": "y" * 30}]
        fitting = Truncation("last_tokens", max_prompt_tokens=5)
        async with engine.generate([7, 6, 5, 4, 3, 2, 1], truncation=fitting, max_tokens=1) as generation:
            assert generation.prompt_token_ids == [5, 4, 3, 2, 1]
            assert generation.dropped == Dropped(0, 2)
        for prompt in (messages, Conversation(messages)):
            assert isinstance(await refused(engine, prompt), ContextLengthExceeded)
            async with engine.generate(prompt, truncation=Truncation()) as generation:
                assert bytes(generation.prompt_token_ids) == f"user: {'y' * 30}\nassistant: ".encode()
                assert generation.dropped == Dropped(1, 67)
        async with engine.generate(messages[1:], truncation=Truncation()) as generation:
            assert generation.dropped is None
        error = await refused(engine, messages, truncation=Truncation(), max_tokens=60)
        assert isinstance(error, ContextLengthExceeded)
        assert error.field == "prompt"
        assert (await refused(engine, messages, truncation=Truncation(), max_tokens=100)).field == "max_tokens"
        assert (await refused(engine, ["a"], truncation=Truncation())).field == "prompt"
        assert engine.statistics().num_requests == 0


class SlowTokenizer(ByteTokenizer):
    """Tokenises nothing until it may, and notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.seen: list[str] = []

    def encode(self, text: str, **options: Any) -> list[int]:
        self.seen.append(text)
        assert self.may.wait(30)
        return super().encode(text, **options)

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "the longest": 1}


async def use(engine: Engine, prompt: str) -> None:
    async with engine.generate(prompt, max_tokens=1) as generation:
        async for _ in generation:
            pass


async def test_a_text_that_can_never_fit_is_refused_without_tokenising_it(open_fake: OpenFake) -> None:
    tokenizer = SlowTokenizer()
    tokenizer.may.set()
    async with open_fake(model=FakeModel(tokenizer=tokenizer), max_model_len=100) as engine:
        longest = 100 * len("the longest")
        messages = [{"role": "user", "content": "x" * (longest + 1)}]
        for prompt in ["x" * (longest + 1), messages, Conversation(messages)]:
            error = await refused(engine, prompt)
            assert isinstance(error, ContextLengthExceeded)
            assert error.field == "prompt"
            assert "1101 characters" in error.message
        assert tokenizer.seen == []
        error = await refused(engine, "x" * longest)  # perhaps it fits: it is tokenised to see
        assert isinstance(error, ContextLengthExceeded)
        assert len(tokenizer.seen) == 1
        assert engine._num_choices == 0


async def test_who_is_being_tokenised_is_counted_and_who_leaves_before_costs_nothing(open_fake: OpenFake) -> None:
    tokenizer = SlowTokenizer()
    async with open_fake(model=FakeModel(tokenizer=tokenizer), max_num_seqs=1, max_num_queued_reqs=3) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(use, engine, "one")
            nursery.start_soon(use, engine, "two")
            await wait_all_tasks_blocked()
            async with trio.open_nursery() as leaving:
                leaving.start_soon(use, engine, "waits for a thread and leaves")
                leaving.start_soon(use, engine, "so does this one")
                await wait_all_tasks_blocked()
                assert engine.statistics().num_waiting == 4
                assert isinstance(await refused(engine, "one too many"), QueueFull)
                leaving.cancel_scope.cancel()
            assert engine.statistics().num_waiting == 2
            tokenizer.may.set()
        assert sorted(tokenizer.seen) == ["one", "two"]
        assert engine._num_choices == 0
        assert engine.statistics().num_waiting == 0
