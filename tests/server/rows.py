"""What a row of a field table may promise of the texts that a server gives, for `ask.say` of the tests of such tables."""

from __future__ import annotations


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
