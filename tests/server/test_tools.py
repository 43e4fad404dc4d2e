"""Tool calls and reasoning, as clients see them: streamed or not, they are the same."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.server.scripted import CALLING, THINKING, random_model, saying

CHAT = "/v1/chat/completions"


def function(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "description": "it", "parameters": parameters}}


WEATHER = function("weather", city={"enum": ["Bern", "Rom"]}, days={"enum": [1, 2, 3]})
TIME = function("time")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 3}}\n</tool_call>'
TIME_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
NAME = {"name": "weather"}
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


def join(events):
    """What the chunks of each choice add up to; and how many there were."""
    messages, reasons = {}, {}
    for chunk in events:
        for choice in chunk["choices"]:
            message = messages.setdefault(choice["index"], {"content": "", "reasoning_content": "", "tool_calls": []})
            delta = choice["delta"]
            assert None not in delta.values()
            message["content"] += delta.get("content", "")
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                calls = message["tool_calls"]
                if call["index"] == len(calls):
                    assert call.keys() == {"index", "id", "type", "function"}
                    calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"] is not None:
                reasons[choice["index"]] = choice["finish_reason"]
    return messages, reasons


async def ask(server, **fields):
    """The choices of a whole answer and its usage, after a look at whether a stream says the same."""
    whole = await server.ask("POST", CHAT, {**HI, **fields})
    assert whole.status == 200, whole.json
    body = whole.json
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = (await server.ask("POST", CHAT, {**HI, **fields, **options})).events
    messages, reasons = join(chunks)
    for choice in body["choices"]:
        message, index = choice["message"], choice["index"]
        assert reasons[index] == choice["finish_reason"]
        assert messages[index]["content"] == (message["content"] or "")
        assert messages[index]["reasoning_content"] == message.get("reasoning_content", "")
        streamed = [call["function"] for call in messages[index]["tool_calls"]]
        assert streamed == [call["function"] for call in message.get("tool_calls", ())]
    for usage in (body["usage"], last["usage"]):
        usage["prompt_tokens_details"] = None
    assert last["usage"] == body["usage"]
    return body["choices"], body["usage"]


def calls_of(choice):
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"]["tool_calls"]
    ]


async def test_a_call(serving):
    executor, model, ids = saying("byte-level", CALL, template=CALLING)
    async with serving(executor=executor, model=model) as server:
        choices, usage = await ask(server, tools=[WEATHER, TIME], n=2)
        for choice in choices:
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            assert calls_of(choice) == [("weather", {"city": "Bern", "days": 3})]
            (call,) = choice["message"]["tool_calls"]
            assert call["type"] == "function" and call["id"].startswith("call_")
        assert choices[0]["message"]["tool_calls"][0]["id"] != choices[1]["message"]["tool_calls"][0]["id"]
        assert usage["completion_tokens"] == 2 * (len(ids) + 1)
        await server.assert_all_free()


async def test_text_and_several_calls(serving):
    executor, model, _ = saying("byte-level", "Let me see. " + CALL + "\n" + TIME_CALL, template=CALLING)
    async with serving(executor=executor, model=model) as server:
        (choice,), _ = await ask(server, tools=[WEATHER, TIME])
        assert choice["message"]["content"].strip() == "Let me see."
        assert calls_of(choice) == [("weather", {"city": "Bern", "days": 3}), ("time", {})]
        (choice,), _ = await ask(server, tools=[WEATHER, TIME], parallel_tool_calls=False)
        assert calls_of(choice) == [("weather", {"city": "Bern", "days": 3})]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TIME]},  # another function
        {"tools": [WEATHER], "tool_choice": "none"},
        {
            "tools": [WEATHER, TIME],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TIME]}},
        },
        {},
    ],
)
async def test_what_is_no_call_is_text(serving, fields):
    executor, model, _ = saying("byte-level", CALL, template=CALLING)
    async with serving(executor=executor, model=model) as server:
        (choice,), _ = await ask(server, **fields)
        assert choice["message"].keys() == {"role", "content", "refusal"}
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"


async def test_only_a_model_that_may_call_is_told_of_tools(serving):
    executor, model, _ = saying("byte-level", "no", template=CALLING)
    async with serving(executor=executor, model=model) as server:

        async def reads(**fields):
            answer = await server.ask("POST", CHAT, {**HI, "return_token_ids": True, **fields})
            return model.tokenizer.decode(answer.json["prompt_token_ids"])

        assert '"name": "weather"' in await reads(tools=[WEATHER])
        assert '"name": "weather"' not in await reads(tools=[WEATHER], tool_choice="none")
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TIME]}}
        assert '"name": "weather"' in await reads(tools=[WEATHER, TIME], tool_choice=allowed)


async def test_a_call_that_is_cut_off_is_text(serving):
    executor, model, ids = saying("byte-level", CALL, template=CALLING)
    async with serving(executor=executor, model=model) as server:
        (choice,), _ = await ask(server, tools=[WEATHER], max_tokens=len(ids) - 30)
        assert choice["finish_reason"] == "length"
        assert CALL.startswith(choice["message"]["content"].strip())
        (choice,), _ = await ask(server, tools=[WEATHER], stop=["days"])
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALL[: CALL.index("days")])


@pytest.mark.parametrize("tool_choice", ["required", "named", "allowed"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_call_is_forced(serving, tool_choice, seed):
    """By a grammar, from a model that would never make one."""
    executor, model = random_model(template=CALLING)
    wanted = {
        "required": "required",
        "named": {"type": "function", "function": {"name": "weather"}},
        "allowed": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}},
    }[tool_choice]
    async with serving(executor=executor, model=model) as server:
        fields = {"tools": [WEATHER, TIME], "tool_choice": wanted, "seed": seed, "temperature": 1}
        (choice,), _ = await ask(server, **fields, max_tokens=400, parallel_tool_calls=False)
        assert choice["finish_reason"] == ("stop" if tool_choice == "named" else "tool_calls")
        ((name, arguments),) = calls_of(choice)
        if tool_choice != "required":
            assert name == "weather"
        assert arguments == {} if name == "time" else arguments.keys() == {"city", "days"}
        await server.assert_all_free()


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
async def test_a_form_beside_tools(serving, tool_choice):
    """The text has the form, or it is a call; where a call is required it is one."""
    executor, model = random_model(template=CALLING)
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    fields = {
        "tools": [WEATHER],
        "tool_choice": tool_choice,
        "response_format": form,
        "temperature": 2,
        "max_tokens": 300,
    }
    ends = set()
    async with serving(executor=executor, model=model) as server:
        for seed in range(8):
            (choice,), _ = await ask(server, **fields, seed=seed, parallel_tool_calls=False)
            ends.add(choice["finish_reason"])
            if choice["finish_reason"] == "stop":
                assert json.loads(choice["message"]["content"]) in ({"x": 1}, {"x": 2})
            else:
                ((name, arguments),) = calls_of(choice)
                assert name == "weather" and arguments.keys() == {"city", "days"}
    assert ends <= ({"tool_calls", "stop"} if tool_choice == "auto" else {"tool_calls"})


async def test_details_beside_calls(serving):
    executor, model, ids = saying("byte-level", CALL, template=CALLING)
    async with serving(executor=executor, model=model) as server:
        fields = {**HI, "tools": [WEATHER], "logprobs": True, "return_token_ids": True}
        choice = (await server.ask("POST", CHAT, fields)).json["choices"][0]
        assert len(choice["logprobs"]["content"]) == len(ids)
        *chunks, _ = (await server.ask("POST", CHAT, {**fields, "stream": True})).events
        pieces = [chunk["choices"][0] for chunk in chunks]
        assert [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]] == (
            choice["logprobs"]["content"]
        )
        assert [token for piece in pieces for token in piece.get("token_ids", ())] == choice["token_ids"]
        assert join(chunks)[0][0]["tool_calls"][0]["function"] == choice["message"]["tool_calls"][0]["function"]


@pytest.mark.parametrize("interval", [0.0, 60.0])
async def test_reasoning(serving, interval):
    executor, model, _ = saying("byte-level", "<think>\nhmm, so\n</think>\n\nthe fox", template=THINKING)
    async with serving(executor=executor, model=model, engine={"stream_interval": interval}) as server:
        choices, usage = await ask(server, n=2)
        for choice in choices:
            assert choice["message"]["reasoning_content"] == "hmm, so"
            assert choice["message"]["content"] == "the fox"
            assert choice["finish_reason"] == "stop"
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < reasoning < usage["completion_tokens"]
        assert reasoning == 2 * len(model.tokenizer.encode("<think>\nhmm, so\n</think>"))
        (choice,), usage = await ask(server, max_tokens=9)
        assert choice["finish_reason"] == "length"
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 9
    async with serving(executor=executor, model=model, reasoning_parser="none") as server:
        (choice,), _ = await ask(server)
        assert choice["message"]["content"].startswith("<think>")


async def test_reasoning_before_a_call(serving):
    executor, model, _ = saying("byte-level", "<think>\nhmm\n</think>\n" + CALL, template=THINKING)
    async with serving(executor=executor, model=model) as server:
        (choice,), _ = await ask(server, tools=[WEATHER])
        assert choice["message"]["reasoning_content"] == "hmm"
        assert choice["message"]["content"] is None
        assert calls_of(choice) == [("weather", {"city": "Bern", "days": 3})]


async def test_reasoning_before_a_call_that_must_come(serving):
    """It is no part of what is forced, also where the template has begun it."""
    opened = THINKING + "{% if add_generation_prompt %}<think>\n{% endif %}"
    for template, choice in itertools.product((THINKING, opened), ("required", {"type": "function", "function": NAME})):
        executor, model = random_model(template=template, words=["<think>", "</think>"])
        async with serving(executor=executor, model=model) as server:
            (end,) = model.tokenizer.encode("</think>")
            fields = {"logit_bias": {str(end): 4}, "seed": 1, "max_tokens": 600, "n": 4}
            answers, _ = await ask(server, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, **fields)
            for answer in answers:
                ((name, arguments),) = calls_of(answer)
                assert name == "weather" and arguments.keys() == {"city", "days"}
                assert answer["message"]["content"] is None
            assert any("reasoning_content" in answer["message"] for answer in answers)


async def test_a_call_comes_back_in_the_history(serving):
    """What was answered can be sent as it is."""
    executor, model, _ = saying("byte-level", "<think>\nhmm\n</think>\n" + CALL, template=THINKING)
    async with serving(executor=executor, model=model) as server:
        (choice,), _ = await ask(server, tools=[WEATHER])
        message = choice["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
        answer = await server.ask(
            "POST", CHAT, {**HI, "messages": [*HI["messages"], message, result], "return_token_ids": True}
        )
        assert answer.status == 200
        prompt = model.tokenizer.decode(answer.json["prompt_token_ids"])
        assert '<tool_call>\n{"name": "weather"' in prompt and "sunny" in prompt


@pytest.mark.parametrize("stop", ["}", "Bern"])
async def test_a_call_that_a_stop_string_cuts_is_content(serving, stop):
    executor, model = random_model(template=CALLING)
    tool = function("weather", city={"enum": ["Bern"]})
    tool["function"]["parameters"]["additionalProperties"] = False
    forced = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    async with serving(executor=executor, model=model) as server:
        (choice,), _ = await ask(server, **forced, max_tokens=200, stop=["never"], temperature=0)
        assert calls_of(choice) == [("weather", {"city": "Bern"})]
        (choice,), _ = await ask(server, **forced, max_tokens=200, stop=[stop], temperature=0)
        assert "tool_calls" not in choice["message"]
        assert '"arguments"' in choice["message"]["content"] and stop not in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"


REFUSED = [
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "never"}, "invalid_value", "tool_choice"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "time"}}},
        "invalid_value",
        "tool_choice",
    ),
    ({"tools": [WEATHER], "tool_choice": 5}, "invalid_type", "tool_choice"),
    ({"tools": [WEATHER] * 2}, "invalid_value", "tools"),
    ({"tools": [function(f"f{n}") for n in range(129)]}, "invalid_value", "tools"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "invalid_value", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "missing_required_parameter", "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [{**WEATHER, "mood": 1}]}, "unknown_parameter", "tools[0].mood"),
    ({"tools": [WEATHER], "structured_outputs": {"regex": "a"}}, "invalid_value", "tools"),
    (
        {"tools": [function("f", x={"type": "not-a-type"})], "tool_choice": "required"},
        "invalid_value",
        "tools",
    ),
    (
        {"tools": [function("f", x=json.loads('{"not":' * 70 + "{}" + "}" * 70))]},
        "invalid_value",
        "tools[0].function.parameters",
    ),
    ({"tools": [function("f", x={"const": "y" * 300_000})]}, "invalid_value", "tools[0].function.parameters"),
    ({"parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls"),
]


async def test_refused(serving):
    executor, model = random_model(template=CALLING)
    async with serving(executor=executor, model=model) as server:
        client = await server.connect()
        for change, code, param in REFUSED:
            await client.send("POST", CHAT, {**HI, "max_tokens": 5, **change})
            answer = await client.receive()
            error = answer.json.get("error", {})
            assert (answer.status, error.get("code"), error.get("param")) == (400, code, param), (change, error)
        await client.send("POST", CHAT, {**HI, "max_tokens": 5, "tools": [], "tool_choice": "auto"})
        assert (await client.receive()).status == 200
        await server.assert_all_free()


async def test_a_model_that_cannot_call(serving):
    async with serving() as server:
        answer = await server.ask("POST", CHAT, {**HI, "tools": [WEATHER]})
        assert (answer.status, answer.json["error"]["param"]) == (400, "tools")
        answer = await server.ask("POST", CHAT, {**HI, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 2})
        assert answer.status == 200


async def test_strict_functions_do_not_force_a_call(serving):
    executor, model = random_model(template=CALLING)
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    async with serving(executor=executor, model=model) as server:
        answer = await server.ask("POST", CHAT, {**HI, "tools": [strict], "temperature": 0, "max_tokens": 12})
        assert answer.status == 200
        assert "strict" not in model.tokenizer.decode(
            (await server.ask("POST", CHAT, {**HI, "tools": [strict], "max_tokens": 1, "return_token_ids": True})).json[
                "prompt_token_ids"
            ]
        )
        text = await server.ask("POST", CHAT, {**HI, "temperature": 0, "max_tokens": 12})
        assert answer.json["choices"][0]["message"]["content"]
        assert text.json["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "this model takes no tools"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "--tool-call-parser can name it"),
    ],
)
async def test_what_a_model_that_calls_nothing_is_refused_with(serving, template, said):
    executor, model = random_model(template=template)
    async with serving(executor=executor, model=model) as server:
        answer = await server.ask("POST", CHAT, {**HI, "tools": [WEATHER]})
        assert answer.status == 400
        assert said in answer.json["error"]["message"]


ELEMENTS = (
    "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or () %}"
    "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}{% endfor %}"
)
"""A template that writes calls as Qwen 3 Coder does."""


async def test_values_of_a_call_are_what_its_schema_says(serving):
    text = (
        "Now:\n<tool_call>\n<function=note>\n<parameter=text>\n12\n</parameter>\n<parameter=line>\n12\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    executor, model, _ = saying("byte-level", text, template=ELEMENTS)
    note = function("note", text={"type": "string"}, line={"type": "integer"})
    async with serving(executor=executor, model=model) as server:
        (choice,), _ = await ask(server, tools=[note])
        assert choice["message"]["content"].strip() == "Now:"
        assert calls_of(choice) == [("note", {"text": "12", "line": 12})]
    executor, model = random_model(template=ELEMENTS)
    async with serving(executor=executor, model=model) as server:
        limited = function("note", text={"type": "string", "maxLength": 4}, line={"enum": [1, 2]})
        for tool_choice in ("required", {"type": "function", "function": {"name": "note"}}):
            (choice,), _ = await ask(server, tools=[limited], tool_choice=tool_choice, parallel_tool_calls=False)
            ((_, arguments),) = calls_of(choice)
            assert len(arguments["text"]) <= 4 and arguments["line"] in (1, 2)
