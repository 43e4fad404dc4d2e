"""Structured output of a model that reasons first: the form is that of the answer alone."""

from __future__ import annotations

import json
import re

from trio_llm.core.sampling_params import StructuredOutput
from trio_llm.prompt.reasoning import ReasoningFormat

_WORDS = re.compile(r"""//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?<![\w%@])start\b""")
"""Comments, strings and expressions, to leave alone, and the name of the first rule."""
_IN_EXPRESSION = re.compile(r"\\.|/|\n", re.DOTALL)


def after_reasoning(
    structure: StructuredOutput, reasoning: ReasoningFormat, *, inside: bool = False
) -> StructuredOutput:
    """The same structured output, with reasoning of any form before it.

    Args:
        inside: whether the answer begins inside of the reasoning, so that this must come to its
            end; otherwise there may be none.
    """
    begin, end = reasoning.markers
    answer = _answer(structure)
    if reasoning.end_token_id is None:
        thoughts = f"reasoning__thoughts[lazy]: /(.|\\n)*/ {json.dumps(end)}"
    else:
        thoughts = f"reasoning__thoughts: /(.|\\n)*/ <[{reasoning.end_token_id}]>"
    opening = json.dumps(begin) if reasoning.begin_token_id is None else f"<[{reasoning.begin_token_id}]>"
    line_ends = r"/\n{0,2}/"
    first = "reasoning__thoughts" if inside else f"({opening} reasoning__thoughts"
    last = line_ends if inside else f"{line_ends})?"
    return StructuredOutput("lark", f"{answer}\n{thoughts}\nstart: {first} {last} reasoning__answer\n")


def _answer(structure: StructuredOutput) -> str:
    """Rules of which `reasoning__answer` is the first."""
    match structure.kind:
        case "lark":
            return _WORDS.sub(lambda found: "reasoning__answer" if found[0] == "start" else found[0], structure.value)
        case "json_object":
            body = '%json {"type": "object"}'
        case "json_schema":
            schema = json.loads(structure.value)
            # llguidance's options, which are the engine's affair
            schema.pop("x-guidance", None)
            body = f"%json {json.dumps(schema)}"
        case "regex":
            body = f"/{_IN_EXPRESSION.sub(_escaped, structure.value)}/"
        case "choice":
            body = " | ".join(json.dumps(text) for text in json.loads(structure.value))
    return f"reasoning__answer: {body}"


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])
