"""Every row of the field tables of the Messages API, sent."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from tests.server.rows import noted_prompts
from tests.server.scripted import CALLING, random_model, saying
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


TEMPLATE = (
    "{{ reasoning_effort }}{{ enable_thinking if enable_thinking is defined }}{{ tools | tojson if tools }}"
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}{{ m.tool_call_id }}"
    "{% for call in m.tool_calls or () %}{{ call.id }}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""One that shows all that it is told."""
NOW = {"name": "now", "input_schema": {"type": "object", "additionalProperties": False}}
TOOLS = [NOW, {**NOW, "name": "then"}]
WRONG = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
CALLED = {"type": "tool_use", "id": "c1", "name": "now", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}


def said(*blocks, role="user"):
    return {"messages": [{"role": role, "content": list(blocks)}, {"role": "user", "content": "so?"}]}


def both(path, one, other):
    """Two requests that differ in one field of the objects on a path."""
    for step in reversed(path.removesuffix(".").split(".")):
        name, is_list = step.removesuffix("[]"), step.endswith("[]")
        one, other = ({name: [each] if is_list else each} for each in (one, other))
    return one, other


def changed(path, good, **others):
    return {path + name: both(path, good, {**good, name: value}) for name, value in others.items()}


DIFFERENT = {
    "model": ({}, {"model": "other"}),
    "messages": ({}, {"messages": [{"role": "user", "content": "ho"}]}),
    "system": ({}, {"system": "be kind"}),
    "tools": ({}, {"tools": TOOLS}),
    "tool_choice": ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": {"type": "any"}}),
    "tool_choice.type": ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": {"type": "none"}}),
    "tool_choice.name": tuple(
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": tool["name"]}} for tool in TOOLS
    ),
    "tool_choice.disable_parallel_tool_use": tuple(
        {"max_tokens": 300, "tools": [NOW], "tool_choice": {"type": "any", "disable_parallel_tool_use": value}}
        for value in (False, True)
    ),
    "thinking": ({}, {"thinking": {"type": "adaptive"}}),
    "output_config": ({}, {"output_config": {"effort": "low"}}),
    "max_tokens": ({}, {"max_tokens": 3}),
    "temperature": ({}, {"temperature": 0}),
    "top_p": ({}, {"top_p": 1e-6}),
    "top_k": ({}, {"top_k": 1}),
    "stream": ({}, {"stream": True}),
    "messages[].role": ({}, {"messages": [{"role": "system", "content": "hi"}]}),
    "messages[].content": ({}, said({"type": "text", "text": "hi"})),
    **changed("system[].", {"type": "text", "text": "a"}, type="image", text="b"),
    **changed("thinking.", {"type": "enabled"}, type="disabled"),
    **changed(
        "output_config.", {"effort": "low"}, effort="high", format={"type": "json_schema", "schema": {"const": 1}}
    ),
    **changed(
        "output_config.format.", {"type": "json_schema", "schema": {"const": 1}}, type="text", schema={"const": 2}
    ),
    **changed("tools[].", NOW, name="then", description="it", input_schema={"type": "object"}, type="bash"),
    "tools[].strict": tuple({"tools": [{**NOW, "input_schema": WRONG, "strict": value}]} for value in (False, True)),
}
BLOCKS = {
    "type": (said({"type": "text", "text": "a"}), said({"type": "image", "text": "a"})),
    "text": (said({"type": "text", "text": "a"}), said({"type": "text", "text": "b"})),
    "thinking": (said(THOUGHT, role="assistant"), said({**THOUGHT, "thinking": "oh"}, role="assistant")),
    **{
        name: (said(CALLED, role="assistant"), said({**CALLED, name: value}, role="assistant"))
        for name, value in {"id": "c2", "name": "then", "input": {"a": 2}}.items()
    },
    **{
        name: (said(RESULT), said({**RESULT, name: value}))
        for name, value in {"tool_use_id": "c2", "content": "sun", "is_error": True}.items()
    },
    **{
        f"content[].{name}": (said({**RESULT, "content": [WHOLE]}), said({**RESULT, "content": [{**WHOLE, name: "b"}]}))
        for WHOLE in ({"type": "text", "text": "a"},)
        for name in WHOLE
    },
}
DIFFERENT |= {f"messages[].content[].{name}": pair for name, pair in BLOCKS.items()}


async def test_what_is_supported_does_something(serving):
    executor, model = random_model(template=TEMPLATE)
    prompts = noted_prompts(executor, model)
    async with serving(executor=executor, model=model) as server:
        client = await server.connect()

        async def ask(more):
            """What a request gives, ids apart: what its model read, and what it said."""
            prompts.clear()
            body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, **more}
            await client.send("POST", MESSAGES, body)
            answer = await client.receive()
            if answer.status != 200 or more.get("stream"):
                return answer.status, answer.headers["content-type"], bool(prompts)
            blocks = [
                {name: value for name, value in block.items() if name != "id"} for block in answer.json["content"]
            ]
            return answer.status, list(prompts), blocks, answer.json["stop_reason"]

        text = (await ask({}))[2][0]["text"]
        stop = {"stop_sequences": ({}, {"stop_sequences": [text[5:7]]})}
        for name, (one, other) in (DIFFERENT | stop).items():
            before = await ask(one)
            assert before[0] == 200, (name, before)
            assert before == await ask(one), name
            assert before != await ask(other), name
    supported = {
        prefix + name
        for prefix, table in compatibility.TABLES.values()
        for name, row in table.items()
        if row.treatment == "supported"
    }
    assert supported == {*DIFFERENT, *stop}


@pytest.mark.parametrize("kind", [kind for kind in TABLES if kind.__module__ == wire.__name__])
def test_what_is_supported_is_read(kind):
    supported = {name for name, row in TABLES[kind].items() if row.treatment == "supported"}
    assert supported == {field.name for field in attrs.fields(kind)}


def test_every_table_is_in_the_document():
    tables = [table for name, table in vars(fields).items() if name.isupper() and name[0] != "_" and table]
    known = [table for _, table in compatibility.TABLES.values()]
    assert [table for table in tables if isinstance(table, dict) and not any(table is each for each in known)] == []
    assert DOCUMENT.read_text(encoding="utf-8") == compatibility.render()
