"""From the tokens of a model whose markers are special tokens to calls, through a whole engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

import attrs
import pytest

from trio_llm.core.executor import FakeExecutor
from trio_llm.engine.engine import Engine
from trio_llm.engine.simulation import ByteTokenizer, FakeModel
from trio_llm.prompt.events import Message, ToolCall, collect
from trio_llm.prompt.output_parser import OutputParser
from trio_llm.prompt.reasoning import reasoning_format
from trio_llm.prompt.tool_formats import tool_format

OpenFake = Callable[..., AbstractAsyncContextManager[Engine]]

END = 0
MARKERS = {1: "[TOOL_CALLS]", 2: "[ARGS]", 3: "[THINK]", 4: "[/THINK]", 5: "[OTHER]"}


@attrs.frozen
class Added:
    """An entry of `added_tokens_decoder`."""

    content: str
    special: bool = True


class MarkedTokenizer(ByteTokenizer):
    """Bytes, of which the lowest are special tokens."""

    added_tokens_decoder: ClassVar = {token: Added(text) for token, text in MARKERS.items()}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        special = {} if skip_special_tokens else MARKERS
        return "".join(special.get(token, "") if token in MARKERS else chr(token) for token in token_ids)


SCRIPT = [3, *b"hm", 4, *b"So", 5, *b": ", 1, *b"add", 2, *b'{"a": "[ARGS]"}', 5, END]


@pytest.mark.parametrize("keeps", [True, False])
async def test_markers_stay_and_other_special_tokens_do_not(open_fake: OpenFake, keeps: bool) -> None:
    tokenizer = MarkedTokenizer()
    executor = FakeExecutor(next_token=lambda _, index: SCRIPT[index])
    calls, thoughts = tool_format(tokenizer, "mistral"), reasoning_format(tokenizer, "mistral")
    assert calls is not None and thoughts is not None
    kept = calls.special_token_ids | thoughts.special_token_ids if keeps else ()
    parser = OutputParser(thoughts.parser(), calls.parser(["add"]), reasoning_end_token_id=thoughts.end_token_id)
    async with open_fake(executor, FakeModel(tokenizer=tokenizer, eos_token_ids={END})) as engine:
        events = []
        async with engine.generate([9], keep_special_tokens=kept) as generation:
            async for delta in generation:
                events += parser.push(delta.text, delta.token_ids)
        events += parser.finish()
    if keeps:
        assert collect(events) == Message("So: ", "hm", (ToolCall("add", '{"a": "[ARGS]"}'),))
        assert parser.reasoning_tokens == 4
    else:
        assert collect(events) == Message('hmSo: add{"a": "[ARGS]"}')
    assert generation.usage.completion_tokens == len(SCRIPT)
