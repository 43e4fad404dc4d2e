"""Which field of the API is supported, accepted or refused: one table for each object.

The tables are the truth: parsing is driven by them, docs/openai_compatibility.md is made of them
(see `compatibility`), and tests send each row.  A field that is not in its table is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import attrs

from trio_llm.server.openai.limits import (
    MAX_ENTRIES,
    MAX_IDENTIFIER,
    MAX_METADATA,
    MAX_TOOLS,
    check_boolean,
    check_free_form,
    check_identifier,
    check_index,
    check_metadata,
)

Check = Callable[[Any, str], None]
"""Takes a value and its path; raises InvalidRequest."""


@attrs.frozen(kw_only=True)
class Field:
    """How one field is treated."""

    treatment: Literal["supported", "accepted", "refused"]
    """supported: it does what the API says.  accepted: any value of its type passes and asks for
    nothing that a server of one's own could do.  refused: only values that ask for nothing pass."""
    remark: str = ""
    """For the documentation."""
    check: Check | None = None
    """Of a value that is not null, before anything is made of it."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that ask for nothing."""
    table: Table | None = None
    """Of the object that the value is, or of each object in the array that it is."""
    most: int = MAX_ENTRIES
    """Entries of such an array."""

    def is_neutral(self, value: Any) -> bool:
        """Whether a value asks for nothing.  0 and 0.0 are the same number, False is none."""
        return any(value == idle and isinstance(value, bool) == isinstance(idle, bool) for idle in self.neutral)


Table = Mapping[str, Field]

supported = partial(Field, treatment="supported")
accepted = partial(Field, treatment="accepted")
refused = partial(Field, treatment="refused")


STREAM_OPTIONS: Table = {
    "include_usage": supported(remark="A last chunk without choices has the usage of the whole request."),
    "continuous_usage_stats": supported(remark="vLLM's: every chunk has the usage so far. It needs `include_usage`."),
    "include_obfuscation": accepted(
        remark="Padding against an observer's guesses; there is none.", check=check_boolean
    ),
}
"""`stream_options`."""

JSON_SCHEMA: Table = {
    "name": supported(remark="From 1 to 64 letters, digits, `_` and `-`."),
    "schema": supported(remark="Without one, any JSON object.", check=check_free_form),
    "strict": supported(remark="The schema is enforced whether this is true or false."),
    "description": supported(remark="Not shown to the model."),
}
"""`response_format.json_schema`."""

RESPONSE_FORMAT: Table = {
    "type": supported(remark="`text`, `json_object` or `json_schema`."),
    "json_schema": supported(remark="For the type of that name.", table=JSON_SCHEMA),
}
"""`response_format`."""

STRUCTURED_OUTPUTS: Table = {
    "json": supported(remark="A schema, as an object or as text.", check=check_free_form),
    "json_object": supported(remark="Any JSON object."),
    "regex": supported(remark="Rust's syntax, without look-around; it matches the whole text."),
    "choice": supported(remark="One of these texts."),
    "grammar": supported(remark="llguidance's dialect of Lark."),
    "structural_tag": refused(),
    "disable_fallback": refused(neutral=(False,)),
    "disable_any_whitespace": refused(neutral=(False,)),
    "disable_additional_properties": refused(neutral=(False,)),
    "whitespace_pattern": refused(),
}
"""`structured_outputs`, which is vLLM's."""

_SAMPLING: Table = {
    "model": supported(remark="A served name."),
    "n": supported(remark="From 1 to 128."),
    "max_tokens": supported(
        remark="Null is `--default-max-tokens`, else the rest of the context; 0 only for completions."
    ),
    "min_tokens": supported(remark="vLLM's: no end before so many."),
    "stop": supported(remark="A string or up to 4, not empty; the text ends before it."),
    "stop_token_ids": supported(remark="vLLM's."),
    "ignore_eos": supported(remark="vLLM's: go on past the model's end tokens."),
    "include_stop_str_in_output": supported(remark="vLLM's: the text ends behind what stopped it."),
    "skip_special_tokens": supported(remark="vLLM's: false leaves special tokens in the text."),
    "seed": supported(remark="Same seed, same tokens, whoever else is in the batch. 64 bits."),
    "temperature": supported(remark="From 0 (greedy) to 2; null is the model's own default, as for the next five."),
    "top_p": supported(remark="Above 0, at most 1."),
    "top_k": supported(remark="vLLM's: 0 or -1 keeps all."),
    "min_p": supported(remark="vLLM's: from 0 to 1."),
    "typical_p": supported(remark="Above 0, at most 1."),
    "repetition_penalty": supported(remark="vLLM's: above 0; counts prompt and output."),
    "presence_penalty": supported(remark="From -2 to 2."),
    "frequency_penalty": supported(remark="From -2 to 2."),
    "logit_bias": supported(remark="Token ids to numbers from -100 to 100, up to 1024 of them."),
    "allowed_token_ids": supported(remark="vLLM's: no other token is chosen."),
    "bad_words": supported(remark="vLLM's: up to 1024 words that are never written."),
    "prompt_logprobs": supported(remark="vLLM's, from 0 to 20 and in its shape; not for streams."),
    "response_format": supported(
        remark="The whole text is held to it; a schema that cannot be is refused.", table=RESPONSE_FORMAT
    ),
    "structured_outputs": supported(
        remark="vLLM's: one of these, and not beside `response_format`.", table=STRUCTURED_OUTPUTS
    ),
    "truncation": supported(
        remark="Ours: `disabled` refuses a prompt that is too long, as null does; `oldest_turns` (or `auto`) drops the "
        "oldest turns of a conversation, but no system message; `last_tokens` keeps the end. `truncated` of the answer, "
        "or of the first chunk, tells what went."
    ),
    "truncate_prompt_tokens": supported(
        remark="vLLM's: tokens that the prompt may have, -1 being all that fit; `truncation` is `last_tokens` then, "
        "unless it is given."
    ),
    "priority": supported(remark="vLLM's: lower runs first."),
    "cache_salt": supported(
        remark="vLLM's: only requests with the same salt share cached prefixes.", check=check_identifier
    ),
    "return_token_ids": supported(remark="vLLM's: `prompt_token_ids`, and `token_ids` in every choice and delta."),
    "return_timings": supported(
        remark="Ours: `timings` of the answer, or of the last chunk with a choice: `queue_ms`, `prefill_ms`, `decode_ms`."
    ),
    "stream": supported(),
    "stream_options": supported(remark="Only with `stream`.", table=STREAM_OPTIONS),
    "user": accepted(remark=f"A string of at most {MAX_IDENTIFIER} characters.", check=check_identifier),
    "use_beam_search": refused(neutral=(False,)),
    "length_penalty": refused(neutral=(1,)),
    "add_special_tokens": refused(remark="As template and tokenizer have it."),
    "spaces_between_special_tokens": refused(neutral=(True,)),
}

CONTENT_PART: Table = {
    "type": supported(remark="`text`; `refusal` in messages of the assistant."),
    "text": supported(),
    "refusal": supported(remark="Given to the model as text."),
    "image_url": refused(),
    "input_audio": refused(),
    "file": refused(),
    "cache_control": refused(),
}
"""An entry of a message's `content`."""

FUNCTION_CALL: Table = {
    "name": supported(),
    "arguments": supported(remark="JSON text of an object."),
}
"""`function` of an entry of a message's `tool_calls`, and `function_call`."""

TOOL_CALL: Table = {
    "id": supported(),
    "type": supported(remark="`function`."),
    "function": supported(table=FUNCTION_CALL),
    "index": accepted(remark="Of a streamed delta that a client sends back.", check=check_index),
}
"""An entry of a message's `tool_calls`."""

MESSAGE: Table = {
    "role": supported(
        remark="`system`, `developer` (`system` for a template that lacks it), `user`, `assistant`, `tool`, "
        "`function` (given to the template as `tool`)."
    ),
    "content": supported(remark="A string, or an array of parts.", table=CONTENT_PART),
    "name": supported(remark="Given to the template."),
    "refusal": supported(remark="Stands for the content of an assistant that has none."),
    # what an answer of ours carries comes back in the next request's history
    "tool_calls": supported(remark="Of an assistant; its content may be null then.", table=TOOL_CALL),
    "tool_call_id": supported(remark="Of a tool."),
    "function_call": supported(remark="Given to the template as a tool call.", table=FUNCTION_CALL),
    "reasoning_content": supported(remark="Given to the template."),
    "annotations": refused(neutral=([],)),
    "audio": refused(),
}
"""An entry of `messages`."""

FUNCTION: Table = {
    "name": supported(remark="From 1 to 64 letters, digits, `_` and `-`."),
    "description": supported(),
    "parameters": supported(remark="A JSON schema of an object.", check=check_free_form),
    "strict": supported(
        remark="True: a call that the model chooses to make is held to the schema, where it begins with a marker. "
        "One that is required always is."
    ),
}
"""`function` of an entry of `tools`."""

TOOL: Table = {
    "type": supported(remark="`function`."),
    "function": supported(table=FUNCTION),
}
"""An entry of `tools`."""

CHAT: Table = {
    "messages": supported(remark=f"From 1 to {MAX_ENTRIES}.", table=MESSAGE),
    "max_completion_tokens": supported(remark="Goes before `max_tokens`."),
    "logprobs": supported(remark="The model's own, before temperature, penalties and the rest."),
    "top_logprobs": supported(remark="From 0 to 20; needs `logprobs`."),
    "reasoning_effort": supported(
        remark="Given to the template, which may know nothing of it; `none` turns thinking off where there is a switch."
    ),
    "add_generation_prompt": supported(remark="vLLM's: null is true, unless the final message is continued."),
    "continue_final_message": supported(remark="vLLM's: the answer is the rest of the last message."),
    "chat_template_kwargs": supported(
        remark="vLLM's: further variables of the template; none may stand for a template.", check=check_free_form
    ),
    "tools": supported(
        remark=f"Up to {MAX_TOOLS}, for models whose template takes tools and whose syntax of calls is known.",
        table=TOOL,
        most=MAX_TOOLS,
    ),
    "tool_choice": supported(
        remark="`none`, `auto`, `required`, a function, or `allowed_tools`; a call that is required is enforced.",
        check=check_free_form,
    ),
    "parallel_tool_calls": supported(remark="False: at most one call."),
    **_SAMPLING,
    "metadata": accepted(remark=f"Up to {MAX_METADATA} strings.", check=check_metadata),
    "safety_identifier": accepted(check=check_identifier),
    "prompt_cache_key": accepted(
        remark="All prefixes are cached already; `cache_salt` keeps them apart.", check=check_identifier
    ),
    "prompt_cache_retention": accepted(check=check_identifier),
    "store": refused(neutral=(False,)),
    "service_tier": refused(neutral=("auto", "default"), remark="There is one tier."),
    "functions": refused(neutral=([],)),
    "function_call": refused(neutral=("none", "auto")),
    "modalities": refused(neutral=(["text"],)),
    "audio": refused(),
    "prediction": refused(),
    "verbosity": refused(neutral=("medium",)),
    "web_search_options": refused(),
    "moderation": refused(),
    "chat_template": refused(remark="A template from a client is a program from a client."),
    "echo": refused(neutral=(False,)),
}
"""POST /v1/chat/completions."""

COMPLETION: Table = {
    "prompt": supported(
        remark="A text, an array of up to 1024 texts, token ids, or an array of such arrays. "
        "Choice i of prompt p has the index p * n + i."
    ),
    "suffix": supported(remark="For models whose vocabulary has tokens for filling in the middle; else refused."),
    "echo": supported(remark="The prompt stands before each text; with `logprobs`, those of its tokens too."),
    "logprobs": supported(
        remark="From 0 to 5, in the older shape; an end token has its place; `text_offset` counts characters of the text."
    ),
    **_SAMPLING,
    "best_of": refused(neutral=(1,)),
}
"""POST /v1/completions."""
