"""From messages or text to token ids.

Rendering runs a template that came with the model, in the sandbox that transformers
gives it, and so in a worker thread, where a slow one harms nobody.  Nothing here logs:
what people write to a model is theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from trio_llm.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ContentFormat = Literal["string", "parts"]

_PROBE = "content-format-probe"
_content_formats: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, ContentFormat]] = WeakKeyDictionary()


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> list[int]:
    """The token ids of a conversation, as the model's chat template writes it.

    The template alone decides on special tokens: a BOS that it writes is not doubled,
    and where it writes none there is none, as with transformers.

    Args:
        messages: of role and content; content is a string or a list of text parts.
        add_generation_prompt: end with the header of the assistant's turn.

    Raises:
        InvalidRequest: there is no template, or it refuses the messages; `field` is
            "messages" and the words are the template's.
    """
    if not tokenizer.chat_template:
        raise InvalidRequest(
            "this model has no chat template, so it cannot take messages; use a completion with a prompt instead",
            field="messages",
        )
    wanted = _content_format(tokenizer)
    conversation = [_with_content_as(wanted, message, index) for index, message in enumerate(messages)]
    text = _render(tokenizer, conversation, add_generation_prompt=add_generation_prompt)
    return list(tokenizer.encode(text, add_special_tokens=False))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The token ids of a plain prompt, with the special tokens that the tokenizer adds of itself."""
    return list(tokenizer.encode(text))


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
    except TemplateError as error:  # its own raise_exception, or something it needs is not there
        reason = error.message or type(error).__name__
    except Exception as error:  # a template is a program; whatever stops it, it was on these messages
        reason = str(error) if isinstance(error, TypeError | ValueError) else type(error).__name__
    raise InvalidRequest(f"the model's chat template does not accept these messages: {reason}", field="messages")


def _content_format(tokenizer: PreTrainedTokenizerBase) -> ContentFormat:
    """Whether the template writes contents that are strings, or only lists of parts.

    It is tried out: a template made for parts writes nothing of a string, one made for
    strings fails on parts or writes them as Python would.
    """
    template = str(tokenizer.chat_template)
    known = _content_formats.get(tokenizer)
    if known is None or known[0] != template:
        found: ContentFormat = "string"
        if not _writes(tokenizer, _PROBE) and _writes(tokenizer, [{"type": "text", "text": _PROBE}]):
            found = "parts"
        known = _content_formats[tokenizer] = (template, found)
    return known[1]


def _writes(tokenizer: PreTrainedTokenizerBase, content: Any) -> bool:
    try:
        text = _render(tokenizer, [{"role": "user", "content": content}], add_generation_prompt=False)
    except InvalidRequest:
        return False
    return _PROBE in text


def _with_content_as(wanted: ContentFormat, message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message whose content has the form that the template takes."""
    content = message.get("content")
    if isinstance(content, str) and wanted == "parts":
        return {**message, "content": [{"type": "text", "text": content}]}
    if not isinstance(content, list | tuple):
        return dict(message)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(
                f"messages[{index}].content: only text parts are supported, got {kind!r}", field="messages"
            )
    if wanted == "parts":
        return {**message, "content": [dict(part) for part in content]}
    return {**message, "content": "\n".join(part["text"] for part in content)}
