"""The OpenAPI document says what the server does."""

from __future__ import annotations

import itertools

import attrs
import jsonschema_rs
import pytest
import schemathesis

from trio_llm.config import ServerSettings
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.engine.registry import Registry
from trio_llm.server import openapi
from trio_llm.server.anthropic.translation import parse_count_tokens, parse_messages
from trio_llm.server.app import create_app
from trio_llm.server.json_schema import SUPPORT, Schemas
from trio_llm.server.openai import fields
from trio_llm.server.openai.embeddings import parse_embedding
from trio_llm.server.openai.parsing import parse_chat, parse_completion
from trio_llm.server.openai.responses.endpoints import MAX_PAGE
from trio_llm.server.openai.tokenizer import parse_detokenize, parse_tokenize

PARSERS = {
    "ChatCompletionRequest": parse_chat,
    "CompletionRequest": parse_completion,
    "EmbeddingRequest": parse_embedding,
    "TokenizeRequest": parse_tokenize,
    "DetokenizeRequest": parse_detokenize,
    "MessagesRequest": parse_messages,
    "CountTokensRequest": parse_count_tokens,
}
SMALLEST = {
    "ChatCompletionRequest": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "CompletionRequest": {"model": "m", "prompt": "hi"},
    "EmbeddingRequest": {"model": "m", "input": "hi"},
    "TokenizeRequest": {"prompt": "hi"},
    "DetokenizeRequest": {"tokens": [1]},
    "MessagesRequest": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "CountTokensRequest": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}


@pytest.fixture
def app():
    return create_app(ServerSettings(), registry=Registry())


@pytest.fixture
def document(app):
    return openapi.document(app)


def validator(document, name):
    root = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema_rs.Draft202012Validator(root)


def refs(value):
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = value.values()
    elif not isinstance(value, list):
        return
    yield from itertools.chain.from_iterable(map(refs, value))


def test_every_route_is_described(app, document):
    routes = {
        (openapi._path(rule), method.lower())
        for rule in app.url_map.iter_rules()
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert described == routes
    ids = [entry["operationId"] for methods in document["paths"].values() for entry in methods.values()]
    assert len(set(ids)) == len(ids)


def test_it_is_valid(document):
    schemathesis.openapi.from_dict(document).validate()
    for name, schema in document["components"]["schemas"].items():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
        assert validator(document, name)
    for ref in refs(document):
        part = document
        for step in ref.removeprefix("#/").split("/"):
            part = part[step]


def test_every_table_is_used():
    tables = [
        table for name, table in vars(fields).items() if isinstance(table, dict) and name.isupper() and name[0] != "_"
    ]
    assert [table for table in tables if not any(table is used for used in openapi.TABLES.values())] == []


@pytest.mark.parametrize("kind", openapi.TABLES)
def test_every_field_of_a_table_is_described_as_it_is_treated(kind, document):
    schema = document["components"]["schemas"][kind.__name__]
    table = openapi.TABLES[kind]
    assert {name: part[SUPPORT] for name, part in schema["properties"].items()} == {
        name: row.treatment for name, row in table.items()
    }
    assert schema["additionalProperties"] is False
    supported = {name for name, row in table.items() if row.treatment == "supported"}
    assert supported == {field.name for field in attrs.fields(kind)}


@pytest.mark.parametrize("name", PARSERS)
def test_values_that_ask_for_nothing_pass_schema_and_server_alike(name, document):
    check, parse, smallest = validator(document, name), PARSERS[name], SMALLEST[name]
    for field, part in document["components"]["schemas"][name]["properties"].items():
        if part[SUPPORT] == "refused":
            for value in part["enum"]:
                check.validate({**smallest, field: value})
                parse({**smallest, field: value}, lenient=False)
            assert not check.is_valid({**smallest, field: "no such value"})


@pytest.mark.parametrize("name", PARSERS)
def test_null_is_absent(name, document):
    check, parse, smallest = validator(document, name), PARSERS[name], SMALLEST[name]
    for field in document["components"]["schemas"][name]["properties"].keys() - smallest.keys():
        check.validate({**smallest, field: None})
        parse({**smallest, field: None}, lenient=False)
    for field in document["components"]["schemas"][name]["required"]:
        assert not check.is_valid({**smallest, field: None})


def test_limits_are_those_of_the_sampling_parameters(document):
    properties = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    for name in ("temperature", "top_p", "top_k", "min_p", "n", "seed"):
        part = properties[name]
        for value in (part.get("minimum"), part["maximum"]):
            if value is not None:
                SamplingParams(**{name: value})
        outside = [part["maximum"] + 1, part.get("minimum", part.get("exclusiveMinimum", 0) + 1) - 1]
        for value in outside:
            with pytest.raises(Exception, match=name):
                SamplingParams(**{name: value})
    assert properties["stop"]["anyOf"][1]["maxItems"] == 4
    assert properties["temperature"]["description"] == fields.CHAT["temperature"].remark


def test_lenient_servers_say_so(app):
    schema = openapi.document(app, lenient=True)["components"]["schemas"]["ChatCompletionRequest"]
    assert "additionalProperties" not in schema
    assert "enum" not in schema["properties"]["store"]


def test_keys_are_asked_for_where_there_are_some(document):
    assert "security" not in document
    locked = openapi.document(create_app(ServerSettings(api_key=("sesame",)), registry=Registry()))
    schemathesis.openapi.from_dict(locked).validate()
    schemes = locked["components"]["securitySchemes"]
    assert locked["security"] == [{name: []} for name in schemes]
    assert [scheme.get("scheme", scheme.get("name")) for scheme in schemes.values()] == ["bearer", "x-api-key", "basic"]
    open_paths = {path for path, methods in locked["paths"].items() if methods.get("get", {}).get("security") == []}
    assert open_paths == {"/health", "/health/live", "/health/ready"}


def test_a_type_without_a_schema_is_refused():
    with pytest.raises(TypeError, match="has no JSON Schema"):
        Schemas({}, lenient=False).of_answer(bytes)


async def test_answers_are_as_described(serving):
    async with serving() as server:
        document = (await server.ask("GET", "/openapi.json")).json
        for path, methods in document["paths"].items():
            for method, entry in methods.items():
                body = None
                if "requestBody" in entry:
                    body = {**entry["requestBody"]["content"]["application/json"]["example"], "stream": False}
                url = path.replace("{name}", "fake")
                answer = await server.ask(method.upper(), url, body)
                failure = entry["responses"]["4XX"]["$ref"].rpartition("/")[2]
                wanted = entry["responses"].get(str(answer.status), document["components"]["responses"][failure])
                media_type = answer.headers["content-type"].partition(";")[0]
                schema = wanted["content"][media_type]["schema"]
                if media_type == "application/json":
                    root = {**schema, "components": document["components"]}
                    jsonschema_rs.Draft202012Validator(root).validate(answer.json)
                if "text/event-stream" in wanted["content"]:
                    chunks = (await server.ask(method.upper(), url, {**body, "stream": True})).events
                    event = wanted["content"]["text/event-stream"]["schema"]["properties"]
                    data = event["data"]
                    if "event" not in event:
                        assert chunks.pop() == "DONE"
                        _, data = data["anyOf"]
                    assert len(chunks) > 1
                    root = data["contentSchema"]["anyOf"][0]
                    check = jsonschema_rs.Draft202012Validator({**root, "components": document["components"]})
                    for chunk in chunks:
                        check.validate(chunk)


def test_queries_are_described(app):
    paths = openapi.document(app)["paths"]
    items = paths["/v1/responses/{response_id}/input_items"]["get"]["parameters"]
    assert [(entry["name"], entry["in"]) for entry in items] == [
        ("response_id", "path"),
        ("order", "query"),
        ("after", "query"),
        ("limit", "query"),
    ]
    assert items[3]["schema"]["maximum"] == MAX_PAGE
    (model,) = paths["/tokenizer_info"]["get"]["parameters"]
    assert (model["name"], model["in"], model.get("required", False)) == ("model", "query", False)
