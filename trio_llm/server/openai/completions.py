"""POST /v1/completions, the older endpoint: continue a text."""

from __future__ import annotations

from typing import Any

from quart import Blueprint, Response, request

from trio_llm.engine.generation import Generation
from trio_llm.errors import InvalidRequest, UnsupportedParameter
from trio_llm.server.http import this_app, this_exchange
from trio_llm.server.openai.chunks import Chunks, Identity, to_plain, usage_of
from trio_llm.server.openai.generate import answer, answer_stream, finish, sampling_params, start
from trio_llm.server.openai.parsing import parse_completion, read_json
from trio_llm.server.openai.wire import CompletionRequest, TextChoice, TextCompletion, UsageBody
from trio_llm.server.openapi import Operation

blueprint = Blueprint("completions", __name__)


@blueprint.post("/v1/completions")
@Operation(
    request=CompletionRequest,
    answer=TextCompletion,
    event=TextCompletion,
    example={"prompt": "Three rivers are", "max_tokens": 30, "stream": True},
)
async def completions() -> Response:
    """Continue one prompt, whole or as a stream."""
    app, exchange = this_app(), this_exchange()
    body = parse_completion(await read_json(request), lenient=app.settings.compat == "lenient")
    engine = app.engine_for(body.model)
    prompt = _only_prompt(body)
    params = sampling_params(body, body.max_tokens, app.settings)
    identity = await start(exchange, engine, prompt, params, body, prefix="cmpl-")
    if body.stream:
        assert exchange.generation is not None
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = TextChunks(identity, exchange.generation, with_usage=with_usage)
        return await answer_stream(exchange, chunks, app.settings)
    return answer(_completion(identity, await finish(exchange)))


def _only_prompt(body: CompletionRequest) -> str | list[int]:
    prompt: Any = body.prompt
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise UnsupportedParameter("only one prompt in a request is supported", field="prompt")
        prompt = prompt[0]
    if not prompt:
        raise InvalidRequest("the prompt is empty", field="prompt")
    return prompt  # type: ignore[no-any-return]


def _completion(identity: Identity, generation: Generation) -> TextCompletion:
    choices = [
        TextChoice(index=choice.index, text=choice.text, finish_reason=str(choice.finish_reason))
        for choice in generation.choices
    ]
    return TextCompletion(
        id=identity.id, created=identity.created, model=identity.model, choices=choices, usage=usage_of(generation)
    )


class TextChunks(Chunks):
    """text_completion, streamed."""

    def plain(self, choices: list[Any], usage: UsageBody | None = None) -> dict[str, Any]:
        identity = self.identity
        return to_plain(
            TextCompletion(id=identity.id, created=identity.created, model=identity.model, choices=choices, usage=usage)
        )

    def opening_choice(self, index: int) -> None:
        return None

    def text_choice(self, index: int, text: str) -> TextChoice:
        return TextChoice(index=index, text=text)

    def closing_choice(self, index: int, finish_reason: str) -> TextChoice:
        return TextChoice(index=index, text="", finish_reason=finish_reason)
