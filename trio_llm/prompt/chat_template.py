"""From messages or text to token ids.

Rendering runs a template that came with the model, in the sandbox that transformers
gives it, and so in a worker thread, where a slow one harms nobody.  The sandbox knows no
time limit: a template that never ends keeps its thread, though not its caller, who may be
cancelled.  So templates come with the model only, never with a request.  Nothing here
logs: what people write to a model is theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import attrs

from trio_llm.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESERVED_TEMPLATE_KWARGS = frozenset(
    [
        *("chat_template", "messages", "conversation", "conversations", "tools", "tokenize", "tokenizer_kwargs"),
        *("add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "self"),
        *("padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    ]
)
"""Names in `template_kwargs` that would change more than what the template reads."""


def _reserved(_: Any, __: Any, value: Mapping[str, Any]) -> None:
    taken = sorted(RESERVED_TEMPLATE_KWARGS & value.keys())
    if taken:
        message = f"chat_template_kwargs must not set {taken[0]!r}; it is no variable of the template"
        raise InvalidRequest(message, field="chat_template_kwargs")


@attrs.frozen
class Conversation:
    """Messages and what else a chat template is given.

    Raises:
        InvalidRequest: `add_generation_prompt` and `continue_final_message` are both set, or
            `template_kwargs` has a name that is not the template's to read.
    """

    messages: Sequence[Mapping[str, Any]]
    """As OpenAI has them: role, content (a string, a list of text parts, or None), and `name`,
    `tool_calls`, `tool_call_id`, `reasoning_content` where there are any."""
    tools: Sequence[Mapping[str, Any]] = ()
    """As OpenAI has them: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""
    add_generation_prompt: bool = True
    """End with the header of the assistant's turn."""
    continue_final_message: bool = False
    """Leave the last message open, so that the model goes on with it."""
    reasoning_effort: str | None = None
    """Given to the template under that name; "none" asks it for no reasoning at all."""
    template_kwargs: Mapping[str, Any] = attrs.field(factory=dict, validator=_reserved)
    """Further variables of the template."""

    def __attrs_post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            message = "continue_final_message goes on with the last message, so add_generation_prompt must be false"
            raise InvalidRequest(message, field="continue_final_message")


def as_conversation(prompt: Conversation | Sequence[Mapping[str, Any]]) -> Conversation:
    """A conversation, or plain messages as one."""
    return prompt if isinstance(prompt, Conversation) else Conversation(prompt)


def render_chat(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation | Sequence[Mapping[str, Any]]
) -> list[int]:
    """The token ids of a conversation, as the model's chat template writes it.

    The template alone decides on special tokens: a BOS that it writes is not doubled,
    and where it writes none there is none, as with transformers.

    Raises:
        InvalidRequest: there is no template, or it refuses the messages (`field` is
            "messages" and the words are the template's), or it knows no tools (`field` is
            "tools").
    """
    return list(tokenizer.encode(render_text(tokenizer, conversation), add_special_tokens=False))


def render_text(tokenizer: PreTrainedTokenizerBase, conversation: Conversation | Sequence[Mapping[str, Any]]) -> str:
    """The text of a conversation; `render_chat` before it is tokenised."""
    conversation = as_conversation(conversation)
    if not tokenizer.chat_template:
        raise InvalidRequest(
            "this model has no chat template, so it cannot take messages; use a completion with a prompt instead",
            field="messages",
        )
    template = template_of(tokenizer)
    if conversation.tools and not template.mentions("tools"):
        raise InvalidRequest("the chat template of this model takes no tools", field="tools")
    messages = [template.message(message, index) for index, message in enumerate(conversation.messages)]
    return _render(
        tokenizer,
        messages,
        tools=[dict(tool) for tool in conversation.tools] or None,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        **{**template.reasoning_variables(conversation.reasoning_effort), **conversation.template_kwargs},
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The token ids of a plain prompt, with the special tokens that the tokenizer adds of itself."""
    return list(tokenizer.encode(text))


# --- what a template takes ---

_PROBE = "chat-template-probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "key"}}},
    },
}


@attrs.frozen
class Template:
    """A chat template and what was found out about it by trying."""

    source: str
    content: Literal["string", "parts"]
    """Whether it writes contents that are strings, or only lists of parts."""
    arguments: Literal["object", "text"]
    """Whether it writes the arguments of a call from an object, or only from JSON text."""
    written_call: str
    """How it writes a call of `probe` with the arguments {"key": "chat-template-probe"}; empty if it does not."""

    def mentions(self, name: str) -> bool:
        """Whether its source has this word."""
        return re.search(rf"\b{name}\b", self.source) is not None

    def message(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        """A message in the form that the template takes."""
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{index}] is no message but a {type(message).__name__}", field="messages")
        taken = {**message, "content": self._content(message.get("content"), index)}
        # A template that writes whatever role it is given writes this one too, but the model has not
        # learnt it; so what counts is whether the template speaks of it.
        if message.get("role") == "developer" and not self.mentions("developer"):
            taken["role"] = "system"
        if message.get("tool_calls"):
            calls = enumerate(message["tool_calls"])
            taken["tool_calls"] = [
                self._call(call, f"messages[{index}].tool_calls[{number}]") for number, call in calls
            ]
        says_more = message.get("tool_calls") or message.get("reasoning_content")
        if taken["content"] is None and message.get("role") == "assistant" and says_more:
            # transformers leaves a None out, and many templates add to the content unasked
            taken["content"] = self._content("", index)
        return taken

    def reasoning_variables(self, effort: str | None) -> dict[str, Any]:
        """What stands for `reasoning_effort` in this template."""
        if effort is None:
            return {}
        switch = {"enable_thinking": effort != "none"} if self.mentions("enable_thinking") else {}
        return {"reasoning_effort": effort, **switch}

    def _content(self, content: Any, index: int) -> Any:
        if isinstance(content, str) and self.content == "parts":
            return [{"type": "text", "text": content}]
        if not isinstance(content, list | tuple):
            return content
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise InvalidRequest(
                    f"messages[{index}].content: only text parts are supported, got {kind!r}", field="messages"
                )
        if self.content == "parts":
            return [dict(part) for part in content]
        return "\n".join(part["text"] for part in content)

    def _call(self, call: Any, where: str) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where} must have a function with a name", field=f"{where}.function")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _object(arguments)
        if not isinstance(arguments, Mapping):
            field = f"{where}.function.arguments"
            raise InvalidRequest(f"{field} must be the JSON text of an object", field=field)
        written = dict(arguments) if self.arguments == "object" else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": written}}


_templates: WeakKeyDictionary[PreTrainedTokenizerBase, Template] = WeakKeyDictionary()


def template_of(tokenizer: PreTrainedTokenizerBase) -> Template:
    """What is known about a tokenizer's chat template; tried out when it is first asked for."""
    source = str(tokenizer.chat_template)
    known = _templates.get(tokenizer)
    if known is None or known.source != source:
        known = _templates[tokenizer] = _try_out(tokenizer, source)
    return known


def _try_out(tokenizer: PreTrainedTokenizerBase, source: str) -> Template:
    """A template made for parts writes nothing of a string; one made for strings fails on parts,
    or writes them as Python would.  The same holds for arguments."""
    parts = [{"type": "text", "text": _PROBE}]
    of_string = _attempt(tokenizer, [{"role": "user", "content": _PROBE}])
    of_parts = _attempt(tokenizer, [{"role": "user", "content": parts}])
    content: Literal["string", "parts"] = "parts" if _PROBE not in of_string and _PROBE in of_parts else "string"
    template = Template(source, content, "object", "")
    if not template.mentions("tool_calls"):
        return template
    forms: tuple[Literal["object", "text"], ...] = ("object", "text")
    for form in forms:
        template = Template(source, content, form, "")
        written = _attempt_call(tokenizer, template)
        if _PROBE in written and "{'" not in written:
            return attrs.evolve(template, written_call=written)
    return attrs.evolve(template, arguments="object")


def _attempt_call(tokenizer: PreTrainedTokenizerBase, template: Template) -> str:
    """A call as the template writes it, without what comes before."""
    asked = [template.message({"role": "user", "content": "probe"}, 0)]
    # some templates take ids of nine letters only
    call = {"id": "probe1234", "type": "function", "function": {"name": "probe", "arguments": {"key": _PROBE}}}
    called = template.message({"role": "assistant", "content": None, "tool_calls": [call]}, 1)
    before = _attempt(tokenizer, asked, tools=[_PROBE_TOOL])
    written = _attempt(tokenizer, [*asked, called], tools=[_PROBE_TOOL])
    # up to the header of the turn both are the same, mostly; what differs begins somewhere before the call
    same = next((at for at, pair in enumerate(zip(before, written, strict=False)) if pair[0] != pair[1]), len(before))
    return written[same:]


def _attempt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str:
    try:
        return _render(tokenizer, messages, add_generation_prompt=False, **options)
    except InvalidRequest:
        return ""


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except TemplateError as error:  # its own raise_exception, or something it needs is not there
        reason = error.message or type(error).__name__
    except Exception as error:  # a template is a program; whatever stops it, it was on these messages
        reason = str(error) if isinstance(error, TypeError | ValueError) else type(error).__name__
        # transformers quotes the whole conversation here
        reason = reason.partition("Final message to continue:")[0]
    raise InvalidRequest(f"the model's chat template does not accept these messages: {reason}", field="messages")


def _object(text: str) -> Any:
    """What a JSON text says; None if it is none."""
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return None
