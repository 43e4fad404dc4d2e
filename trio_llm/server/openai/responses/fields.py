"""Which field of the Responses API is supported, accepted or refused."""

from __future__ import annotations

from collections.abc import Mapping

from trio_llm.server.openai.fields import Table, accepted, refused, supported
from trio_llm.server.openai.limits import (
    MAX_ENTRIES,
    MAX_METADATA,
    MAX_TOOLS,
    check_boolean,
    check_free_form,
    check_identifier,
    check_kind,
    check_metadata,
)


def _check_string(value: object, path: str) -> None:
    check_kind(value, path, str)


def _check_array(value: object, path: str) -> None:
    check_kind(value, path, list)


INPUT_PART: Table = {
    "type": supported(remark="`input_text`, `output_text` or `refusal`."),
    "text": supported(),
    "refusal": supported(remark="Given to the model as text."),
    # what a message of an answer carries when it comes back
    "annotations": accepted(check=_check_array),
    "logprobs": accepted(check=_check_array),
    "image_url": refused(),
    "file_id": refused(),
    "file_data": refused(),
    "detail": refused(neutral=("auto",)),
}
"""An entry of an item's `content`, and of a function's `output`."""

_ITEM: Table = {
    "type": accepted(check=_check_string),
    "id": accepted(check=_check_string),
    "status": accepted(check=_check_string),
}

MESSAGE: Table = {
    **_ITEM,
    "role": supported(remark="`user`, `assistant`, `system` or `developer`."),
    "content": supported(remark="A string, or an array of parts.", table=INPUT_PART),
    "phase": accepted(check=_check_string),
}
"""An item of the type `message`, which is also that of an item without a type."""

FUNCTION_CALL: Table = {
    **_ITEM,
    "call_id": supported(),
    "name": supported(),
    "arguments": supported(remark="JSON text of an object."),
    "namespace": refused(),
    "caller": refused(neutral=({"type": "direct"},)),
}
"""An item of the type `function_call`."""

FUNCTION_CALL_OUTPUT: Table = {
    **_ITEM,
    "call_id": supported(),
    "output": supported(remark="A string, or an array of parts.", table=INPUT_PART),
    "name": accepted(check=_check_string),
}
"""An item of the type `function_call_output`."""

REASONING: Table = {
    **_ITEM,
    "content": supported(
        remark="Given to the template with the message that follows.",
        table={"type": accepted(check=_check_string), "text": supported()},
    ),
    "summary": refused(neutral=([],)),
    "encrypted_content": refused(),
}
"""An item of the type `reasoning`."""

ITEMS: Mapping[str, Table] = {
    "message": MESSAGE,
    "function_call": FUNCTION_CALL,
    "function_call_output": FUNCTION_CALL_OUTPUT,
    "reasoning": REASONING,
}
"""By type; others are refused."""

TOOL: Table = {
    "type": supported(remark="`function`."),
    "name": supported(remark="From 1 to 64 letters, digits, `_` and `-`."),
    "description": supported(),
    "parameters": supported(remark="A JSON schema of an object.", check=check_free_form),
    "strict": supported(remark="A call that is required is held to the schema whether this is true or false."),
}
"""An entry of `tools`."""

FORMAT: Table = {
    "type": supported(remark="`text`, `json_object` or `json_schema`."),
    "name": supported(remark="From 1 to 64 letters, digits, `_` and `-`."),
    "schema": supported(check=check_free_form),
    "strict": supported(remark="The schema is enforced whether this is true or false."),
    "description": supported(remark="Not shown to the model."),
}
"""`text.format`."""

TEXT: Table = {
    "format": supported(table=FORMAT),
    "verbosity": refused(neutral=("medium",)),
}
"""`text`."""

REASONING_OPTIONS: Table = {
    "effort": supported(remark="Given to the template, which may know nothing of it."),
    "summary": refused(neutral=("none",)),
    "generate_summary": refused(),
}
"""`reasoning`."""

STREAM_OPTIONS: Table = {
    "include_obfuscation": accepted(
        remark="Padding against an observer's guesses; there is none.", check=check_boolean
    ),
}
"""`stream_options`."""

RESPONSE: Table = {
    "model": supported(remark="A served name."),
    "input": supported(remark=f"A text, or up to {MAX_ENTRIES} items."),
    "instructions": supported(remark="Of this response alone: a system message before all others."),
    "previous_response_id": supported(remark="Of a response that is stored; its input and output come before `input`."),
    "store": supported(
        remark="Null and true keep the response in memory, among the last `--max-stored-responses`; with 0 of them true "
        "is refused."
    ),
    "max_output_tokens": supported(remark="Null is `--default-max-tokens`, else the rest of the context."),
    "temperature": supported(remark="From 0 (greedy) to 2; null is the model's own default, as for `top_p`."),
    "top_p": supported(remark="Above 0, at most 1."),
    "top_logprobs": supported(remark="From 0 to 20."),
    "include": supported(remark="`message.output_text.logprobs`; others are refused."),
    "text": supported(table=TEXT),
    "tools": supported(
        remark=f"Up to {MAX_TOOLS} functions, for models whose syntax of calls is known.", table=TOOL, most=MAX_TOOLS
    ),
    "tool_choice": supported(
        remark="`none`, `auto`, `required`, a function, or `allowed_tools`.", check=check_free_form
    ),
    "parallel_tool_calls": supported(remark="False: at most one call."),
    "reasoning": supported(table=REASONING_OPTIONS),
    "truncation": supported(remark="`auto` drops the oldest turns of what is too long, but no system message."),
    "metadata": supported(remark=f"Up to {MAX_METADATA} strings, which come back.", check=check_metadata),
    "stream": supported(),
    "stream_options": supported(table=STREAM_OPTIONS),
    "seed": supported(remark="Ours, as the next seven: see chat completions."),
    "top_k": supported(),
    "min_p": supported(),
    "repetition_penalty": supported(),
    "priority": supported(),
    "cache_salt": supported(check=check_identifier),
    "chat_template_kwargs": supported(check=check_free_form),
    "user": accepted(check=check_identifier),
    "safety_identifier": supported(remark="Comes back; it is not used otherwise.", check=check_identifier),
    "prompt_cache_key": supported(remark="Comes back; all prefixes are cached already.", check=check_identifier),
    "prompt_cache_retention": accepted(check=check_identifier),
    "service_tier": refused(neutral=("auto", "default")),
    "background": refused(neutral=(False,)),
    "conversation": refused(),
    "prompt": refused(),
    "max_tool_calls": refused(),
    "context_management": refused(),
    "moderation": refused(),
}
"""POST /v1/responses."""
