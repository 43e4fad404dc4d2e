"""What a request does not do twice, nor ask of the system: counted, not timed."""

from __future__ import annotations

import os
import random

import pytest
import trio

from trio_llm.core.sampling_params import SamplingParams
from trio_llm.engine.engine import draw_seed
from trio_llm.server.exchange import new_request_id

CHAT = "/v1/chat/completions"
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_chat(serving, monkeypatch, stream):
    calls = []

    def count(owner, name):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    async with serving() as server:
        client = await server.connect()
        await client.send("POST", CHAT, HI)
        await client.receive()
        count(SamplingParams, "__attrs_post_init__")
        count(os, "urandom")
        count(random, "_urandom")
        count(trio.to_thread, "run_sync")
        await client.send("POST", CHAT, {**HI, "stream": stream})
        assert (await client.receive()).status == 200
        await server.until(lambda: not server.app.exchanges)
    # as the client wants them, and with all that is filled in; the prompt is tokenised beside the loop
    assert sorted(calls) == ["__attrs_post_init__", "__attrs_post_init__", "run_sync"]


def test_ids_are_all_different_and_show_no_order():
    ids = [new_request_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(len(found) == 24 and int(found, 16) >= 0 for found in ids)
    assert ids != sorted(ids)


def test_seeds_differ():
    assert len({draw_seed() for _ in range(100)}) == 100


class Steps(trio.abc.Instrument):
    """Counts how often a task other than the test's own has its turn."""

    def __init__(self):
        self.mine = trio.lowlevel.current_task()
        self.count = 0

    def before_task_step(self, task):
        self.count += task is not self.mine


async def test_turns_of_tasks(serving):
    """Each costs as much as some hundred lines: what needs not wait gives nobody a turn."""
    async with serving() as server:
        client = await server.connect()
        steps = Steps()
        for _ in range(2):
            steps.count = 0
            trio.lowlevel.add_instrument(steps)
            await client.send("POST", CHAT, {**HI, "stream": True})
            assert (await client.receive()).status == 200
            await server.app.all_left()
            trio.lowlevel.remove_instrument(steps)
        assert steps.count <= 18
