"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from quart import Blueprint, Response

from trio_llm.engine.embedding import Embedder
from trio_llm.engine.engine import Engine
from trio_llm.server.http import this_app
from trio_llm.server.openai.wire import ModelCard, ModelList, encode
from trio_llm.server.openapi import Operation

blueprint = Blueprint("models", __name__)


def _card(name: str, engine: Engine | Embedder) -> ModelCard:
    return ModelCard(id=name, created=this_app().created, max_model_len=engine.max_model_len)


@blueprint.get("/v1/models")
@Operation(answer=ModelList)
async def list_models() -> Response:
    """Every served name."""
    cards = ModelList(data=[_card(name, engine) for name, engine in this_app().registry.items()])
    return Response(encode(cards), content_type="application/json")


@blueprint.get("/v1/models/<path:name>")
@Operation(answer=ModelCard)
async def get_model(name: str) -> Response:
    """One served name, which may hold slashes.

    Raises:
        ModelNotFound: it is not served.
    """
    card = _card(name, this_app().registry.get(name))
    return Response(encode(card), content_type="application/json")
