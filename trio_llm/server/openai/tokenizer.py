"""POST /tokenize, POST /detokenize and GET /tokenizer_info, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import trio
from quart import Blueprint, Response, request

from trio_llm.errors import InvalidRequest
from trio_llm.prompt.chat_template import Conversation
from trio_llm.prompt.tokens import detokenize, special_tokens, token_strings, tokenize
from trio_llm.server.http import this_app
from trio_llm.server.openai.messages import conversation
from trio_llm.server.openai.parsing import read_json, screen
from trio_llm.server.openai.structuring import structure
from trio_llm.server.openai.text_fields import DETOKENIZE, TOKENIZE
from trio_llm.server.openai.text_wire import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)
from trio_llm.server.openai.tools import definition, told
from trio_llm.server.openai.wire import ChatCompletionRequest, encode
from trio_llm.server.openapi import Operation

blueprint = Blueprint("tokenizer", __name__)


@blueprint.post("/tokenize")
@Operation(request=TokenizeRequest, answer=TokenizeAnswer, example={"prompt": "Three rivers"})
async def tokenize_prompt() -> Response:
    """The token ids of a prompt or of messages, as a completion of the same would see them."""
    app = this_app()
    body = parse_tokenize(await read_json(request), lenient=app.settings.compat == "lenient")
    engine = app.served(body.model)
    prompt = _prompt(body)
    special = isinstance(prompt, str) if body.add_special_tokens is None else body.add_special_tokens

    def work() -> bytes:
        token_ids = tokenize(engine.tokenizer, prompt, add_special_tokens=special)
        strings = token_strings(engine.tokenizer, token_ids) if body.return_token_strs else None
        return encode(
            TokenizeAnswer(
                count=len(token_ids), max_model_len=engine.max_model_len, tokens=token_ids, token_strs=strings
            )
        )

    written = await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=engine.tokenizing)
    return Response(written, content_type="application/json")


@blueprint.post("/detokenize")
@Operation(request=DetokenizeRequest, answer=DetokenizeAnswer, example={"tokens": [72, 105]})
async def detokenize_tokens() -> Response:
    """The text of token ids, special tokens included."""
    app = this_app()
    body = parse_detokenize(await read_json(request), lenient=app.settings.compat == "lenient")
    engine = app.served(body.model)
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < engine.vocab_size:
        message = f"tokens has a token id that is not in the vocabulary (0 to {engine.vocab_size - 1})"
        raise InvalidRequest(message, field="tokens", limit=engine.vocab_size)

    def work() -> bytes:
        return encode(DetokenizeAnswer(prompt=detokenize(engine.tokenizer, body.tokens)))

    written = await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=engine.tokenizing)
    return Response(written, content_type="application/json")


@blueprint.get("/tokenizer_info")
@Operation(answer=TokenizerInfo, query={"model": {"type": "string"}})
async def tokenizer_info() -> Response:
    """What the tokenizer is; `?model=` names the model, by default it is the one that is listed first."""
    app = this_app()
    model = request.args.get("model") or next(iter(app.registry), None)
    engine = app.served(model)
    template = getattr(engine.tokenizer, "chat_template", None)
    info = TokenizerInfo(
        model=model or engine.name,
        tokenizer_class=type(engine.tokenizer).__name__,
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        chat_template=template if isinstance(template, str) else None,
        **special_tokens(engine.tokenizer),
    )
    return Response(encode(info), content_type="application/json")


def parse_tokenize(document: dict[str, Any], *, lenient: bool) -> TokenizeRequest:
    """A request for token ids.

    Raises:
        InvalidRequest: a field has the wrong type, is missing or unknown; `field` names it.
        UnsupportedParameter: a field asks for what is not supported.
    """
    body = structure(screen(document, TOKENIZE, lenient=lenient), TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("there must be either a prompt or messages", field="prompt")
    if body.messages == []:
        raise InvalidRequest("messages must have at least one entry", field="messages")
    return body


def parse_detokenize(document: dict[str, Any], *, lenient: bool) -> DetokenizeRequest:
    """A request for the text of token ids.

    Raises:
        InvalidRequest: a field has the wrong type, is missing or unknown; `field` names it.
    """
    return structure(screen(document, DETOKENIZE, lenient=lenient), DetokenizeRequest)


def _prompt(body: TokenizeRequest) -> str | Conversation:
    if body.messages is None:
        return body.prompt or ""
    chat = ChatCompletionRequest(
        model=body.model or "",
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return conversation(chat, [told(definition(tool)) for tool in body.tools or ()])
