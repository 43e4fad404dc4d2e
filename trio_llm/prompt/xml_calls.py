"""Calls as elements of XML: `<function=weather><parameter=city>Bern</parameter></function>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trio_llm.prompt.incremental import Steps
from trio_llm.prompt.tool_parsers import ToolParser
from trio_llm.prompt.untyped_values import as_json, kinds_of

_PARAMETER_NAME = re.compile(r"[^<>\n]*")


class Qwen3CoderParser(ToolParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, of Qwen 3 Coder and 3.5.

    A call is whole or none at all, so its arguments are never streamed.
    """

    def _parse(self) -> Steps[None]:
        opening, closing = "<tool_call>", "</tool_call>"
        while (yield from self._until(opening)):
            at = yield from self._after(len(opening))
            heads = {f"<function={name}>": name for name in self._tools}
            head = yield from self._starts(at, *heads)
            if not head:
                self._take_text(len(opening))
                continue
            end, arguments = yield from self._parameters(at + len(head), self._schemas.get(heads[head]))
            if arguments is None:
                self._take_text(end)
                continue
            self._start(heads[head])
            self._give(arguments)
            self._drop(end)
            at = yield from self._after(0)
            if (yield from self._starts(at, closing)):
                self._drop(at + len(closing))

    def _parameters(self, at: int, schema: Any) -> Steps[tuple[int, str | None]]:
        """Read parameters from `at` on; gives where they end and, if they are well formed, the arguments."""
        root = schema if isinstance(schema, Mapping) else {}
        properties = root.get("properties")
        members: dict[str, str] = {}
        while True:
            at = yield from self._after(at)
            tag = yield from self._starts(at, "<parameter=", "</function>")
            start = at + len(tag)
            if tag == "</function>":
                pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items())
                return start, f"{{{', '.join(pairs)}}}"
            if not tag:
                return at, None
            at = yield from self._after(start, _PARAMETER_NAME)
            key = self._buffer[start:at]
            if not key or key in members or not (yield from self._starts(at, ">")):
                return at, None
            # a value stands on lines of its own, and whatever else is in them belongs to it
            line_end = yield from self._starts(at + 1, "\n")
            start, ending = at + 1 + len(line_end), f"{line_end}</parameter>"
            at = yield from self._find(ending, at + 1)
            if at < 0:
                return len(self._buffer), None
            kinds = kinds_of(properties.get(key) if isinstance(properties, Mapping) else None, root)
            members[key] = as_json(self._buffer[start:at], kinds)
            at += len(ending)
