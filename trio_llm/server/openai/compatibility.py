"""docs/openai_compatibility.md, made of the field tables: `python -m trio_llm.server.openai.compatibility`."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import orjson

from trio_llm.server.openai import fields, text_fields
from trio_llm.server.openai.responses import fields as responses

TABLES: dict[str, tuple[str, fields.Table]] = {
    "POST /v1/chat/completions": ("", fields.CHAT),
    "POST /v1/completions": ("", fields.COMPLETION),
    "An entry of `messages`": ("messages[].", fields.MESSAGE),
    "An entry of a message's `content`": ("messages[].content[].", fields.CONTENT_PART),
    "An entry of a message's `tool_calls`": ("messages[].tool_calls[].", fields.TOOL_CALL),
    "`function` of a tool call, and `function_call`": ("messages[].function_call.", fields.FUNCTION_CALL),
    "An entry of `tools`": ("tools[].", fields.TOOL),
    "`function` of an entry of `tools`": ("tools[].function.", fields.FUNCTION),
    "`stream_options`": ("stream_options.", fields.STREAM_OPTIONS),
    "`response_format`": ("response_format.", fields.RESPONSE_FORMAT),
    "`response_format.json_schema`": ("response_format.json_schema.", fields.JSON_SCHEMA),
    "`structured_outputs`": ("structured_outputs.", fields.STRUCTURED_OUTPUTS),
}
"""By their headings, each with the path of its object in a body."""

RESPONSE_TABLES: dict[str, tuple[str, fields.Table]] = {
    "POST /v1/responses": ("", responses.RESPONSE),
    "An item of `input` of type `message`, or of none": ("input[].", responses.MESSAGE),
    "An item of `input` of type `function_call`": ("input[].", responses.FUNCTION_CALL),
    "An item of `input` of type `function_call_output`": ("input[].", responses.FUNCTION_CALL_OUTPUT),
    "An item of `input` of type `reasoning`": ("input[].", responses.REASONING),
    "An entry of an item's `content` or `output`": ("input[].content[].", responses.INPUT_PART),
    "An entry of `tools` of a response": ("tools[].", responses.TOOL),
    "`text` of a response": ("text.", responses.TEXT),
    "`text.format` of a response": ("text.format.", responses.FORMAT),
    "`reasoning` of a response": ("reasoning.", responses.REASONING_OPTIONS),
    "`stream_options` of a response": ("stream_options.", responses.STREAM_OPTIONS),
}
"""The same of the Responses API."""

TEXT_TABLES: dict[str, tuple[str, fields.Table]] = {
    "POST /v1/embeddings": ("", text_fields.EMBEDDING),
    "POST /tokenize": ("", text_fields.TOKENIZE),
    "POST /detokenize": ("", text_fields.DETOKENIZE),
}
"""Of the endpoints that generate nothing."""

_HEAD = """# The OpenAI API, field by field

<!-- Made by `python -m trio_llm.server.openai.compatibility`; a test compares. -->

* **supported**: it does what the API says.
* **accepted**: any value of its type passes, and asks for nothing that a server of one's own could do.
* **rejected**: a 400 with the code `unsupported_parameter` that names it, unless the value is null or asks for nothing.
  With `--compat lenient` it is ignored, and one line of the log names all that a request had ignored.

A field that is not listed is unknown: a 400 with the code `unknown_parameter`, or ignored with `--compat lenient`.
Whose field it is stands in its remark; the others are OpenAI's. Fields of ours do nothing unless a request has them.
"""


def render() -> str:
    """The text of the document."""
    return document(_HEAD, TABLES | RESPONSE_TABLES | TEXT_TABLES)


def document(head: str, tables: Mapping[str, tuple[str, fields.Table]]) -> str:
    """A document of field tables.

    Args:
        tables: by their headings, each with the path of its object in a body.
    """
    parts = [head]
    for title, (_, table) in tables.items():
        rows = [f"| `{name}` | {_treatment(field)} | {_remark(field)} |" for name, field in table.items()]
        parts.append("\n".join([f"## {title}", "", "| Field | | |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _treatment(field: fields.Field) -> str:
    return "rejected" if field.treatment == "refused" else field.treatment


def _remark(field: fields.Field) -> str:
    passing = ", ".join(f"`{orjson.dumps(value).decode()}`" for value in field.neutral)
    return " ".join(part for part in (field.remark, f"Passes: {passing}." if passing else "") if part)


if __name__ == "__main__":
    sys.stdout.write(render())
