"""Which field of the Messages API is supported, accepted or refused; see `trio_llm.server.openai.fields`."""

from __future__ import annotations

from trio_llm.server.openai.fields import Table, accepted, refused, supported
from trio_llm.server.openai.limits import (
    MAX_ENTRIES,
    MAX_TOOLS,
    check_boolean,
    check_count,
    check_free_form,
    check_object,
    check_text,
)

_CACHE_CONTROL = accepted(remark="All prefixes are cached, asked for or not.", check=check_object)

SYSTEM_BLOCK: Table = {
    "type": supported(remark="`text`."),
    "text": supported(),
    "cache_control": _CACHE_CONTROL,
    "citations": refused(neutral=([],)),
}
"""An entry of `system`."""

RESULT_BLOCK: Table = {
    "type": supported(remark="`text`."),
    "text": supported(),
    "cache_control": _CACHE_CONTROL,
    "citations": refused(neutral=([], {"enabled": False})),
    "source": refused(),
    "title": refused(),
    "context": refused(),
    "tool_name": refused(),
}
"""An entry of a tool result's `content`."""

INPUT_BLOCK: Table = {
    "type": supported(remark="`text`, `thinking`, `redacted_thinking`, `tool_use` and `tool_result`."),
    "text": supported(),
    "thinking": supported(remark="Of an earlier answer, given to the template."),
    "signature": accepted(remark="Ours are empty, and none is verified.", check=check_text),
    "data": accepted(remark="Of redacted thinking, which nobody here can read.", check=check_text),
    "id": supported(remark="Of a `tool_use`."),
    "name": supported(remark="Of a `tool_use`."),
    "input": supported(remark="Of a `tool_use`.", check=check_free_form),
    "caller": accepted(remark="Who called: the model.", check=check_object),
    "tool_use_id": supported(remark="Of a `tool_result`."),
    "content": supported(remark="Of a `tool_result`: a string, or an array of text blocks.", table=RESULT_BLOCK),
    "is_error": supported(remark="Of a `tool_result`. True: the model reads `Error: ` before the content."),
    "cache_control": _CACHE_CONTROL,
    "citations": refused(neutral=([], {"enabled": False})),
    "source": refused(),
    "title": refused(),
    "context": refused(),
    "toolset_name": refused(),
    "file_id": refused(),
}
"""An entry of a message's `content`."""

MESSAGE: Table = {
    "role": supported(remark="`user`, `assistant` or `system`. Neighbours of one role are one turn."),
    "content": supported(remark="A string, or an array of blocks.", table=INPUT_BLOCK),
}
"""An entry of `messages`."""

TOOL: Table = {
    "name": supported(remark="From 1 to 64 letters, digits, `_` and `-`."),
    "description": supported(),
    "input_schema": supported(remark="A JSON schema of an object.", check=check_free_form),
    "type": supported(remark="`custom`: there are no tools of the server's."),
    "strict": supported(remark="As in a chat completion."),
    "cache_control": _CACHE_CONTROL,
    "eager_input_streaming": accepted(remark="Input is streamed when it is certain.", check=check_boolean),
    "allowed_callers": refused(neutral=(["direct"],)),
    "defer_loading": refused(neutral=(False,)),
    "input_examples": refused(neutral=([],)),
}
"""An entry of `tools`."""

TOOL_CHOICE: Table = {
    "type": supported(remark="`auto`, `any`, `tool` or `none`; a call that must come is enforced."),
    "name": supported(remark="For `tool`."),
    "disable_parallel_tool_use": supported(remark="At most one call."),
}
"""`tool_choice`."""

THINKING: Table = {
    "type": supported(
        remark="`enabled` and `adaptive` turn on the switch `enable_thinking` of the chat template, `disabled` turns "
        "it off. A template without that switch is not changed by it."
    ),
    "budget_tokens": accepted(remark="Not enforced: nothing but `max_tokens` limits thinking.", check=check_count),
    "display": refused(neutral=("summarized",), remark="Thinking is told as it is."),
}
"""`thinking`."""

OUTPUT_FORMAT: Table = {
    "type": supported(remark="`json_schema`."),
    "schema": supported(remark="The whole text is held to it.", check=check_free_form),
}
"""`output_config.format`."""

OUTPUT_CONFIG: Table = {
    "effort": supported(remark="Given to the template as `reasoning_effort`."),
    "format": supported(table=OUTPUT_FORMAT),
}
"""`output_config`."""

_READ: Table = {
    "model": supported(remark="A served name."),
    "messages": supported(
        remark=f"From 1 to {MAX_ENTRIES}. The answer goes on with a last one of the assistant's.", table=MESSAGE
    ),
    "system": supported(remark="A string, or an array of text blocks.", table=SYSTEM_BLOCK),
    "tools": supported(
        remark=f"Up to {MAX_TOOLS}, for models whose template takes tools and whose syntax of calls is known.",
        table=TOOL,
        most=MAX_TOOLS,
    ),
    "tool_choice": supported(table=TOOL_CHOICE),
    "thinking": supported(remark="Without it, the model does as it does.", table=THINKING),
    "output_config": supported(table=OUTPUT_CONFIG),
    "cache_control": _CACHE_CONTROL,
    "speed": refused(neutral=("standard",)),
    "mcp_servers": refused(neutral=([],)),
    "context_management": refused(),
}

COUNT_TOKENS: Table = _READ
"""POST /v1/messages/count_tokens."""

MESSAGES: Table = {
    **_READ,
    "max_tokens": supported(remark="At least 1; together with the prompt, at most the context."),
    "stop_sequences": supported(remark="Up to 4, not empty; the text ends before it."),
    "temperature": supported(remark="From 0 (greedy) to 1; null is the model's own default, as for the next two."),
    "top_p": supported(remark="Above 0, at most 1."),
    "top_k": supported(remark="0 keeps all."),
    "stream": supported(),
    "metadata": accepted(remark="Nothing is kept for each user.", check=check_object),
    "service_tier": refused(neutral=("auto", "standard_only"), remark="There is one tier."),
    "container": refused(),
    "inference_geo": refused(),
    "diagnostics": refused(),
}
"""POST /v1/messages."""
