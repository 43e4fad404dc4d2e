"""What the server costs beside the model: `python bench/protocol.py --model smollm2`.

Each part of a request's and of a token's way is run by itself, many times; then the same streams are
read in process and over real sockets from an engine that needs no weights, and the difference is what
HTTP costs a token.  Times are of one processor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import orjson
import trio
from http_client import Client
from hypercorn.config import Config
from serve import machine

from trio_llm.config import EngineSettings, ServerSettings
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.engine.choice import Delta
from trio_llm.engine.detokenizer import Detokenizer, StopMatcher, TokenDecoder
from trio_llm.engine.engine import Engine
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.registry import Registry
from trio_llm.engine.simulation import FakeModel
from trio_llm.models.loader import load_model
from trio_llm.prompt.chat_template import render_text
from trio_llm.server import logs
from trio_llm.server.app import create_app
from trio_llm.server.connection import serve_connections
from trio_llm.server.exchange import Exchange
from trio_llm.server.openai.chat_answers import ChatChunks
from trio_llm.server.openai.messages import conversation
from trio_llm.server.openai.parsing import parse_chat
from trio_llm.server.openai.turn import begin_turn

INFO = ExecutorInfo(num_blocks=4096, block_size=16, vocab_size=256, max_model_len=4096)
WORD = " word"


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
        found["token: event of a stream"] = microseconds(lambda: chunks.content(0, 0, delta))
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


async def in_process(engine: Engine, streams: int, tokens: int) -> float:
    """Processor seconds for so many streams at once, read by tasks of this program."""
    began = time.process_time()

    async def read(index: int) -> None:
        async with engine.generate([index % 200 + 1] * 16, max_tokens=tokens, ignore_eos=True) as generation:
            async for _ in generation:
                generation.drain()

    async with trio.open_nursery() as nursery:
        for index in range(streams):
            nursery.start_soon(read, index)
    return time.process_time() - began


async def over_http(port: int, streams: int, tokens: int, *, leave_after: int | None = None) -> tuple[float, int]:
    """Processor seconds for the same over sockets, the client's included, and the events that came.

    Args:
        leave_after: events after which a client goes away.
    """
    began = time.process_time()
    events = 0

    async def read(index: int) -> None:
        nonlocal events
        client = Client(partial(trio.open_tcp_stream, "127.0.0.1", port), "bench")
        body = {"model": "fake", "prompt": [index % 200 + 1] * 16, "max_tokens": tokens, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        seen = 0
        await client.request("POST", "/v1/completions", headers, orjson.dumps({**body, "stream": True}))
        while piece := await client.receive_body():
            seen += piece.count(b"data: ")
            if leave_after is not None and seen >= leave_after:
                break
        events += seen
        await client.aclose()

    async with trio.open_nursery() as nursery:
        for index in range(streams):
            nursery.start_soon(read, index)
    return time.process_time() - began, events


async def whole(streams: int, tokens: int, repeats: int) -> dict[str, list[float]]:
    """What HTTP costs a token, and what is left when clients go away."""
    info = attrs.evolve(INFO, num_blocks=160 * streams)
    executor = FakeExecutor(info, next_token=lambda context, index: ord("a"))
    settings = EngineSettings(max_num_seqs=streams, max_num_batched_tokens=max(512, 2 * streams))
    found: dict[str, list[float]] = {"token: HTTP, both ends": [], "event: tokens joined in one": []}
    async with open_engine(FakeModel(), executor=executor, settings=settings) as engine:
        app = create_app(ServerSettings(log_level="error"), registry=Registry({"fake": engine}))
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        config = Config()
        config.errorlog = None
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            serve = partial(serve_connections, app, listeners, config=config, write_timeout=30.0, stop=stop.wait)
            await nursery.start(serve)
            await over_http(port, streams, 8)
            for _ in range(repeats):
                alone = await in_process(engine, streams, tokens)
                through, events = await over_http(port, streams, tokens)
                found["token: HTTP, both ends"].append(1e6 * (through - alone) / (streams * tokens))
                found["event: tokens joined in one"].append(streams * tokens / events)
            before = engine.statistics()
            await over_http(port, streams, 2000, leave_after=2)
            while engine.statistics().num_requests:  # noqa: ASYNC110  what is waited for has no event
                await trio.sleep(0.001)
            after, core = engine.statistics(), await engine.settled()
            found["clients that left"] = [streams]
            found["aborted for it"] = [after.finished.get("abort", 0) - before.finished.get("abort", 0)]
            found["blocks not given back"] = [core.num_blocks - core.num_free_blocks]
            stop.set()
    return found


def table(found: dict[str, list[float]]) -> str:
    """Microseconds, or counts, as Markdown."""
    lines = ["| | µs, or a count | lowest | highest |", "|---|--:|--:|--:|"]
    lines += [
        f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |"
        for name, values in found.items()
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and template are used")
    parser.add_argument("--size", type=int, default=2048, help="bytes of a request")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser.parse_args(argv)


async def run(args: argparse.Namespace) -> dict[str, list[float]]:
    """Measure, print and write."""
    logs.configure(ServerSettings(log_level="error"))
    tokenizer = load_model(args.model).tokenizer
    async with open_engine(FakeModel(), executor=FakeExecutor(INFO)) as engine:
        found = await parts(engine, tokenizer, args.size)
    found |= await whole(args.streams, args.tokens, args.repeats)
    print(table(found))
    if args.json is not None:
        document = {"machine": machine(), "figures": found}
        await trio.Path(args.json).write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    return found


if __name__ == "__main__":
    trio.run(run, parse(None))
