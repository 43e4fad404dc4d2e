"""POST /v1/embeddings."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from functools import partial
from typing import Any

import trio
from quart import Blueprint, Response, request

from trio_llm.engine.embedding import Embeddings
from trio_llm.engine.texts import Text
from trio_llm.errors import InvalidRequest
from trio_llm.server.http import this_app, this_exchange
from trio_llm.server.openai.parsing import read_json, screen
from trio_llm.server.openai.structuring import structure
from trio_llm.server.openai.text_fields import EMBEDDING, MAX_INPUTS
from trio_llm.server.openai.text_wire import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage
from trio_llm.server.openai.wire import encode
from trio_llm.server.openapi import Operation

blueprint = Blueprint("embeddings", __name__)


@blueprint.post("/v1/embeddings")
@Operation(request=EmbeddingRequest, answer=EmbeddingList, example={"input": "Three rivers"})
async def embeddings() -> Response:
    """The vectors of some texts."""
    app, exchange = this_app(), this_exchange()
    body = parse_embedding(await read_json(request), lenient=app.settings.compat == "lenient")
    embedder = app.embedder_for(body.model)
    exchange.model = body.model
    found = await exchange.run(partial(embedder.embed, _texts(body), dimensions=body.dimensions))
    exchange.prompt_tokens = found.prompt_tokens
    # a thousand vectors are some megabytes of JSON
    written = await trio.to_thread.run_sync(_write, body, found, abandon_on_cancel=True)
    return Response(written, content_type="application/json")


def parse_embedding(document: dict[str, Any], *, lenient: bool) -> EmbeddingRequest:
    """A request for embeddings.

    Raises:
        InvalidRequest: a field has the wrong type, is missing or unknown; `field` names it.
        UnsupportedParameter: a field asks for what is not supported.
    """
    body = structure(screen(document, EMBEDDING, lenient=lenient), EmbeddingRequest)
    if len(_texts(body)) > MAX_INPUTS:
        raise InvalidRequest(f"input takes at most {MAX_INPUTS} texts, got {len(body.input)}", field="input")
    return body


def _texts(body: EmbeddingRequest) -> list[Text]:
    """One text or its token ids is a list of one."""
    texts: Any = body.input
    return [texts] if isinstance(texts, str) or isinstance(texts[0], int) else texts


def _write(body: EmbeddingRequest, found: Embeddings) -> bytes:
    spell = _base64 if body.encoding_format == "base64" else array.tolist
    data = [Embedding(index=index, embedding=spell(vector)) for index, vector in enumerate(found.vectors)]
    usage = EmbeddingUsage(prompt_tokens=found.prompt_tokens, total_tokens=found.prompt_tokens)
    return encode(EmbeddingList(data=data, model=body.model, usage=usage))


def _base64(vector: array[float]) -> str:
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return b64encode(vector.tobytes()).decode()
