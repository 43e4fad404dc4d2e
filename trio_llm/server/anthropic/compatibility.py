"""docs/anthropic_compatibility.md, made of the field tables: `python -m trio_llm.server.anthropic.compatibility`."""

from __future__ import annotations

import sys

from trio_llm.server.anthropic import fields
from trio_llm.server.openai.compatibility import document
from trio_llm.server.openai.fields import Table

TABLES: dict[str, tuple[str, Table]] = {
    "POST /v1/messages": ("", fields.MESSAGES),
    "POST /v1/messages/count_tokens": ("", fields.COUNT_TOKENS),
    "An entry of `messages`": ("messages[].", fields.MESSAGE),
    "An entry of a message's `content`": ("messages[].content[].", fields.INPUT_BLOCK),
    "An entry of a tool result's `content`": ("messages[].content[].content[].", fields.RESULT_BLOCK),
    "An entry of `system`": ("system[].", fields.SYSTEM_BLOCK),
    "An entry of `tools`": ("tools[].", fields.TOOL),
    "`tool_choice`": ("tool_choice.", fields.TOOL_CHOICE),
    "`thinking`": ("thinking.", fields.THINKING),
    "`output_config`": ("output_config.", fields.OUTPUT_CONFIG),
    "`output_config.format`": ("output_config.format.", fields.OUTPUT_FORMAT),
}
"""By their headings, each with the path of its object in a body."""

_HEAD = """# Anthropic's Messages API, field by field

<!-- Made by `python -m trio_llm.server.anthropic.compatibility`; a test compares. -->

* **supported**: it does what the API says.
* **accepted**: any value of its type passes, and changes nothing; the remark says why.
* **rejected**: a 400 that names it, unless the value is null or asks for nothing.
  With `--compat lenient` it is ignored, and one line of the log names all that a request had ignored.

A field that is not listed is unknown: a 400, or ignored with `--compat lenient`. Blocks of other types than those that
are named, images and documents among them, are a 400 in either mode, and so are tools that the server would have to run.
"""


def render() -> str:
    """The text of the document."""
    return document(_HEAD, TABLES)


if __name__ == "__main__":
    sys.stdout.write(render())
