"""Every row of the field tables of the Messages API, sent; what is supported is tried in test_messages."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from tests.server.scripted import CALLING, saying
from trio_llm.server.anthropic import compatibility, fields, wire
from trio_llm.server.openai import limits
from trio_llm.server.openapi import TABLES

DOCUMENT = Path(__file__).parents[2] / "docs" / "anthropic_compatibility.md"
MESSAGES = "/v1/messages"
SCHEMA = {"type": "object"}


def wrap(table, more):
    """A good body in which one object of a table has more fields."""
    objects = {
        id(fields.MESSAGE): {"role": "user", "content": "hi"},
        id(fields.INPUT_BLOCK): {"type": "text", "text": "hi"},
        id(fields.RESULT_BLOCK): {"type": "text", "text": "hi"},
        id(fields.SYSTEM_BLOCK): {"type": "text", "text": "hi"},
        id(fields.TOOL): {"name": "f", "input_schema": SCHEMA},
        id(fields.TOOL_CHOICE): {"type": "auto"},
        id(fields.THINKING): {"type": "enabled"},
        id(fields.OUTPUT_CONFIG): {"effort": "low"},
        id(fields.OUTPUT_FORMAT): {"type": "json_schema", "schema": SCHEMA},
    }
    made = {**objects.get(id(table), {}), **more}
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    if table is fields.MESSAGES or table is fields.COUNT_TOKENS:
        return {**body, **made}
    if table is fields.MESSAGE:
        return {**body, "messages": [made]}
    if table is fields.INPUT_BLOCK:
        return {**body, "messages": [{"role": "user", "content": [made]}]}
    if table is fields.RESULT_BLOCK:
        block = {"type": "tool_result", "tool_use_id": "x", "content": [made]}
        return {**body, "messages": [{"role": "user", "content": [block]}]}
    if table is fields.OUTPUT_FORMAT:
        return {**body, "output_config": {"format": made}}
    name = {
        id(fields.SYSTEM_BLOCK): "system",
        id(fields.TOOL): "tools",
        id(fields.TOOL_CHOICE): "tool_choice",
        id(fields.THINKING): "thinking",
        id(fields.OUTPUT_CONFIG): "output_config",
    }[id(table)]
    return {**body, name: [made] if name in ("system", "tools") else made}


GOOD = {
    limits.check_text: "x",
    limits.check_object: {"type": "ephemeral"},
    limits.check_boolean: True,
    limits.check_count: 1024,
}


async def test_what_is_accepted_or_refused(serving):
    executor, model, _ = saying("byte-level", "yes", template=CALLING)
    tried = set()
    async with serving(executor=executor, model=model) as strict:
        async with serving(executor=executor, model=model, compat="lenient") as lenient:
            client, other = await strict.connect(), await lenient.connect()

            async def send(connection, table, more):
                path = MESSAGES if table is not fields.COUNT_TOKENS else f"{MESSAGES}/count_tokens"
                body = wrap(table, more)
                await connection.send("POST", path, body if path != MESSAGES else {"max_tokens": 4, **body})
                answer = await connection.receive()
                return answer.status, answer.json.get("error", {}).get("message", "")

            for prefix, table in compatibility.TABLES.values():
                where = prefix.replace("[]", "[0]")
                for name, row in table.items():
                    if row.treatment == "refused":
                        more = {name: {"asks": "for something"}}
                        status, message = await send(client, table, more)
                        assert (status, message) == (400, f"{where}{name} is not supported here: an object")
                        assert (await send(other, table, more))[0] == 200, (where, name)
                        good = [None, *row.neutral]
                    elif row.treatment == "accepted":
                        status, message = await send(client, table, {name: 0.5})
                        assert status == 400 and f"{where}{name} must be" in message
                        good = [None, GOOD[row.check]]
                    else:
                        continue
                    for value in good:
                        assert (await send(client, table, {name: value}))[0] == 200, (where, name, value)
                    tried.add((id(table), name))
                unknown = {"mood": 1}
                assert await send(client, table, unknown) == (400, f"unknown parameter: {where}mood")
                assert (await send(other, table, unknown))[0] == 200
    assert len(tried) > 30


@pytest.mark.parametrize("kind", [kind for kind in TABLES if kind.__module__ == wire.__name__])
def test_what_is_supported_is_read(kind):
    supported = {name for name, row in TABLES[kind].items() if row.treatment == "supported"}
    assert supported == {field.name for field in attrs.fields(kind)}


def test_every_table_is_in_the_document():
    tables = [table for name, table in vars(fields).items() if name.isupper() and name[0] != "_" and table]
    known = [table for _, table in compatibility.TABLES.values()]
    assert [table for table in tables if isinstance(table, dict) and not any(table is each for each in known)] == []
    assert DOCUMENT.read_text(encoding="utf-8") == compatibility.render()
