"""What a row of a field table may promise of the texts that a server gives, for `ask.say` of the tests of such tables."""

from __future__ import annotations


def noted_prompts(executor, model):
    """The list to which the text of each prompt that an executor is given is added."""
    prompts = []
    admit = executor.admit

    def telling(sequence_id, task):
        prompts.append(model.tokenizer.decode(list(task.prompt_token_ids)))
        admit(sequence_id, task)

    executor.admit = telling
    return prompts


def differ(one, other):
    """A row: two requests give two texts."""

    async def check(ask):
        assert await ask.say(**one) != await ask.say(**other)

    return check


def agree(one, other):
    """A row: two requests give the same text."""

    async def check(ask):
        assert await ask.say(**one) == await ask.say(**other)

    return check
