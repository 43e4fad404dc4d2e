"""A request as its reader sees it, and the judgement whether that was right."""

from __future__ import annotations

import attrs
import trio

from trio_llm.core.request import FinishReason
from trio_llm.engine.choice import Delta
from trio_llm.engine.generation import Generation
from trio_llm.errors import (
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    QueueFull,
    ReaderStalled,
    RequestFailed,
    ShuttingDown,
)

from .model import END, reference
from .traffic import MAX_MODEL_LEN, Script


class WalkedOutError(Exception):
    """What a reader's own block raises."""


@attrs.define(eq=False)
class Reading:
    """One request as its reader sees it."""

    script: Script
    generation: Generation
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    error: Exception | None = None
    entered: bool = False
    finished: bool = False
    """Whether the iteration came to its end."""
    deltas: list[Delta] = attrs.field(factory=list)

    async def read(self) -> None:
        script, generation = self.script, self.generation
        has_stalled = False
        async with generation:
            self.entered = True
            if script.door == "abort when just let in":
                generation.abort()
            while True:
                if len(self.deltas) >= script.num_reads:
                    match script.door:
                        case "left early":
                            return
                        case "an exception in the block":
                            raise WalkedOutError
                        case "stalled" if not has_stalled:
                            has_stalled = True
                            await trio.sleep(200)
                if script.pace:
                    await trio.sleep(script.pace)
                if script.drains:
                    self.deltas += generation.drain()
                try:
                    self.deltas.append(await anext(generation))
                except StopAsyncIteration:
                    self.finished = True
                    return

    def judge(self) -> str:
        """By which door it left; asserts that the door was open to it and that what it got is right."""
        generation, script = self.generation, self.script
        door = self.door()
        assert generation._ended or not self.entered
        if not generation.core_id:
            assert generation.usage.completion_tokens == 0
            assert not any(delta.token_ids for delta in self.deltas)
            return door
        eos = frozenset({END}) if script.form or not generation.params.ignore_eos else frozenset()
        for choice in generation.choices:
            tokens, text, reason = reference(
                script.prompt, generation.params, choice.index, script.poison, eos, script.form
            )
            mine = [delta for delta in self.deltas if delta.index == choice.index]
            read = [token for delta in mine for token in delta.token_ids]
            assert choice.finish_reason is not None
            assert choice.token_ids == tokens[: len(choice.token_ids)], "other tokens than the reference"
            assert read == choice.token_ids[: len(read)]
            assert [delta.finish_reason for delta in mine[:-1]] == [None] * len(mine[:-1]), "two last words"
            if choice.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
                assert (choice.token_ids, choice.text, choice.finish_reason) == (tokens, text, reason)
            elif script.poison is None:
                assert choice.text == bytes(choice.token_ids).decode()
            if self.finished:
                assert read == choice.token_ids
                assert "".join(delta.text for delta in mine) == choice.text
                assert mine[-1].finish_reason is choice.finish_reason
        return door

    def door(self) -> str:
        generation, script = self.generation, self.script
        reason = generation._overall_reason() if generation.core_id else None
        match self.error:
            case WalkedOutError():
                return "an exception in the block" if reason is FinishReason.ABORT else self.natural(reason)
            case QueueFull():
                return "refused: queued tokens" if "prompt tokens" in self.error.message else "refused: queued requests"
            case ContextLengthExceeded():
                assert len(script.prompt) + (script.params.max_tokens or 1) > MAX_MODEL_LEN
                return "refused: too long"
            case InvalidRequest():
                if self.error.field == "structured_output":
                    assert script.form is not None and script.form.refused
                    return "refused: form"
                assert self.error.field == "request_id", self.error
                return "refused: id in use"
            case ReaderStalled():
                assert script.door == "stalled" or script.pace * generation._engine.settings.credit_window > 25
                return "stalled"
            case ShuttingDown():
                return "closed in flight" if self.entered else "refused: draining"
            case EngineDead():
                return "died in flight" if self.entered else "refused: dead"
            case RequestFailed():
                assert script.poison is not None, f"failed for no fault of its own: {self.error.__cause__!r}"
                assert reason is FinishReason.ERROR
                return f"failed: {script.poison.kind}"
        assert self.error is None
        if self.scope.cancelled_caught:
            assert script.door in {"deadline", "cancelled", "cancelled before it is let in"}
            if reason is None:
                return "cancelled before it is let in"
            return script.door if reason is FinishReason.ABORT else self.natural(reason)
        if reason is None:
            assert script.door.startswith("abort")
            return "abort before it is let in"
        if self.finished and reason is FinishReason.ABORT:
            assert script.door.startswith("abort")
            queued = not generation.usage.completion_tokens
            return "abort while it is queued" if queued else script.door
        if script.door == "left early" and reason is FinishReason.ABORT:
            return script.door
        return self.natural(reason)

    def natural(self, reason: FinishReason | None) -> str:
        if reason is FinishReason.LENGTH:
            return "end: length"
        generation = self.generation
        if isinstance(generation._failure, EngineDead | ShuttingDown):
            return "died in flight" if reason is FinishReason.ERROR else "closed in flight"
        assert reason is FinishReason.STOP, "neither ended by itself nor by anybody"
        last = {choice.token_ids[-1] for choice in generation.choices if choice.finish_reason is FinishReason.STOP}
        if END in last and self.script.form is not None:
            return "end: form"
        if END in last and not generation.params.ignore_eos:
            return "end: end token"
        return "end: stop token" if last & set(generation.params.stop_token_ids) else "end: stop string"
