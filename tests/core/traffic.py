"""Random traffic through a core whose model is a function: each request gets the tokens that no engine would need."""

from __future__ import annotations

import random
from collections.abc import Callable

from trio_llm.core.engine_core import EngineCore
from trio_llm.core.request import Request

from .helpers import Outputs, gather, make_request

NextToken = Callable[[list[int], int], int]
VOCAB = 60


def prompt_of(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCAB) for _ in range(length)]


def expected(request: Request, next_token: NextToken) -> list[int]:
    tokens = list(request.prompt_token_ids)
    for index in range(request.params.max_tokens or 0):
        tokens.append(next_token(tokens, index))
        if tokens[-1] in request.eos_token_ids:
            break
    return tokens[len(request.prompt_token_ids) :]


def play_traffic(core: EngineCore, numbers: random.Random, window: int, next_token: NextToken) -> None:
    """A dozen requests at random times, with aborts and slow readers, until all have ended.

    Args:
        window: the core's credit window.
        next_token: what the core's model says.
    """
    requests: dict[str, Request] = {}
    outputs: Outputs = {}
    reasons: dict = {}
    unread: dict[tuple[str, int], int] = {}
    aborted: set[tuple[str, int]] = set()
    for _ in range(4000):
        if len(requests) < 12 and numbers.random() < 0.3:
            request = make_request(
                str(len(requests)), prompt_of(numbers.randrange(7, 20), numbers.randrange(4)),
                max_tokens=numbers.randrange(1, 30), n=numbers.randrange(1, 4), priority=numbers.randrange(2),
                eos=[3] if numbers.random() < 0.3 else [],
            )  # fmt: skip
            core.add(request)
            requests[request.id] = request
        if requests and numbers.random() < 0.02:
            request = numbers.choice(list(requests.values()))
            index = numbers.randrange(request.params.n)
            aborted.add((request.id, index))
            core.finish(request.id, index)
        result = core.step()
        core.check()
        gather(outputs, reasons, result)
        for output in result:
            key = output.request_id, output.index
            unread[key] = unread.get(key, 0) + len(output.token_ids)
            assert unread[key] <= window
        for key, count in unread.items():
            if numbers.random() < 0.5:
                core.acknowledge(*key, count)
                unread[key] = 0
        if len(requests) == 12 and not core.has_work() and not any(unread.values()):
            break
    else:
        raise AssertionError("no end")
    for request in requests.values():
        wanted = expected(request, next_token)
        for index in range(request.params.n):
            found = outputs.get((request.id, index), [])
            if (request.id, index) in aborted:
                assert found == wanted[: len(found)]
            else:
                assert found == wanted
