"""response_format and structured_outputs over HTTP, on a model of random weights."""

from __future__ import annotations

import json
import re

import pytest

from tests.server.scripted import THINKING, random_model
from trio_llm.errors import FormFailed
from trio_llm.server.openai.field_names import rename

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "on": {"type": "boolean"}},
    "required": ["colour", "on"],
    "additionalProperties": False,
}


def fits_schema(text):
    value = json.loads(text)
    return value.keys() == {"colour", "on"} and value["colour"] in ("red", "blue") and isinstance(value["on"], bool)


def named(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


SMALL = {"type": "object", "additionalProperties": False}
FORMS = {
    "schema": ({"response_format": named(SCHEMA, strict=True)}, fits_schema),
    "not strict": ({"response_format": named(SCHEMA, strict=False, description="a lamp")}, fits_schema),
    "json": ({"structured_outputs": {"json": SCHEMA}}, fits_schema),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, fits_schema),
    "regex": ({"structured_outputs": {"regex": "(ab|cd){3}"}}, lambda text: re.fullmatch("(ab|cd){3}", text)),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
    "grammar": ({"structured_outputs": {"grammar": 'start: "<" ("a"|"b") ">"'}}, lambda text: text in ("<a>", "<b>")),
}


def text_of(choice):
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_text_fits(serving, path):
    executor, model = random_model()
    prompt = {"messages": [{"role": "user", "content": "the fox"}]} if path == CHAT else {"prompt": "the fox"}
    async with serving(executor=executor, model=model) as server:
        client = await server.connect()
        for name, (fields, fits) in FORMS.items():
            body = {"model": "fake", "temperature": 1, "seed": 3, "max_tokens": 200, "n": 3, **prompt, **fields}
            await client.send("POST", path, body)
            choices = (await client.receive()).json["choices"]
            for choice in choices:
                assert choice["finish_reason"] == "stop"
                assert fits(text_of(choice)), (name, text_of(choice))
            await client.send("POST", path, {**body, "stream": True})
            texts = ["", "", ""]
            for chunk in (await client.receive()).events[:-1]:
                (piece,) = chunk["choices"]
                texts[piece["index"]] += piece["delta"].get("content", "") if path == CHAT else piece["text"]
            assert texts == [text_of(choice) for choice in choices]
        for anything in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
            await client.send("POST", path, {"model": "fake", "max_tokens": 30, **prompt, **anything})
            (choice,) = (await client.receive()).json["choices"]
            assert text_of(choice).startswith("{")
        await server.assert_all_free()


async def test_what_asks_for_nothing(serving):
    executor, model = random_model()
    async with serving(executor=executor, model=model) as server:
        body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "temperature": 0}
        plain = (await server.ask("POST", CHAT, body)).json["choices"]
        for nothing in (
            {"response_format": {"type": "text"}},
            {"structured_outputs": {}},
            {"structured_outputs": {"json": None, "json_object": False}, "response_format": {"type": "text"}},
        ):
            assert (await server.ask("POST", CHAT, {**body, **nothing})).json["choices"] == plain


REFUSED = [
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    ({"response_format": "json"}, "invalid_type", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "missing_required_parameter",
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "invalid_value",
        "response_format.json_schema.name",
    ),
    ({"response_format": named([])}, "invalid_type", "response_format.json_schema.schema"),
    ({"response_format": named({"type": "not-a-type"})}, "invalid_value", "response_format.json_schema.schema"),
    ({"response_format": named({"$ref": "#"})}, "invalid_value", "response_format.json_schema.schema"),
    (
        {"response_format": named(json.loads('{"not":' * 100 + "{}" + "}" * 100))},
        "invalid_value",
        "response_format.json_schema.schema",
    ),
    ({"response_format": named({"enum": ["x" * 300_000]})}, "invalid_value", "response_format.json_schema.schema"),
    ({"structured_outputs": {"regex": "("}}, "invalid_value", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["x", 1]}}, "invalid_type", "structured_outputs.choice[1]"),
    ({"structured_outputs": {"grammar": "nonsense :"}}, "invalid_value", "structured_outputs.grammar"),
    ({"structured_outputs": {"json": "{"}}, "invalid_value", "structured_outputs.json"),
    ({"structured_outputs": {"json": 5}}, "invalid_type", "structured_outputs.json"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "invalid_value", "structured_outputs"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "invalid_value",
        "structured_outputs",
    ),
    ({"structured_outputs": {"colour": "red"}}, "unknown_parameter", "structured_outputs.colour"),
]


async def test_refused(serving):
    """With the compiler's words; and the next request is served."""
    executor, model = random_model()
    async with serving(executor=executor, model=model) as server:
        client = await server.connect()
        for change, code, param in REFUSED:
            body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
            await client.send("POST", CHAT, {**body, **change})
            answer = await client.receive()
            error = answer.json.get("error", {})
            assert (answer.status, error.get("code"), error.get("param")) == (400, code, param), (change, error)
            assert "structured_output " not in error["message"]
            await client.send("POST", CHAT, body)
            assert (await client.receive()).status == 200
        await server.assert_all_free()


async def test_the_form_is_that_of_the_answer_alone(serving):
    """Reasoning may come before it, and must where the template has begun it."""
    for template in (THINKING, THINKING + "{% if add_generation_prompt %}<think>\n{% endif %}"):
        executor, model = random_model(template=template, words=["<think>", "</think>"])
        async with serving(executor=executor, model=model) as server:
            (end,) = model.tokenizer.encode("</think>")  # made likely, so that the reasoning ends
            body = {"messages": [{"role": "user", "content": "x"}], "n": 4, "seed": 1, "logit_bias": {str(end): 4}}
            fields = {"model": "fake", "max_tokens": 600, **body, "response_format": named(SCHEMA)}
            choices = (await server.ask("POST", CHAT, fields)).json["choices"]
            for choice in choices:
                assert choice["finish_reason"] == "stop"
                assert fits_schema(choice["message"]["content"])
            assert any("reasoning_content" in choice["message"] for choice in choices)


GROWING = "start: x{1000}\nx: y{1000}\ny: z{1000}\nz: /[s]/"
"""A grammar that is found to be too large when some of its text is there."""
AT_ODDS = [
    ({"structured_outputs": {"grammar": GROWING}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": ["the"]}, "allowed_token_ids": [5]}, "structured_outputs.choice"),
    ({"response_format": named(SMALL), "allowed_token_ids": [5]}, "response_format.json_schema.schema"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "param"), AT_ODDS)
async def test_a_form_that_cannot_be_held_is_a_bad_request(serving, path, fields, param):
    """It is found out while the text is made: but nothing is wrong with the server, and trying again does not help."""
    executor, model = random_model()
    prompt = {"messages": [{"role": "user", "content": "the fox"}]} if path == CHAT else {"prompt": "the fox"}
    async with serving(executor=executor, model=model) as server:
        for stream in (False, True):
            answer = await server.ask("POST", path, {"model": "fake", "stream": stream, **prompt, **fields})
            assert answer.status == 400 or stream
            error = answer.json["error"] if answer.status == 400 else answer.events[-2]["error"]
            assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_value", param)
            assert error["message"].startswith(param)
        await server.assert_all_free()


def test_fields_are_named_through_several_apis():
    error = FormFailed("structured_output failed: too large", field="structured_output")
    rename(error, {"structured_output": "response_format"}, {"response_format": "text.format"})
    assert (error.field, error.message) == ("text.format", "text.format failed: too large")


@pytest.mark.parametrize("name", ["stop", "bad_words"])
async def test_very_long_strings_are_refused(serving, name):
    async with serving() as server:
        body = {"model": "fake", "prompt": "hi", "max_tokens": 1}
        answer = await server.ask("POST", COMPLETIONS, {**body, name: ["x" * 4097]})
        assert (answer.status, answer.json["error"]["param"]) == (400, name)
        assert (await server.ask("POST", COMPLETIONS, {**body, name: ["x" * 4096]})).status == 200
