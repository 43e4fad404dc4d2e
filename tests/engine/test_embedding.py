"""The engine of embedding models: batches, limits, every way out, and the real model."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import trio
import trio.testing

from trio_llm.engine.embedding import open_embedder
from trio_llm.engine.opening import open_model
from trio_llm.engine.simulation import FakeEmbeddingModel, FakeEncoder
from trio_llm.errors import (
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    QueueFull,
    RequestFailed,
    ShuttingDown,
    UnsupportedParameter,
)
from trio_llm.models.encoders import load_encoder


class Steps:
    """Records steps, each of which waits to be let through."""

    def __init__(self, *, is_open=False):
        self.texts = []
        self.permits = threading.Semaphore(0)
        self.is_open = is_open
        self.failing = None

    def __call__(self, texts):
        self.texts.append([bytes(text).decode() for text in texts])
        if not self.is_open:
            assert self.permits.acquire(timeout=60)
        if self.failing is not None and any(self.failing in text for text in texts):
            raise MemoryError("too much")

    def let(self, count):
        self.permits.release(count)

    async def begun(self, count):
        with trio.fail_after(20):
            while len(self.texts) < count:  # noqa: ASYNC110 - it happens in a thread
                await trio.sleep(0.001)


def fake(steps=None, model=None, **settings):
    encoder = FakeEncoder() if steps is None else FakeEncoder(steps)
    return open_embedder(model or FakeEmbeddingModel(), encoder=encoder, **settings)


def plain(embeddings):
    return [vector.tolist() for vector in embeddings.vectors]


async def test_vectors_in_the_order_of_the_texts():
    async with fake(max_num_batched_tokens=10, max_num_seqs=3) as embedder:
        found = await embedder.embed(["abc", [1, 2], "z" * 20, "b"])
        expected = [[97, 99, 3, 294], [1, 2, 2, 3], [122, 122, 20, 2440], [98, 98, 1, 98]]
        assert plain(found) == expected and found.prompt_tokens == 26
        assert all(vector.typecode == "f" for vector in found.vectors)
        statistics = embedder.statistics()
        assert statistics.prompt_tokens == 26 and statistics.finished["stop"] == 1
        assert (statistics.num_requests, statistics.num_waiting) == (0, 0)


async def test_steps_are_filled_by_all_requests_in_turn():
    steps = Steps()
    async with fake(steps, max_num_batched_tokens=6, max_num_seqs=3) as embedder, trio.open_nursery() as nursery:
        nursery.start_soon(embedder.embed, ["first"])
        await steps.begun(1)
        nursery.start_soon(embedder.embed, ["a1", "a2", "a3", "a4", "a5"])
        await embedder_holds(embedder, 2)
        nursery.start_soon(embedder.embed, ["b1", "b2"])
        await embedder_holds(embedder, 3)
        assert embedder.statistics().num_waiting == 7
        steps.let(10)
    assert steps.texts == [["first"], ["a1", "b1", "a2"], ["b2", "a3", "a4"], ["a5"]]


async def embedder_holds(embedder, count):
    with trio.fail_after(20):
        while len(embedder._entered) < count:  # noqa: ASYNC110 - texts are tokenised in a thread
            await trio.sleep(0.001)


async def test_one_step_at_a_time_and_no_empty_one():
    running, most = 0, 0

    def count(texts):
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert texts
        running -= 1

    async with fake(count, max_num_batched_tokens=8, max_num_seqs=4) as embedder, trio.open_nursery() as nursery:
        for length in range(1, 30):
            nursery.start_soon(embedder.embed, ["x" * length] * 3)
    assert most == 1


@pytest.mark.parametrize(
    ("texts", "error", "words"),
    [
        ([""], InvalidRequest, "input is empty"),
        (["a", ""], InvalidRequest, r"input\[1\] is empty"),
        ([[]], InvalidRequest, "empty"),
        ([[1, 256]], InvalidRequest, "vocabulary"),
        ([[-1]], InvalidRequest, "vocabulary"),
        (["a", "x" * 65], ContextLengthExceeded, r"input\[1\] has 65 tokens, .* at most 64"),
        ([[1] * 65], ContextLengthExceeded, "input has 65 tokens"),
    ],
)
async def test_texts_that_cannot_be_computed(texts, error, words):
    async with fake() as embedder:
        with pytest.raises(error, match=words) as caught:
            await embedder.embed(texts)
        assert caught.value.field == "input"
        assert len((await embedder.embed(["x" * 64])).vectors) == 1


async def test_texts_far_too_long_are_not_tokenised():
    model = FakeEmbeddingModel()

    class Tokenizer(type(model.tokenizer)):
        def get_vocab(self):
            return {"a": 1, "four": 2}

        def encode(self, text, **options):
            assert len(text.split()) < 1000
            return [1]

    model.tokenizer = Tokenizer()
    async with fake(model=model) as embedder:
        with pytest.raises(ContextLengthExceeded, match="characters"):
            await embedder.embed(["word " * 1000])
        assert (await embedder.embed([" " * 5000 + "a"])).prompt_tokens == 1


async def test_dimensions():
    for possible, good, bad in [((), [4], [1, 3, 5, 0]), ((2, 3), [2, 3, 4], [1, 5]), (None, [1, 4], [0, 5, -1])]:
        async with fake(model=FakeEmbeddingModel(dimensions=possible)) as embedder:
            for size in good:
                assert len((await embedder.embed(["a"], dimensions=size)).vectors[0]) == size
            for size in bad:
                with pytest.raises(InvalidRequest if possible is None or size < 1 else UnsupportedParameter) as caught:
                    await embedder.embed(["a"], dimensions=size)
                assert caught.value.field == "dimensions"
                assert embedder.name not in str(caught.value)  # clients may know it by another


async def test_queue_limits():
    steps = Steps()
    async with fake(steps, max_num_seqs=1, max_num_queued_reqs=2, max_num_queued_tokens=10) as embedder:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(embedder.embed, ["xxxx"])
            await steps.begun(1)
            nursery.start_soon(embedder.embed, ["y" * 8])
            await embedder_holds(embedder, 2)
            with pytest.raises(QueueFull, match="8 tokens are queued, of at most 10"):
                await embedder.embed(["zzz"])
            nursery.start_soon(embedder.embed, ["zz"])
            await embedder_holds(embedder, 3)
            with pytest.raises(QueueFull, match="holds 3 requests"):
                await embedder.embed(["z"])
            steps.let(10)
        assert (embedder._queue.num_texts, embedder._queue.num_tokens) == (0, 0)
        assert (await embedder.embed(["z" * 20])).prompt_tokens == 20


async def test_who_is_cancelled_is_not_computed():
    steps = Steps()
    async with fake(steps, max_num_seqs=2, max_num_batched_tokens=4) as embedder:
        async with trio.open_nursery() as nursery:
            scopes = []

            async def leave(texts):
                with trio.CancelScope() as scope:
                    scopes.append(scope)
                    await embedder.embed(texts)

            nursery.start_soon(embedder.embed, ["one"])
            await steps.begun(1)
            nursery.start_soon(leave, ["gone"] * 5)
            await embedder_holds(embedder, 2)
            nursery.start_soon(embedder.embed, ["two"])
            await embedder_holds(embedder, 3)
            scopes[0].cancel()
            await embedder_holds(embedder, 2)
            await trio.testing.wait_all_tasks_blocked()
            steps.let(1)
            await steps.begun(2)
            nursery.start_soon(leave, ["left"])  # in the middle of a step
            await embedder_holds(embedder, 2)
            steps.let(1)
            await steps.begun(3)
            scopes[1].cancel()
            await trio.testing.wait_all_tasks_blocked()
            steps.let(10)
        assert steps.texts == [["one"], ["two"], ["left"]]
        assert (embedder._queue.num_texts, embedder._queue.num_tokens) == (0, 0)
        assert not embedder._queue._jobs and not embedder._entered
        finished = embedder.statistics().finished
        assert (finished["abort"], finished["stop"]) == (2, 2)


async def test_a_text_that_fails_fails_alone():
    steps = Steps(is_open=True)
    steps.failing = ord("!")
    async with fake(steps) as embedder:
        outcomes = {}

        async def ask(name, texts):
            try:
                outcomes[name] = plain(await embedder.embed(texts))
            except RequestFailed as error:
                outcomes[name] = error

        steps.is_open = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "first", ["x"])
            await steps.begun(1)
            nursery.start_soon(ask, "bad", ["y", "!"])
            await embedder_holds(embedder, 2)
            nursery.start_soon(ask, "good", ["z"])
            await embedder_holds(embedder, 3)
            steps.is_open = True
            steps.let(1)
        assert outcomes["first"] == [[120, 120, 1, 120]] and outcomes["good"] == [[122, 122, 1, 122]]
        assert isinstance(outcomes["bad"].__cause__, MemoryError)
        assert "too much" not in outcomes["bad"].message
        assert embedder.state == "ready"
        assert embedder.statistics().finished["error"] == 1


async def test_drain():
    steps = Steps()
    async with fake(steps) as embedder, trio.open_nursery() as nursery:
        nursery.start_soon(embedder.embed, ["a"])
        await steps.begun(1)
        embedder.drain()
        assert embedder.state == "draining"
        with pytest.raises(ShuttingDown):
            await embedder.embed(["b"])
        steps.let(1)


async def test_close_ends_those_who_wait_and_waits_for_the_step():
    steps = Steps()
    errors = []

    async def ask(text):
        with pytest.raises(ShuttingDown) as caught:
            await embedder.embed([text])
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        async with fake(steps, max_num_seqs=1) as embedder:
            for text in ("a", "b"):
                nursery.start_soon(ask, text)
            await embedder_holds(embedder, 2)
            await steps.begun(1)
            trio.lowlevel.current_trio_token().run_sync_soon(steps.let, 1)
        assert len(steps.texts) == 1
    assert len(errors) == 2


async def test_exceptions_of_the_block_leave_as_they_are():
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with fake() as embedder:
            await embedder.embed(["a"])
            raise ZeroDivisionError


async def test_a_step_that_hangs_is_given_up(caplog):
    steps = Steps()
    states = []
    try:
        with pytest.raises(EngineDead, match="hung"):  # noqa: PT012
            async with fake(steps, step_timeout=0.05, step_grace=0.1) as embedder, trio.open_nursery() as nursery:

                async def ask():
                    with pytest.raises(EngineDead):
                        await embedder.embed(["a"])
                    states.append(embedder.state)
                    with pytest.raises(EngineDead):
                        await embedder.embed(["b"])

                nursery.start_soon(ask)
                await steps.begun(1)
                while embedder.state == "ready":  # noqa: ASYNC110 - it is read from the clock
                    await trio.sleep(0.001)
                states.append(embedder.state)
                await trio.sleep_forever()
    finally:
        steps.let(10)
    assert states == ["stuck", "dead"]


async def test_cancelled_at_every_checkpoint():
    """However it is left, nothing of a request remains."""
    async with fake() as embedder:
        for count in range(1, 40):
            with trio.CancelScope() as scope:
                instrument = _CancelAfter(count, trio.lowlevel.current_task(), scope)
                trio.lowlevel.add_instrument(instrument)
                try:
                    await embedder.embed(["abc", "de"])
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            assert not embedder._queue._jobs and not embedder._entered
            assert (embedder._num_entering, embedder._queue.num_texts, embedder._queue.num_tokens) == (0, 0, 0)
            if not scope.cancelled_caught:
                break
        assert count > 2 and not scope.cancelled_caught
        assert len((await embedder.embed(["a"])).vectors) == 1


class _CancelAfter(trio.abc.Instrument):
    def __init__(self, count, task, scope):
        self.count, self.task, self.scope = count, task, scope

    def after_task_step(self, task):
        if task is self.task:
            self.count -= 1
            if self.count == 0:
                self.scope.cancel()


async def test_the_real_model():
    """all-MiniLM-L6-v2: what transformers' own forward gives, pooled as its files say, and close texts are close."""
    texts = ["A cat sleeps on the sofa.", "On the couch, a kitten is napping.", "The stock market fell.", "x " * 200]
    loaded = await trio.to_thread.run_sync(partial(load_encoder, "all-minilm-l6-v2"))
    assert (loaded.pooling, loaded.normalize, loaded.max_model_len, loaded.max_positions) == ("mean", True, 256, 512)
    expected = []
    for text in texts:  # before the engine gives the model its own attention
        with torch.inference_mode():
            states = loaded.model(**loaded.tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        expected.append(torch.nn.functional.normalize(states.mean(0), dim=0))
    async with open_embedder(loaded) as embedder:
        found = await embedder.embed(texts)
        assert found.prompt_tokens == sum(len(loaded.tokenizer(text)["input_ids"]) for text in texts)
        vectors = torch.tensor(plain(found))
        torch.testing.assert_close(vectors, torch.stack(expected), rtol=0, atol=1e-5)
        assert vectors[0] @ vectors[1] > 0.6
        assert vectors[0] @ vectors[2] < 0.2
        with pytest.raises(ContextLengthExceeded, match="at most 256 tokens"):
            await embedder.embed(["x " * 300])
        with pytest.raises(UnsupportedParameter, match="384"):
            await embedder.embed(["x"], dimensions=100)


async def test_the_right_engine_is_opened():
    async with open_model("all-minilm-l6-v2", max_model_len=512, name="mini") as embedder:
        assert (embedder.task, embedder.name, embedder.max_model_len) == ("embed", "mini", 512)
        assert len((await embedder.embed(["x " * 300])).vectors[0]) == 384
