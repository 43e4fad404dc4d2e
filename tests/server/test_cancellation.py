"""Both handlers, cancelled at every checkpoint there is: the engine gets everything back each time."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from trio_llm.config import ServerSettings
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.registry import Registry
from trio_llm.engine.simulation import open_simulation
from trio_llm.server.app import create_app

BODIES = {
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4},
}
SEVERAL = {"model": "fake", "prompt": [[1, 2, 3], [4], [5, 6]], "n": 2, "max_tokens": 3, "echo": True, "logprobs": 1}
INFO = ExecutorInfo(num_blocks=64, block_size=4, vocab_size=256, max_model_len=128)


class StepCounter(trio.abc.Instrument):
    """Calls `then` after the n-th step of a task and its children."""

    def __init__(self, root, n, then):
        self.root = root
        self.left = n
        self.then = then

    def after_task_step(self, task):
        ancestor = task
        while ancestor is not None and ancestor is not self.root:
            ancestor = ancestor.parent_nursery.parent_task if ancestor.parent_nursery else None
        if ancestor is self.root:
            self.left -= 1
            if self.left == 0:
                self.then()


def http_scope(path):
    """An ASGI scope."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
        "extensions": {},
    }


async def request(app, path, body, n, how):
    """One ASGI request that is interrupted at its n-th step.

    Returns:
        Whether it ended before that, and the status.
    """
    data = json.dumps(body).encode()
    messages = [{"type": "http.request", "body": data, "more_body": False}]
    status = None
    gone = trio.Event()

    async def receive():
        await trio.lowlevel.checkpoint()
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await trio.lowlevel.checkpoint()

    with trio.CancelScope() as cancel:
        interrupt = cancel.cancel if how == "cancelled" else gone.set
        counter = StepCounter(trio.lowlevel.current_task(), n, interrupt)
        trio.lowlevel.add_instrument(counter)
        try:
            await app(http_scope(path), receive, send)
        finally:
            trio.lowlevel.remove_instrument(counter)
    return counter.left > 0, status


@pytest.mark.parametrize("how", ["cancelled", "disconnected"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [*BODIES.items(), ("/v1/completions", SEVERAL)])
async def test_interrupted_at_every_step(path, body, stream, how):
    async with open_simulation(executor=FakeExecutor(INFO)) as engine:
        app = create_app(ServerSettings(), registry=Registry({"fake": engine}))
        statuses = set()
        for n in range(1, 1000):
            with trio.fail_after(20):
                ended, status = await request(app, path, {**body, "stream": stream}, n, how)
            statuses.add(status)
            assert not app.exchanges
            assert engine.statistics().num_requests == 0
            core = await engine.settled()
            assert core.num_free_blocks == core.num_blocks
            assert (core.num_running, core.num_waiting) == (0, 0)
            if ended:
                break
        assert ended and n > 10
        # the news of a disconnect may take longer than a short answer
        assert statuses == {None, 200} or (how == "disconnected" and statuses == {200})


async def test_a_write_that_feels_no_cancellation():
    """Hypercorn shields its writes: the engine must get everything back while one is still stuck."""
    path, body = "/v1/chat/completions", {**BODIES["/v1/chat/completions"], "max_tokens": 100, "stream": True}
    async with open_simulation(executor=FakeExecutor(INFO), credit_window=8) as engine:
        app = create_app(ServerSettings(), registry=Registry({"fake": engine}))
        to_app, receive = trio.open_memory_channel(10)
        stuck, unstuck = trio.Event(), trio.Event()

        async def send(message):
            if b"content" in message.get("body", b""):
                stuck.set()
                with trio.CancelScope(shield=True):
                    await unstuck.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(app, http_scope(path), receive.receive, send)
            await to_app.send({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
            await stuck.wait()
            try:
                await engine.settled()
                assert engine.statistics().core.num_running == 1
                await to_app.send({"type": "http.disconnect"})
                await trio.testing.wait_all_tasks_blocked()
                core = await engine.settled()
                assert core.num_free_blocks == core.num_blocks
                assert engine.statistics().num_requests == 0
                assert app.exchanges
            finally:
                unstuck.set()
        assert not app.exchanges
