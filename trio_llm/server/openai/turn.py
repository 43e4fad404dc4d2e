"""A turn of a conversation: what every endpoint that answers messages does below its wire types.

Chat completions, Responses and Anthropic's Messages differ in how they spell a request and its answer.
Each spells its request as a ChatCompletionRequest, and its answer from what `Speech` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs
import trio

from trio_llm.core.sampling_params import SamplingParams
from trio_llm.engine.choice import Delta
from trio_llm.engine.generation import Generation
from trio_llm.errors import InvalidRequest
from trio_llm.prompt.chat_template import render_chat
from trio_llm.prompt.output_parser import OutputParser
from trio_llm.server.exchange import Exchange
from trio_llm.server.http import App
from trio_llm.server.openai.chunks import Identity
from trio_llm.server.openai.field_names import fields_called, rename
from trio_llm.server.openai.generate import check_prompt_logprobs, finish, sampling_params, start
from trio_llm.server.openai.messages import conversation
from trio_llm.server.openai.speech import Speech
from trio_llm.server.openai.structured import structured_output
from trio_llm.server.openai.tools import Reading, form_of_text, formats_of, reading
from trio_llm.server.openai.wire import ChatCompletionRequest


@attrs.frozen
class Turn:
    """A turn under way; the exchange owns its generation."""

    identity: Identity
    generation: Generation
    speeches: list[Speech] | None
    """One for each choice; None where the text is the answer as it is."""

    def speech(self, index: int = 0) -> Speech:
        """What a choice says, also where the text is the answer as it is."""
        return Speech(OutputParser(), Reading()) if self.speeches is None else self.speeches[index]

    async def finish(self, exchange: Exchange) -> None:
        """Read it to its end.

        Raises:
            TrioLLMError: it failed, or the server ended the exchange.
        """
        await finish(exchange, self._take if self.speeches else None)

    def _take(self, delta: Delta) -> None:
        assert self.speeches is not None
        self.speeches[delta.index].push([delta])


async def begin_turn(
    app: App, exchange: Exchange, body: ChatCompletionRequest, *, prefix: str, names: Mapping[str, str] | None = None
) -> Turn:
    """Enter the generation that answers a conversation.

    Args:
        prefix: of the answer's id.
        names: what the client calls fields that are called otherwise in a chat completion.

    Raises:
        TrioLLMError: the request is wrong, or the engine refuses it.
    """
    with fields_called(names or {}):
        engine = app.engine_for(body.model)
        params, own_names = _params(app, body)
        read = reading(body, await formats_of(engine, app.settings), params.structured_output)
        if read.grammar is not None and params.structured_output is None:
            own_names["structured_output"] = "tools"
        with fields_called(own_names):
            prompt = conversation(body, read.tools)
            form = await form_of_text(params.structured_output, read, engine, prompt)
            if form is not params.structured_output or read.special_token_ids:
                params = attrs.evolve(params, structured_output=form, keep_special_tokens=read.special_token_ids)
            identity = await start(exchange, engine, [prompt], params, body, prefix=prefix)
    exchange.explain = lambda error: rename(error, own_names, names or {})
    (generation,) = exchange.generations
    if read.is_plain:
        return Turn(identity, generation, None)
    return Turn(
        identity, generation, [Speech(read.parser(engine, generation), read) for _ in range(generation.params.n)]
    )


async def count_prompt_tokens(app: App, body: ChatCompletionRequest, *, names: Mapping[str, str] | None = None) -> int:
    """The tokens that a conversation has for its model to read; nothing is generated.

    Raises:
        TrioLLMError: as `begin_turn` does, where what is read is concerned.
    """
    with fields_called(names or {}):
        engine = app.engine_for(body.model)
        structured, _ = structured_output(body)
        read = reading(body, await formats_of(engine, app.settings), structured)
        with fields_called({"prompt": "messages"}):
            render = partial(render_chat, engine.tokenizer, conversation(body, read.tools))
            token_ids = await trio.to_thread.run_sync(render, abandon_on_cancel=True, limiter=engine.tokenizing)
            return len(token_ids)


def _params(app: App, body: ChatCompletionRequest) -> tuple[SamplingParams, dict[str, str]]:
    """The engine's parameters, and what a chat completion calls them where that differs."""
    check_prompt_logprobs(body)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if limit == 0:
        raise InvalidRequest(f"{limit_name} must be at least 1", field=limit_name)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", field="top_logprobs")
    structured, structured_name = structured_output(body)
    names = {
        "prompt": "messages",
        "max_tokens": limit_name,
        "logprobs": "top_logprobs",
        "structured_output": structured_name,
    }
    with fields_called(names):
        params = sampling_params(
            body,
            app.settings,
            max_tokens=limit,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            structured_output=structured,
        )
    return params, names
