"""Clients that read slowly, and a server that is held up by none but them."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
import serve
import trio
import trio.testing

from tests.bench.test_serve import STREAM, delta, frame, usage


async def test_slow_clients_are_beside_the_others_and_gone_with_them(nursery: trio.Nursery) -> None:
    gone: list[int] = []
    bodies: list[dict[str, Any]] = []

    async def behaviour(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                while request := await stream.receive_some():
                    body = orjson.loads(request.partition(b"\r\n\r\n")[2])
                    bodies.append(body)
                    await stream.send_all(STREAM + frame(delta("word")))
                    if body["max_tokens"] > 100:
                        while True:  # as much as is taken
                            await stream.send_all(frame(delta("word" * 100)))
                    await stream.send_all(frame(delta("", "length")) + frame(usage(2)) + b"0\r\n\r\n")
            except trio.BrokenResourceError:
                gone.append(body["max_tokens"])

    [listener] = await nursery.start(partial(trio.serve_tcp, behaviour, 0, host="127.0.0.1"))
    url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
    arguments = ["--url", url, "--model", "m", "--concurrency", "2", "--requests", "4", "--repeats", "1"]

    assert await serve.run(serve.parse([*arguments, "--slow-clients", "3", "--slow-pause", "0"])) == 0

    while len(gone) < 3:
        await trio.testing.wait_all_tasks_blocked()
    assert sorted(body["max_tokens"] for body in bodies) == [96] * 6 + [4000] * 3
    assert gone == [4000] * 3
    nursery.cancel_scope.cancel()
