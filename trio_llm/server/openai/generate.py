"""What both generating endpoints do: parameters, the unary wait, the errors in their own words."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import orjson
from quart import Response

from trio_llm.config import ServerSettings
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.engine.admission import Prompt
from trio_llm.engine.engine import Engine
from trio_llm.engine.generation import Generation
from trio_llm.errors import TrioLLMError
from trio_llm.server.exchange import Exchange
from trio_llm.server.openai.chunks import Chunks, Identity
from trio_llm.server.openai.sse import stream
from trio_llm.server.openai.wire import GenerationFields, to_wire


def sampling_params(fields: GenerationFields, max_tokens: int | None, settings: ServerSettings) -> SamplingParams:
    """The engine's parameters.

    Args:
        max_tokens: what the request asks for; None falls back on `default_max_tokens`, then on the
            rest of the context.

    Raises:
        InvalidRequest: a value is out of its range.
    """
    return SamplingParams(
        n=fields.n,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        seed=fields.seed,
        max_tokens=settings.default_max_tokens if max_tokens is None else max_tokens,
        stop=() if fields.stop is None else fields.stop,
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=fields.ignore_eos,
    )


async def start(
    exchange: Exchange, engine: Engine, prompt: Prompt, params: SamplingParams, fields: GenerationFields, *, prefix: str
) -> Identity:
    """Enter the request's generation, which its exchange owns from then on.

    Raises:
        TrioLLMError: the engine refuses it.
    """
    exchange.model = fields.model
    generation = engine.generate(
        prompt, params, request_id=exchange.request_id, priority=fields.priority, cache_salt=fields.cache_salt
    )
    await exchange.enter(generation)
    return Identity(id=prefix + exchange.request_id, model=fields.model, created=int(time.time()))


async def finish(exchange: Exchange) -> Generation:
    """Read a generation to its end.

    Raises:
        TrioLLMError: it failed, or the server ended the exchange.
    """
    generation = exchange.generation
    assert generation is not None
    async for _ in generation:  # to its very end, where it says whether it failed
        exchange.token_arrived()
        generation.drain()
    if exchange.failure is not None:
        raise exchange.failure
    return generation


async def answer_stream(exchange: Exchange, chunks: Chunks, settings: ServerSettings) -> Response:
    """The streamed answer of an entered generation, as the settings time it.

    Raises:
        TrioLLMError: the generation failed before there was anything to stream.
    """
    return await stream(
        exchange, chunks, patience=settings.first_result_timeout, keep_alive=settings.sse_keep_alive_interval
    )


def answer(body: object) -> Response:
    """A wire object as a JSON response."""
    return Response(orjson.dumps(to_wire(body)), content_type="application/json")


@contextmanager
def fields_called(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name fields as the client called them, not as the engine does."""
    try:
        yield
    except TrioLLMError as error:
        error.field = names.get(error.field or "", error.field)
        raise
