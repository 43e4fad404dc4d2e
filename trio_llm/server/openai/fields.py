"""Which field of the API is supported, accepted or refused: one table for each object.

The table is the truth: parsing is driven by it.  A field that is not in it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs


@attrs.frozen
class Field:
    """How one field is treated."""

    treatment: Literal["supported", "accepted", "refused"]
    """supported: it does what the API says.  accepted: any value of its type passes and asks for
    nothing that a server of one's own could do.  refused: only values that ask for nothing pass."""
    type: type | tuple[type, ...] = object
    """Of an accepted field."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that ask for nothing."""

    def is_neutral(self, value: Any) -> bool:
        """Whether a value asks for nothing.  0 and 0.0 are the same number, False is none."""
        return any(value == idle and isinstance(value, bool) == isinstance(idle, bool) for idle in self.neutral)


Table = Mapping[str, Field]


def supported(*names: str) -> dict[str, Field]:
    """Rows for fields that do what the API says."""
    return dict.fromkeys(names, Field("supported"))


def accepted(**kinds: type | tuple[type, ...]) -> dict[str, Field]:
    """Rows for fields that pass and are not used."""
    return {name: Field("accepted", type=kind) for name, kind in kinds.items()}


def refused(**neutral: tuple[Any, ...]) -> dict[str, Field]:
    """Rows for fields that pass only with values that ask for nothing."""
    return {name: Field("refused", neutral=values) for name, values in neutral.items()}


_SAMPLING = {
    **supported("n", "stop", "seed", "temperature", "top_p", "top_k", "min_p", "max_tokens"),
    **supported("stop_token_ids", "ignore_eos", "stream", "stream_options", "priority", "cache_salt"),
    **accepted(user=str),
    **refused(
        presence_penalty=(0,),
        frequency_penalty=(0,),
        logit_bias=({},),
        repetition_penalty=(1,),
        typical_p=(1,),
        min_tokens=(0,),
        bad_words=([],),
        allowed_token_ids=([],),
        prompt_logprobs=(0,),
        include_stop_str_in_output=(False,),
        skip_special_tokens=(True,),
        return_token_ids=(False,),
        structured_outputs=({},),
    ),
}

CHAT: Table = {
    **_SAMPLING,
    **supported("model", "messages", "max_completion_tokens"),
    **accepted(metadata=dict, safety_identifier=str, prompt_cache_key=str, prompt_cache_retention=str),
    **refused(
        store=(False,),
        logprobs=(False,),
        top_logprobs=(0,),
        response_format=({"type": "text"},),
        tools=([],),
        tool_choice=("none", "auto"),
        parallel_tool_calls=(True, False),
        functions=([],),
        function_call=("none", "auto"),
        modalities=(["text"],),
        audio=(),
        prediction=(),
        reasoning_effort=("none",),
        verbosity=("medium",),
        service_tier=("auto", "default"),
        web_search_options=(),
        moderation=(),
        chat_template=(),
        chat_template_kwargs=({},),
        add_generation_prompt=(True,),
        continue_final_message=(False,),
    ),
}
"""POST /v1/chat/completions."""

COMPLETION: Table = {
    **_SAMPLING,
    **supported("model", "prompt"),
    **refused(best_of=(1,), echo=(False,), logprobs=(), suffix=("",)),
}
"""POST /v1/completions."""

MESSAGE: Table = {
    **supported("role", "content", "name"),
    # what an answer of ours carries comes back in the next request's history
    **refused(refusal=("",), annotations=([],), tool_calls=([],), tool_call_id=(), function_call=(), audio=()),
    **refused(reasoning_content=("",)),
}
"""An entry of `messages`."""

CONTENT_PART: Table = {
    **supported("type", "text"),
    **refused(image_url=(), input_audio=(), file=(), refusal=(), cache_control=()),
}
"""An entry of a message's `content`."""

STREAM_OPTIONS: Table = {
    **supported("include_usage"),
    # padding against an observer's guesses; it may be left out
    **accepted(include_obfuscation=bool),
    **refused(continuous_usage_stats=(False,)),
}
"""`stream_options`."""
