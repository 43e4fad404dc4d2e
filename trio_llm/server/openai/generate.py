"""What both generating endpoints do: parameters, admission, the unary wait, the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import trio
from quart import Response

from trio_llm.config import ServerSettings
from trio_llm.core.sampling_params import SamplingParams, StructuredOutput
from trio_llm.engine.admission import Prompt
from trio_llm.engine.choice import Delta
from trio_llm.engine.engine import Engine
from trio_llm.engine.generation import Generation
from trio_llm.errors import InvalidRequest
from trio_llm.prompt.truncation import Policy, Truncation
from trio_llm.server.exchange import Exchange
from trio_llm.server.http import App
from trio_llm.server.openai.chunks import Identity
from trio_llm.server.openai.sse import Writer, stream
from trio_llm.server.openai.wire import GenerationFields, encode


def sampling_params(
    fields: GenerationFields,
    settings: ServerSettings,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured_output: StructuredOutput | None,
) -> SamplingParams:
    """The engine's parameters: those that have the same name everywhere, and those given here.

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
        typical_p=fields.typical_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=fields.logit_bias or (),
        # as OpenAI's neutral values go, an empty list asks for nothing
        allowed_token_ids=fields.allowed_token_ids or None,
        bad_words=fields.bad_words,
        seed=fields.seed,
        min_tokens=fields.min_tokens,
        max_tokens=settings.default_max_tokens if max_tokens is None else max_tokens,
        stop=() if fields.stop is None else fields.stop,
        include_stop_str_in_output=fields.include_stop_str_in_output,
        stop_token_ids=fields.stop_token_ids,
        ignore_eos=fields.ignore_eos,
        skip_special_tokens=fields.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_output=structured_output,
    )


def check_prompt_logprobs(fields: GenerationFields) -> None:
    """Refuse what a stream has no place for.

    Raises:
        InvalidRequest: a stream is asked for the prompt's log-probabilities.
    """
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not for streams", field="prompt_logprobs")


def truncation_of(fields: GenerationFields) -> Truncation | None:
    """How a prompt that is too long is to be cut; None refuses it.

    Raises:
        InvalidRequest: the fields contradict each other, or a value is out of its range.
    """
    policy, limit = fields.truncation, fields.truncate_prompt_tokens
    if limit is not None and limit < 1 and limit != -1:
        text = f"truncate_prompt_tokens must be at least 1, or -1 for all that fit, got {limit}"
        raise InvalidRequest(text, field="truncate_prompt_tokens")
    if policy == "disabled" and limit is not None:
        raise InvalidRequest("truncation is disabled, but truncate_prompt_tokens is given", field="truncation")
    if policy == "disabled" or (policy is None and limit is None):
        return None
    kind: Policy = "oldest_turns" if policy in ("auto", "oldest_turns") else "last_tokens"
    return Truncation(kind, None if limit == -1 else limit)


async def start(
    exchange: Exchange,
    engine: Engine,
    prompts: Iterable[Prompt],
    params: SamplingParams,
    fields: GenerationFields,
    *,
    prefix: str,
) -> Identity:
    """Enter a generation for each prompt; the exchange owns them from then on.

    Raises:
        TrioLLMError: the engine refuses one of them.
    """
    exchange.model = fields.model
    for place, prompt in enumerate(prompts):
        generation = engine.generate(
            prompt,
            params,
            request_id=f"{exchange.request_id}-{place}" if place else exchange.request_id,
            priority=fields.priority,
            cache_salt=fields.cache_salt,
            truncation=truncation_of(fields),
        )
        await exchange.enter(generation)
    return Identity(id=prefix + exchange.request_id, model=fields.model, created=int(time.time()))


async def finish(exchange: Exchange, take: Callable[[Delta], object] | None = None) -> list[Generation]:
    """Read all generations to their ends.

    Args:
        take: is given each delta.

    Raises:
        TrioLLMError: one failed, or the server ended the exchange.
    """
    running = sum(generation.params.n for generation in exchange.generations)
    while running:
        for _, delta in await exchange.receive():
            running -= delta.finish_reason is not None
            if take is not None:
                take(delta)
    return exchange.generations


async def answer_stream(app: App, exchange: Exchange, writer: Writer) -> Response:
    """The streamed answer of entered generations, as the settings time it.

    Raises:
        TrioLLMError: a generation failed before there was anything to stream.
    """
    return await stream(
        exchange,
        writer,
        patience=app.settings.first_result_timeout,
        keep_alive=app.settings.sse_keep_alive_interval,
    )


async def answer(make: Callable[[], object], *, is_large: bool) -> Response:
    """A wire object as a JSON response.

    Args:
        make: makes the object.
        is_large: it may have very many log-probabilities; it is made in a thread, beside the streams of others.
    """
    if is_large:
        data = await trio.to_thread.run_sync(lambda: encode(make()), abandon_on_cancel=True)
    else:
        data = encode(make())
    return Response(data, content_type="application/json")
