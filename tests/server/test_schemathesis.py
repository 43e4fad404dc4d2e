"""Requests made up from the OpenAPI document, sensible and not: no 5xx, and every answer is as described."""

from __future__ import annotations

import hypothesis
import pytest
import requests
import schemathesis
import trio
from schemathesis import GenerationMode, checks

from trio_llm.core.executor import ExecutorInfo, FakeExecutor

ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
"""Whose errors have no code."""
EXAMPLES = 12
"""For each route, each way."""
SMALL = ExecutorInfo(num_blocks=1024, block_size=4, vocab_size=256, max_model_len=64)


def play(url, mode):
    seen = set()
    with requests.Session() as session:
        document = session.get(f"{url}/openapi.json", timeout=20).json()
        for schema in document["components"]["schemas"].values():
            if "model" in schema.get("required", ()):  # most requests would ask for other models
                schema["properties"]["model"]["enum"] = ["fake"]
        schema = schemathesis.openapi.from_dict(document)
        for found in schema.get_all_operations():
            operation = found.ok()

            @hypothesis.settings(
                max_examples=EXAMPLES,
                derandomize=True,
                database=None,
                deadline=None,
                suppress_health_check=list(hypothesis.HealthCheck),
                phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def play_one(case):
                response = case.call(base_url=url, session=session, timeout=20)
                case.validate_response(response, excluded_checks=[checks.positive_data_acceptance])
                seen.add((case.path, response.status_code))

            try:
                play_one()
            except hypothesis.errors.Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE  # there is nothing to get wrong about it
    return seen


@pytest.mark.parametrize("mode", GenerationMode)
async def test_schemathesis(serving, mode):
    async with serving(executor=FakeExecutor(SMALL)) as server:
        with trio.fail_after(120):
            seen = await trio.to_thread.run_sync(play, server.url, mode)
        statuses = {status for path, status in seen if path.endswith("completions")}
        assert statuses == {200, 400} if mode is GenerationMode.POSITIVE else 400 in statuses
        await server.assert_all_free()


async def test_wrong_methods_and_media(serving):
    async with serving() as server:
        document = (await server.ask("GET", "/openapi.json")).json
        for path, methods in document["paths"].items():
            for method in {"get", "post", "put", "patch", "delete"} - methods.keys():
                answer = await server.ask(method.upper(), path.replace("{response_id}", "resp_1"))
                assert answer.status == 405, (method, path)
                assert methods.keys() <= {name.strip().lower() for name in answer.headers["allow"].split(",")}
                assert answer.json["error"].get("code") == (None if path in ANTHROPIC else "method_not_allowed")
            for method, entry in methods.items():
                if "requestBody" in entry:
                    answer = await server.ask(method.upper(), path, b"{}", content_type="text/plain")
                    assert answer.status == 415
                    assert answer.json["error"].get("code") == (None if path in ANTHROPIC else "unsupported_media_type")
