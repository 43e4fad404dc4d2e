"""JSON of a form, or tool calls: what a model may say that is given both a form and tools."""

from __future__ import annotations

import json
import re

from trio_llm.core.sampling_params import StructuredOutput
from trio_llm.errors import InvalidRequest

_START = re.compile(r"^start:", re.MULTILINE)


def answer_or_calls(answer: StructuredOutput, calls: StructuredOutput) -> StructuredOutput:
    """The grammar of a text that is one or the other.

    Args:
        answer: a JSON schema, or any JSON object.
        calls: of `tool_grammar`, where a call is required.

    Raises:
        InvalidRequest: the answer has another form; `field` is "tools".
    """
    if answer.kind not in ("json_schema", "json_object"):
        raise InvalidRequest("of structured outputs, only JSON goes with tools", field="tools")
    schema = json.loads(answer.value) if answer.kind == "json_schema" else {"type": "object"}
    # llguidance's options, which are the engine's affair
    schema.pop("x-guidance", None)
    rules = _START.sub("either__calls:", calls.value)
    source = f"{rules}\neither__answer: %json {json.dumps(schema)}\nstart: either__answer | either__calls\n"
    return StructuredOutput("lark", source)
