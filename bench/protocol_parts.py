"""The protocol's parts by themselves, each run many times: processor time in microseconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import h11
import orjson
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from trio_llm.config import ServerSettings
from trio_llm.engine.choice import Delta
from trio_llm.engine.detokenizer import Detokenizer, StopMatcher, TokenDecoder
from trio_llm.engine.engine import Engine
from trio_llm.engine.registry import Registry
from trio_llm.prompt.chat_template import render_text
from trio_llm.server.app import create_app
from trio_llm.server.connection import Connection
from trio_llm.server.exchange import Exchange
from trio_llm.server.openai.chat_answers import ChatChunks
from trio_llm.server.openai.messages import conversation
from trio_llm.server.openai.parsing import parse_chat
from trio_llm.server.openai.turn import begin_turn

WORD = " word"
NUM_WRITES = 100
"""Events that a socket takes without anybody who reads them."""


def request_of(size: int, model: str = "fake") -> bytes:
    """A chat request of about `size` bytes."""
    messages = [
        {"role": "system", "content": "Answer briefly and only from what you were told."},
        {"role": "user", "content": "What is a river?"},
        {"role": "assistant", "content": "A body of water that flows."},
        {"role": "user", "content": ""},
    ]
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": 64,
        "temperature": 0.8,
        "top_p": 0.95,
        "seed": 1,
        "stop": ["\n\nuser:"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "a",
        "metadata": {"run": "bench"},
    }
    messages[-1]["content"] = "Tell me more about it, please. " * ((size - len(orjson.dumps(body))) // 31)
    return orjson.dumps(body)


def microseconds(function: Callable[[], object], *, repeats: int = 7, seconds: float = 0.2) -> list[float]:
    """Processor time of a call, measured `repeats` times over about `seconds`."""
    began = time.process_time()
    count = 0
    while time.process_time() - began < seconds / 4:
        function()
        count += 1
    count = max(1, 4 * count)
    results = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(count):
            function()
        results.append(1e6 * (time.process_time() - began) / count)
    return results


async def parts(engine: Engine, tokenizer: Any, size: int) -> dict[str, list[float]]:
    """Each part by itself: of a request of `size` bytes, and of a token."""
    data = request_of(size)
    document = orjson.loads(data)
    body = parse_chat(document, lenient=False)
    talk = conversation(body, ())
    text = render_text(tokenizer, talk)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    found = {
        "request: HTTP, parsed": microseconds(lambda: parse_http(data)),
        "request: JSON": microseconds(lambda: orjson.loads(data)),
        "request: wire types, strict": microseconds(lambda: parse_chat(document, lenient=False)),
        "request: conversation": microseconds(lambda: conversation(body, ())),
        "request: chat template": microseconds(lambda: render_text(tokenizer, talk)),
        f"request: tokenise ({len(token_ids)} tokens)": microseconds(
            lambda: tokenizer.encode(text, add_special_tokens=False)
        ),
    }
    app = create_app(ServerSettings(), registry=Registry({"fake": engine}))
    async with Exchange("POST", "/v1/chat/completions") as exchange:
        turn = await begin_turn(app, exchange, body, prefix="chatcmpl-")
        chunks = ChatChunks(turn.identity, turn.generation, body)
        delta = [Delta(0, WORD, (1,), None)]
        event = chunks.content(0, 0, delta)
        found["event: encode"] = microseconds(lambda: chunks.content(0, 0, delta))
    found["event: write to a socket"] = await write_events(event)
    decoder = TokenDecoder(tokenizer, skip_special_tokens=True)
    stretch = [*token_ids, *token_ids][:256]

    def read_all() -> None:
        detokenizer, matcher = Detokenizer(decoder, token_ids), StopMatcher(("\n\nuser:",), include_match=False)
        for token in stretch:
            late, own = detokenizer.push(token)
            matcher.push(late, may_stop=True)
            matcher.push(own, may_stop=True)

    whole = microseconds(read_all)
    found["token: detokenise and look for a stop string"] = [value / len(stretch) for value in whole]
    return found


def parse_http(data: bytes) -> None:
    """What h11, which Hypercorn uses, does with a request."""
    connection = h11.Connection(h11.SERVER)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(data)}\r\n"
    head += "Content-Type: application/json\r\nAuthorization: Bearer none\r\nAccept: text/event-stream\r\n\r\n"
    connection.receive_data(head.encode() + data)
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass


async def write_events(event: bytes, *, repeats: int = 7) -> list[float]:
    """What it costs to write an event to a socket, through h11 and Hypercorn's stream."""
    results: list[float] = []
    done = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        began = time.process_time()
        for _ in range(NUM_WRITES):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        results.append(1e6 * (time.process_time() - began) / NUM_WRITES)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        done.set()

    config = Config()
    config.errorlog = None
    for _ in range(repeats):
        done = trio.Event()
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        with socket.create_connection(listener.socket.getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: bench\r\n\r\n")
            async with listener, await listener.accept() as stream:
                async with trio.open_nursery() as nursery:
                    connection = Connection(ASGIWrapper(app), config, WorkerContext(None), 30.0, stream)
                    nursery.start_soon(connection.run)
                    await done.wait()
                    nursery.cancel_scope.cancel(reason="measured")
    return results
