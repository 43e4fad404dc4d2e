"""Tools and reasoning: what a request lets its model call, and how the text of an answer is to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import trio

from trio_llm.config import ServerSettings
from trio_llm.core.sampling_params import StructuredOutput
from trio_llm.engine.engine import Engine
from trio_llm.engine.generation import Generation
from trio_llm.errors import UnsupportedParameter
from trio_llm.prompt.answer_or_calls import answer_or_calls
from trio_llm.prompt.chat_template import Conversation, template_of
from trio_llm.prompt.output_parser import OutputParser
from trio_llm.prompt.reasoning import ReasoningFormat, reasoning_format
from trio_llm.prompt.reasoning_grammar import after_reasoning
from trio_llm.prompt.tool_choice import ToolChoice, read_tool_choice, tool_grammar
from trio_llm.prompt.tool_formats import ToolFormat, tool_format
from trio_llm.server.openai.wire import ChatCompletionRequest, Tool


@attrs.frozen
class Formats:
    """How a model writes calls and reasoning; None where it does not, or it is not known how."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    takes_tools: bool = True
    """Whether the chat template can tell the model of tools."""


_known: WeakKeyDictionary[Engine, dict[tuple[str, str], Formats]] = WeakKeyDictionary()


async def formats_of(engine: Engine, settings: ServerSettings) -> Formats:
    """The formats of an engine's model; found out once, in a thread."""
    known = _known.setdefault(engine, {})
    names = settings.tool_call_parser, settings.reasoning_parser
    if names not in known:
        known[names] = await trio.to_thread.run_sync(_find, engine.tokenizer, *names)
    return known[names]


def _find(tokenizer: Any, tool_name: str, reasoning_name: str) -> Formats:
    takes_tools = bool(tokenizer.chat_template) and template_of(tokenizer).mentions("tools")
    return Formats(tool_format(tokenizer, tool_name), reasoning_format(tokenizer, reasoning_name), takes_tools)


@attrs.frozen(kw_only=True)
class Reading:
    """How the text of an answer is to be read."""

    tools: Sequence[Mapping[str, Any]] = ()
    """What the model is told of."""
    choice: ToolChoice = attrs.field(factory=ToolChoice)
    parallel: bool = True
    """Whether more than one call is to be told."""
    tool_format: ToolFormat | None = None
    """None: calls are not looked for."""
    reasoning_format: ReasoningFormat | None = None
    """None: reasoning is not looked for."""
    grammar: StructuredOutput | None = None
    """What holds the text to calls, where it does; it has the form of an answer in it, if there is one."""

    @property
    def is_plain(self) -> bool:
        """Whether the text is the answer as it is."""
        return self.tool_format is None and self.reasoning_format is None

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Special tokens that must stay in the text to be read."""
        formats = [self.tool_format, self.reasoning_format]
        return frozenset().union(*(each.special_token_ids for each in formats if each is not None))

    def parser(self, engine: Engine, generation: Generation) -> OutputParser:
        """What reads one choice."""
        reasoning, tools = self.reasoning_format, self.tool_format
        can_be_stopped = bool(generation.params.stop or generation.params.stop_token_ids)
        return OutputParser(
            None
            if reasoning is None
            else reasoning.parser(inside=reasoning.begins_inside(engine.tokenizer, generation.prompt_token_ids)),
            # where a grammar makes the calls, and nothing stops it, arguments need not be checked before they are told
            None
            if tools is None
            else tools.parser(
                self.choice.names,
                stream_arguments=self.grammar is not None and not can_be_stopped,
                schemas={tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools},
            ),
            reasoning_end_token_id=None if reasoning is None else reasoning.end_token_id,
        )


def reading(body: ChatCompletionRequest, formats: Formats, answer: StructuredOutput | None) -> Reading:
    """How the answer to a request is to be read.

    Args:
        answer: the form that an answer is held to, if it is no call.

    Raises:
        InvalidRequest: the tools, or what may be chosen of them, are wrong.
        UnsupportedParameter: the model is not known to call tools.
    """
    tools = [definition(tool) for tool in body.tools or ()]
    # without tools, "auto" and "none" ask for nothing
    wanted = None if not tools and body.tool_choice in ("auto", "none") else body.tool_choice
    choice = read_tool_choice(wanted, tools)
    if not choice.names:
        # a model that may call nothing is told of nothing
        return Reading(reasoning_format=formats.reasoning)
    if formats.tools is None:
        text = (
            "it is not known how this model writes tool calls; --tool-call-parser can name it"
            if formats.takes_tools
            else "this model takes no tools: its chat template does not know them"
        )
        raise UnsupportedParameter(text, field="tools")
    several = body.parallel_tool_calls
    grammar = tool_grammar(formats.tools, tools, choice, parallel=several)
    if answer is not None and not choice.is_required:
        forced = tool_grammar(formats.tools, tools, attrs.evolve(choice, is_required=True), parallel=several)
        assert forced is not None
        grammar = answer_or_calls(answer, forced)
    return Reading(
        tools=[told(tool) for tool in tools],
        choice=choice,
        parallel=several,
        tool_format=formats.tools,
        reasoning_format=formats.reasoning,
        grammar=grammar,
    )


async def form_of_text(
    answer: StructuredOutput | None, read: Reading, engine: Engine, prompt: Conversation
) -> StructuredOutput | None:
    """What the whole text is held to: the form of the answer, or of its calls, after any reasoning.

    Raises:
        InvalidRequest: it is larger than its limit.
    """
    form = answer if read.grammar is None else read.grammar
    if form is None or read.reasoning_format is None:
        return form
    # templates run in threads
    inside = await trio.to_thread.run_sync(read.reasoning_format.is_opened_by_template, engine.tokenizer, prompt)
    return after_reasoning(form, read.reasoning_format, inside=inside)


def definition(tool: Tool) -> dict[str, Any]:
    """A tool as the API has it, without what is null."""
    function = attrs.asdict(tool.function)
    return {"type": tool.type, "function": {name: value for name, value in function.items() if value is not None}}


def told(definition: dict[str, Any]) -> dict[str, Any]:
    """What a model is told of a function: whether it is strict is no affair of the model's."""
    function = {name: value for name, value in definition["function"].items() if name != "strict"}
    return {**definition, "function": function}
