"""POST /v1/requests/{id}/abort."""

from __future__ import annotations

from typing import Literal

import attrs
import orjson
from quart import Blueprint, Response

from trio_llm.errors import RequestNotFound
from trio_llm.server.http import this_app
from trio_llm.server.openapi import Operation

blueprint = Blueprint("aborts", __name__)

_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


@attrs.frozen(kw_only=True)
class Aborted:
    id: str
    aborted: Literal[True] = True


@blueprint.post("/v1/requests/<request_id>/abort")
@Operation(answer=Aborted)
async def abort(request_id: str) -> Response:
    """End a request that is in flight: it is answered with what was made so far, finish_reason "abort".

    The id is the `id` of its chunks, with or without its prefix.
    """
    internal = request_id
    for prefix in _PREFIXES:
        internal = internal.removeprefix(prefix)
    found = [exchange for exchange in this_app().exchanges if exchange.request_id == internal]
    if not any(exchange.generations for exchange in found):
        raise RequestNotFound(f"no request {request_id[:80]!r} is in flight", field="id")
    for exchange in found:
        exchange.abandon()
    return Response(orjson.dumps(attrs.asdict(Aborted(id=request_id))), content_type="application/json")
