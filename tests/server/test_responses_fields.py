"""Every row of the field tables of the Responses API, sent to a small real model: what is supported does something."""

from __future__ import annotations

import json

import attrs

from tests.server.rows import agree, differ, noted_prompts
from tests.server.scripted import CALLING, random_model
from trio_llm.server.openai import compatibility

PATH = "/v1/responses"
TEMPLATE = "{{ reasoning_effort }}{{ mood }}" + CALLING.replace(
    "{{ m.role }}: ", "{{ m.role }}: {{ m.reasoning_content }}{{ m.tool_call_id }}"
).replace("<tool_call>", "{{ call.id }}<tool_call>")
BODY = {"model": "fake", "input": "the quick brown fox", "temperature": 0, "max_output_tokens": 8}
RANDOM = {"temperature": 2, "seed": 1}
FUNCTION = {
    "type": "function",
    "name": "weather",
    "description": "sun or rain",
    "parameters": {
        "type": "object",
        "properties": {"in": {"enum": ["Bern"]}},
        "required": ["in"],
        "additionalProperties": False,
    },
    "strict": True,
}
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "name": "form", "schema": SCHEMA, "strict": True, "description": "a form"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"in": "Bern"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}]}
PART = {"type": "input_text", "text": "hi"}
REFUSAL = {"type": "refusal", "refusal": "never"}


@attrs.define
class Asking:
    """Asks for the greedy continuation of one prompt, in eight tokens."""

    client: object
    prompts: list[str]
    """What the model was given, one after the other."""

    async def __call__(self, **extra):
        await self.client.send("POST", PATH, {**BODY, **extra})
        answer = await self.client.receive()
        assert answer.status == 200, (extra, answer.json)
        return answer if extra.get("stream") else answer.json

    async def say(self, **extra):
        return said(await self(**extra))


def said(body):
    return "".join(part["text"] for item in body["output"] for part in item.get("content", ()))


def gives(extra, good):
    """A row: the answer is as it should be."""

    async def check(ask):
        body = await ask(**extra)
        assert good(body), body

    return check


def reads(extra, text):
    """A row: the model is given this text, among others."""

    async def check(ask):
        await ask(**extra)
        assert text in ask.prompts[-1], ask.prompts[-1]

    return check


async def continues(ask):
    first = await ask(input="one")
    await ask(input="two", previous_response_id=first["id"])
    assert ask.prompts[-1] == f"user: one\nassistant: {said(first)}\nuser: two\nassistant: "
    for store, status in ((False, 404), (True, 200)):
        made = await ask(store=store)
        await ask.client.send("GET", f"{PATH}/{made['id']}")
        assert (await ask.client.receive()).status == status


async def calls(ask):
    body = await ask(tools=[FUNCTION], tool_choice="required", max_output_tokens=200, parallel_tool_calls=False)
    (call,) = body["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"in": "Bern"})
    assert all(word in ask.prompts[-1] for word in ("sun or rain", "weather", '"enum"', '"function"'))
    assert "strict" not in ask.prompts[-1]
    assert body["tools"] == [FUNCTION]


async def calls_several(ask):
    several = {"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 400, **RANDOM}
    assert len((await ask(**several))["output"]) > 1 == len((await ask(**several, parallel_tool_calls=False))["output"])


async def is_held_to_a_form(ask):
    body = await ask(text={"format": FORM}, max_output_tokens=100)
    assert json.loads(said(body)) == {"a": 1}
    assert body["text"]["format"] == FORM
    assert "a form" not in ask.prompts[-1]


async def is_cut(ask):
    turns = [{"role": role, "content": "the fox " * 40} for _ in range(20) for role in ("user", "assistant")]
    last = {"role": "user", "content": "now"}
    body = await ask(input=[{"role": "system", "content": "be quick"}, *turns, last], truncation="auto")
    assert body["truncated"]["messages"] > 0
    assert ask.prompts[-1].startswith("system: be quick") and ask.prompts[-1].endswith("user: now\nassistant: ")


async def streams(ask):
    for options in ({}, {"stream_options": {"include_obfuscation": False}}):
        answer = await ask(stream=True, **options)
        events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: ")]
        assert said(events[-1]["response"]) == await ask.say()


async def shares_by_salt(ask):
    async def cached(salt):
        return (await ask(cache_salt=salt))["usage"]["input_tokens_details"]["cached_tokens"]

    assert [await cached("one"), await cached("one") > 0, await cached("two")] == [0, True, 0]


async def tells_log_probabilities(ask):
    for extra, count in (({"include": ["message.output_text.logprobs"]}, 0), ({"top_logprobs": 2}, 2)):
        (item,) = (await ask(**extra))["output"]
        logprobs = item["content"][0]["logprobs"]
        assert len(logprobs) == 8 and all(len(entry["top_logprobs"]) == count for entry in logprobs)


def message(**fields):
    return {"input": [{"role": "user", "content": "hi", **fields}]}


ROWS = {
    "model": gives({}, lambda body: body["model"] == "fake"),
    "input": differ({}, {"input": "over the lazy dog"}),
    "instructions": reads({"instructions": "be good"}, "system: be good\nuser: the"),
    "previous_response_id": continues,
    "store": continues,
    "max_output_tokens": gives({"max_output_tokens": 3}, lambda body: body["usage"]["output_tokens"] == 3),
    "temperature": differ({}, RANDOM),
    "top_p": agree({}, {**RANDOM, "top_p": 1e-6}),
    "top_logprobs": tells_log_probabilities,
    "include": tells_log_probabilities,
    "tools": calls,
    "tool_choice": calls,
    "parallel_tool_calls": calls_several,
    "truncation": is_cut,
    "metadata": gives({"metadata": {"a": "b"}}, lambda body: body["metadata"] == {"a": "b"}),
    "stream": streams,
    "stream_options": streams,
    "seed": differ(RANDOM, {**RANDOM, "seed": 2}),
    "top_k": agree({}, {**RANDOM, "top_k": 1}),
    "min_p": agree({}, {**RANDOM, "min_p": 1}),
    "repetition_penalty": differ({"max_output_tokens": 40}, {"max_output_tokens": 40, "repetition_penalty": 10}),
    "cache_salt": shares_by_salt,
    "chat_template_kwargs": reads({"chat_template_kwargs": {"mood": "cheerful"}}, "cheerful"),
    "safety_identifier": gives({"safety_identifier": "me"}, lambda body: body["safety_identifier"] == "me"),
    "prompt_cache_key": gives({"prompt_cache_key": "mine"}, lambda body: body["prompt_cache_key"] == "mine"),
    "reasoning": reads({"reasoning": {"effort": "high"}}, "high"),
    "reasoning.effort": reads({"reasoning": {"effort": "high"}}, "high"),
    "text": is_held_to_a_form,
    "text.format": is_held_to_a_form,
    **{f"text.format.{name}": is_held_to_a_form for name in FORM},
    **{f"tools[].{name}": calls for name in FUNCTION},
    "input[].role": reads(message(role="developer"), "system: hi"),
    "input[].content": reads({"input": [REASONING, {"role": "assistant", "content": "so"}]}, "assistant: hmmso"),
    "input[].call_id": reads({"input": [CALL, OUTPUT]}, "tool: c1sun"),
    "input[].name": reads({"input": [CALL, OUTPUT]}, 'c1<tool_call>\n{"name": "weather"'),
    "input[].arguments": reads({"input": [CALL, OUTPUT]}, '"arguments": {"in": "Bern"}'),
    "input[].output": reads(
        {"input": [CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "rain"}]}]}, "c1rain"
    ),
    "input[].content[].type": reads(message(role="assistant", content=[REFUSAL]), "assistant: never"),
    "input[].content[].text": reads(message(content=[PART, {"type": "output_text", "text": "you"}]), "hi\nyou"),
    "input[].content[].refusal": reads(message(role="assistant", content=[REFUSAL]), "assistant: never"),
}
ELSEWHERE = {"priority"}  # what it does is chat completions' affair


async def test_supported(serving):
    executor, model = random_model(template=TEMPLATE)
    prompts = noted_prompts(executor, model)
    async with serving(executor=executor, model=model) as server:
        ask = Asking(await server.connect(), prompts)
        for name, check in ROWS.items():
            try:
                await check(ask)
            except BaseException as error:
                error.add_note(f"in the row {name}")
                raise
        await server.assert_all_free()


def test_every_supported_row_is_tried():
    supported = {
        prefix + name
        for prefix, table in compatibility.RESPONSE_TABLES.values()
        for name, row in table.items()
        if row.treatment == "supported"
    }
    assert supported - ELSEWHERE == ROWS.keys()


WHOLE = {
    "An item of `input` of type `message`, or of none": {"role": "user", "content": "hi"},
    "An item of `input` of type `function_call`": CALL,
    "An item of `input` of type `function_call_output`": OUTPUT,
    "An item of `input` of type `reasoning`": REASONING,
    "An entry of an item's `content` or `output`": PART,
    "An entry of `tools` of a response": FUNCTION,
    "`text.format` of a response": {"type": "text"},
}
"""A good object of each table that has fields which must be there."""


def wrap(title, prefix, more):
    """A good body in which one object of a table has more fields, and the path of that object."""
    made = {**WHOLE.get(title, {}), **more}
    if prefix == "":
        return {**BODY, "max_output_tokens": 1, **made}, ""
    if prefix == "input[].":
        return {**BODY, "input": [{"role": "user", "content": "hi"}, made]}, "input[1]."
    if prefix == "input[].content[].":
        return {**BODY, **message(content=[made])}, "input[0].content[0]."
    if prefix == "tools[].":
        return {**BODY, "tools": [made], "tool_choice": "none"}, "tools[0]."
    if prefix == "text.format.":
        return {**BODY, "text": {"format": made}}, prefix
    return {**BODY, prefix[:-1]: made}, prefix


ACCEPTED = {"annotations": [], "logprobs": [], "include_obfuscation": True}
"""Values of accepted fields that are no strings."""


async def test_what_is_accepted_or_refused(serving, capsys):
    executor, model = random_model(template=TEMPLATE)
    async with serving(executor=executor, model=model) as strict, serving(compat="lenient") as lenient:
        client, easy = await strict.connect(), await lenient.connect()
        for title, (prefix, table) in compatibility.RESPONSE_TABLES.items():

            async def send(connection, more, title=title, prefix=prefix):
                body, where = wrap(title, prefix, more)
                await connection.send("POST", PATH, body)
                answer = await connection.receive()
                error = answer.json.get("error") or {}
                return answer.status, error.get("code"), str(error.get("param")).removeprefix(where)

            for name, row in table.items():
                if row.treatment == "supported":
                    continue
                good = [None, *row.neutral, *([ACCEPTED.get(name, "x")] if row.treatment == "accepted" else [])]
                if name == "type":
                    good = []  # other types are other tables
                for value in good:
                    assert (await send(client, {name: value}))[0] == 200, (title, name, value)
                status, code, param = await send(client, {name: {"asks": ["for"]}})
                assert (status, param) == (400, name), title
                if row.treatment == "refused":
                    assert code == "unsupported_parameter"
                    capsys.readouterr()
                    if prefix != "tools[].":  # that model cannot call
                        assert (await send(easy, {name: {"asks": ["for"]}}))[0] == 200, (title, name)
                        assert capsys.readouterr().out.count(name) >= 1
            assert await send(client, {"mood": 1}) == (400, "unknown_parameter", "mood")
