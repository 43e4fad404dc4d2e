"""Texts that are there all at once."""

from __future__ import annotations

from trio_llm.prompt.events import Message, collect
from trio_llm.prompt.output_parser import OutputParser


def read_whole(parser: OutputParser, text: str) -> Message:
    """What a parser makes of a text, by the way that streams go."""
    return collect([*parser.push(text), *parser.finish()])
