"""POST /v1/completions, the older endpoint: continue texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from quart import Blueprint, Response, request

from trio_llm.config import ServerSettings
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.core.step import TokenLogprobs
from trio_llm.engine.admission import Prompt
from trio_llm.engine.choice import Delta
from trio_llm.engine.engine import Engine
from trio_llm.engine.generation import Generation
from trio_llm.errors import InvalidRequest
from trio_llm.prompt.fill_in_the_middle import fill_in_the_middle
from trio_llm.server.http import this_app, this_exchange
from trio_llm.server.openai.chunks import AnyChunk, Chunks, Identity, timings_of, truncated_of, usage_of
from trio_llm.server.openai.field_names import fields_called, rename
from trio_llm.server.openai.generate import (
    answer,
    answer_stream,
    check_prompt_logprobs,
    finish,
    sampling_params,
    start,
)
from trio_llm.server.openai.limits import MAX_PROMPTS
from trio_llm.server.openai.logprobs import TextLogprobWriter, prompt_logprobs
from trio_llm.server.openai.parsing import parse_completion, read_json
from trio_llm.server.openai.structured import structured_output
from trio_llm.server.openai.wire import CompletionRequest, TextChoice, TextCompletion, TextLogprobs
from trio_llm.server.openapi import Operation

MAX_LOGPROBS = 5

blueprint = Blueprint("completions", __name__)


@blueprint.post("/v1/completions")
@Operation(
    request=CompletionRequest,
    answer=TextCompletion,
    event=TextCompletion,
    example={"prompt": "Three rivers are", "max_tokens": 30, "stream": True},
)
async def completions() -> Response:
    """Continue prompts, whole or as a stream."""
    app, exchange = this_app(), this_exchange()
    body = parse_completion(await read_json(request), lenient=app.settings.compat == "lenient")
    engine = app.engine_for(body.model)
    params, names = _params(body, app.settings)
    prompts = _prompts(body, engine)
    with fields_called(names):
        identity = await start(exchange, engine, _with_suffix(prompts, body, engine), params, body, prefix="cmpl-")
    exchange.explain = lambda error: rename(error, names)
    choices = [
        [_Choice(generation, prompt, body, engine) for _ in range(params.n)]
        for generation, prompt in zip(exchange.generations, prompts, strict=True)
    ]
    if body.stream:
        chunks = TextChunks(identity, exchange.generations, body, choices)
        return await answer_stream(app, exchange, chunks)
    generations = await finish(exchange)
    return await answer(
        lambda: _completion(identity, generations, body, choices),
        is_large=params.logprobs is not None or params.prompt_logprobs is not None,
    )


def _params(body: CompletionRequest, settings: ServerSettings) -> tuple[SamplingParams, dict[str, str]]:
    """The engine's parameters, and what the client calls them where that differs."""
    check_prompt_logprobs(body)
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        text = f"logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {body.logprobs}"
        raise InvalidRequest(text, field="logprobs", limit=MAX_LOGPROBS)
    structured, structured_name = structured_output(body)
    scored = [body.prompt_logprobs, body.logprobs if body.echo else None]
    params = sampling_params(
        body,
        settings,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max((count for count in scored if count is not None), default=None),
        structured_output=structured,
    )
    return params, {"structured_output": structured_name}


def _prompts(body: CompletionRequest, engine: Engine) -> list[str | list[int]]:
    """The prompts, one by one.

    Raises:
        InvalidRequest: one is empty, or they are more than may ever be in flight.
    """
    given: Any = body.prompt
    prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    settings = engine.settings
    limit = min(MAX_PROMPTS, (settings.max_num_seqs + settings.max_num_queued_reqs) // max(1, body.n))
    if len(prompts) > limit:
        text = f"prompt takes at most {limit} prompts of {body.n} choices, got {len(prompts)}"
        raise InvalidRequest(text, field="prompt", limit=limit)
    for place, prompt in enumerate(prompts):
        if not prompt:
            which = f"prompt {place}" if len(prompts) > 1 else "the prompt"
            raise InvalidRequest(f"{which} is empty", field="prompt")
    return prompts


def _with_suffix(prompts: list[str | list[int]], body: CompletionRequest, engine: Engine) -> Sequence[Prompt]:
    """What the engine gets: prompts as they are, or as a gap to fill before the suffix.

    Raises:
        InvalidRequest: there is a suffix, and model or prompt cannot have one.
    """
    if not body.suffix:
        return prompts
    if body.echo:
        raise InvalidRequest("suffix does not go with echo", field="suffix")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise InvalidRequest("suffix needs prompts that are texts", field="suffix")
    return [fill_in_the_middle(engine.tokenizer, text, body.suffix) for text in texts]


class _Choice:
    """One choice on its way to the client: what of its text and tokens is to be told, piece by piece.

    Args:
        prompt: as the client gave it.
    """

    def __init__(
        self, generation: Generation, prompt: str | list[int], body: CompletionRequest, engine: Engine
    ) -> None:
        self._generation = generation
        self._prompt = prompt
        self._body = body
        self._tokenizer = engine.tokenizer
        self._begun = False
        self._writer = TextLogprobWriter(generation.token_bytes) if body.logprobs is not None else None

    @property
    def owes_echo(self) -> bool:
        """Whether there is something to tell even if nothing was made."""
        return self._body.echo and not self._begun

    def take(
        self, index: int, text: str, scored: Sequence[TokenLogprobs], token_ids: list[int], finish_reason: str | None
    ) -> TextChoice:
        """The next part of it.

        Args:
            index: in the answer.
            scored: log-probabilities of the tokens that are part of the text.
        """
        is_first, self._begun = not self._begun, True
        logprobs: TextLogprobs | None = None
        if is_first and self._body.echo:
            before = self._prompt_text()
            if self._writer is not None:
                generation = self._generation
                logprobs = self._writer.prompt(generation.prompt_token_ids, self._prompt_scored(), before)
            text = before + text
        if self._writer is not None:
            logprobs = self._writer.write(scored, logprobs)
        asked = self._body.return_token_ids
        return TextChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason,
            token_ids=token_ids if asked else None,
            prompt_token_ids=self._generation.prompt_token_ids if asked and is_first else None,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _prompt_text(self) -> str:
        if isinstance(self._prompt, str):
            return self._prompt
        skip = self._body.skip_special_tokens
        return str(self._tokenizer.decode(self._prompt, skip_special_tokens=skip))

    def _prompt_scored(self) -> Sequence[TokenLogprobs]:
        """With as many alternatives as `logprobs` asks for; `prompt_logprobs` may have asked for more."""
        most = self._body.logprobs or 0
        return [attrs.evolve(entry, top=entry.top[:most]) for entry in self._generation.prompt_logprobs or ()]

    def _prompt_logprobs(self) -> Any:
        most, scored = self._body.prompt_logprobs, self._generation.prompt_logprobs
        if most is None or scored is None:
            return None
        return prompt_logprobs(
            [attrs.evolve(entry, top=entry.top[:most]) for entry in scored], self._generation.token_bytes
        )


def _completion(
    identity: Identity, generations: Sequence[Generation], body: CompletionRequest, writers: list[list[_Choice]]
) -> TextCompletion:
    choices = [
        writers[place][choice.index].take(
            place * body.n + choice.index, choice.text, choice.logprobs, choice.token_ids, str(choice.finish_reason)
        )
        for place, generation in enumerate(generations)
        for choice in generation.choices
    ]
    return TextCompletion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        choices=choices,
        usage=usage_of(generations),
        timings=timings_of(generations) if body.return_timings else None,
        truncated=truncated_of(generations),
    )


class TextChunks(Chunks):
    """text_completion, streamed.

    Args:
        choices: of each prompt.
    """

    def __init__(
        self,
        identity: Identity,
        generations: Sequence[Generation],
        body: CompletionRequest,
        choices: list[list[_Choice]],
    ) -> None:
        detailed = body.echo or body.return_token_ids or body.logprobs is not None
        self._truncated = truncated_of(generations)
        super().__init__(identity, generations, body, detailed=detailed or self._truncated is not None)
        self._choices = [choice for row in choices for choice in row]

    def chunk(self, choices: list[Any]) -> TextCompletion:
        identity = self.identity
        return TextCompletion(id=identity.id, created=identity.created, model=identity.model, choices=choices)

    def event(self, chunk: AnyChunk) -> bytes:
        if self._truncated is not None:
            chunk, self._truncated = attrs.evolve(chunk, truncated=self._truncated), None
        return super().event(chunk)

    def text_choice(self, index: int, text: str) -> TextChoice:
        return TextChoice(index=index, text=text)

    def detailed_choice(
        self, index: int, generation: Generation, text: str, deltas: Sequence[Delta]
    ) -> TextChoice | None:
        choice = self._choices[index]
        scored = [entry for delta in deltas for entry in delta.logprobs]
        token_ids = [token for delta in deltas for token in delta.token_ids] if self.body.return_token_ids else []
        if not (text or scored or token_ids or choice.owes_echo):
            return None
        return choice.take(index, text, scored, token_ids, None)

    def closing_choice(self, index: int, finish_reason: str) -> TextChoice:
        return TextChoice(index=index, text="", finish_reason=finish_reason)
