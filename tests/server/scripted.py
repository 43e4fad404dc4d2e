"""Models for tests: one that says a given text, and a small real one that a grammar can lead."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from tests.core.tiny_models import build, paged
from tests.engine.test_detokenizer import trained
from trio_llm.core.executor import ExecutorInfo, FakeExecutor
from trio_llm.core.torch_executor import TorchExecutor
from trio_llm.engine.simulation import FakeModel

INFO = ExecutorInfo(num_blocks=512, block_size=4, vocab_size=400, max_model_len=1024)
END = 1
"""Of a text, in the vocabulary of the small tokenizers."""
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
CALLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or () %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A template that writes calls as Hermes does."""
THINKING = "{# </think> #}" + CALLING


def saying(kind: str, text: str, *, template: str = PLAIN, ends: bool = True) -> tuple[Any, FakeModel, list[int]]:
    """An executor and a model that say a text, then end tokens for ever; and the text's tokens.

    Args:
        kind: of the tokenizer.
        ends: whether the end token ends a choice.
    """
    tokenizer = trained(kind)
    tokenizer.chat_template = template
    ids = tokenizer.encode(text)
    if kind == "llama":
        # of a continuation: no word begins the text
        ids = tokenizer.encode("a" + text)[len(tokenizer.encode("a")) :]

    def next_token(context: list[int], index: int) -> int:
        return ids[index] if index < len(ids) else END

    model = FakeModel(tokenizer=tokenizer, eos_token_ids=[END] if ends else [])
    return FakeExecutor(INFO, next_token=next_token), model, ids


def random_model(*, template: str = PLAIN, words: Sequence[str] = ()) -> tuple[Any, FakeModel]:
    """An executor and a model that say what chance has put into their weights.

    Args:
        words: that are one token each.
    """
    tokenizer = copy.deepcopy(trained("byte-level"))
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = template
    model = build("llama", vocab_size=330 + len(words), max_position_embeddings=2048)
    executor = TorchExecutor(paged(model, block_size=4, num_blocks=512), num_blocks=512, max_model_len=2048)
    return executor, FakeModel(tokenizer=tokenizer, eos_token_ids=[END])
