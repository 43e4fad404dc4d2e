"""Structured output through the whole engine: what is refused before the core sees it, compiling, and how texts end."""

from __future__ import annotations

import functools
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_llm import StructuredOutput, open_engine
from trio_llm.config import EngineSettings
from trio_llm.core.grammar import Grammar, GrammarCompiler
from trio_llm.core.request import FinishReason
from trio_llm.core.sampling_params import SamplingParams
from trio_llm.engine import admission
from trio_llm.engine.engine import Engine
from trio_llm.engine.simulation import FakeModel, open_simulation
from trio_llm.errors import InvalidRequest, QueueFull
from trio_llm.models.catalogue import resolve
from trio_llm.models.gguf import GGUFFile
from trio_llm.models.gguf_tokenizer import build_tokenizer, end_token_ids
from trio_llm.models.loader import LoadedModel

SETTINGS = EngineSettings(device="cpu", max_num_seqs=8, max_model_len=256, kv_cache_memory=2**22)
CHOICE = StructuredOutput("choice", '["red", "green"]')
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@functools.cache
def tokenizer() -> tuple[PreTrainedTokenizerBase, frozenset[int]]:
    metadata = GGUFFile(resolve("smollm2")).metadata
    return build_tokenizer(metadata), frozenset(end_token_ids(metadata))


def small_model() -> LoadedModel:
    """Random weights behind SmolLM2's own tokenizer."""
    made, ends = tokenizer()
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(made),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return LoadedModel(
        name="small",
        model=model,
        tokenizer=made,
        defaults=SamplingParams(),
        eos_token_ids=ends,
        max_model_len=256,
        load_seconds=0.0,
    )


async def generate(engine: Engine, structure: StructuredOutput, **fields: Any) -> Any:
    # ids, which are ready at once
    async with engine.generate(
        [10, 11, 12], structured_output=structure, **{"max_tokens": 100, "seed": 0, **fields}
    ) as generation:
        pieces = [delta async for delta in generation]
    for choice in generation.choices:
        assert "".join(delta.text for delta in pieces if delta.index == choice.index) == choice.text
    return generation


async def test_texts_of_every_kind_beside_one_another() -> None:
    found: dict[str, Any] = {}

    async def ask(name: str, structure: StructuredOutput, **fields: Any) -> None:
        found[name] = await generate(engine, structure, **fields)

    async with open_engine(small_model(), settings=SETTINGS) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                functools.partial(ask, "person", StructuredOutput("json_schema", json.dumps(PERSON)), n=2)
            )
            nursery.start_soon(ask, "choice", StructuredOutput("choice", '["日本", "🎉 yes"]'))
            nursery.start_soon(
                functools.partial(ask, "regex", StructuredOutput("regex", "[0-9]{3}-[0-9]{3}"), ignore_eos=True)
            )
            nursery.start_soon(
                functools.partial(ask, "lark", StructuredOutput("lark", 'start: "<a>" /[é🎉]{3}/'), logprobs=2)
            )
            nursery.start_soon(functools.partial(ask, "object", StructuredOutput("json_object"), max_tokens=1))
        core = await engine.settled()
        assert core.num_free_blocks == core.num_blocks
    for choice in found["person"].choices:
        value = json.loads(choice.text)
        assert value.keys() == {"name", "age"} and 0 <= value["age"] <= 99 and len(value["name"]) <= 10
        assert choice.finish_reason is FinishReason.STOP
    assert found["choice"].text in ("日本", "🎉 yes")
    assert re.fullmatch("[0-9]{3}-[0-9]{3}", found["regex"].text)
    assert found["lark"].text[:3] == "<a>" and set(found["lark"].text[3:]) <= set("é🎉")
    assert len(found["lark"].choices[0].logprobs) == found["lark"].usage.completion_tokens
    assert found["object"].text.startswith("{")
    assert found["object"].finish_reason is FinishReason.LENGTH
    assert {found[name].finish_reason for name in ("choice", "regex", "lark")} == {FinishReason.STOP}


def test_the_example_in_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()
    (program,) = (
        code
        for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if "StructuredOutput" in code
    )
    exec(compile(program, "embedding.md", "exec"), {})
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"stop \{'colour': '(red|green|blue)', 'number': [123]\}", last)


async def test_a_stop_string_ends_a_text_too() -> None:
    async with open_engine(small_model(), settings=SETTINGS) as engine:
        generation = await generate(engine, StructuredOutput("regex", "abc-xyz"), stop=["c-"])
    assert generation.text == "ab"
    assert generation.finish_reason is FinishReason.STOP


BAD = {
    "schema": StructuredOutput("json_schema", '{"type": "not-a-type"}'),
    "recursion": StructuredOutput("json_schema", '{"$ref": "#"}'),
    "keyword": StructuredOutput("json_schema", '{"type": "array", "uniqueItems": true}'),
    "expression": StructuredOutput("regex", "("),
    "grammar": StructuredOutput("lark", "start: nothing"),
}


async def test_what_cannot_be_compiled_is_refused_before_the_core_sees_it_and_the_next_is_served() -> None:
    async with open_engine(small_model(), settings=SETTINGS) as engine:
        for structure in BAD.values():
            with pytest.raises(InvalidRequest) as caught:
                await generate(engine, structure)
            assert caught.value.field == "structured_output"
        core = await engine.settled()
        assert core.num_steps == 0
        assert engine.statistics().num_requests == engine._num_choices == 0
        assert (await generate(engine, CHOICE)).text in ("red", "green")


async def test_a_model_whose_tokenizer_cannot_serve_says_so() -> None:
    async with open_simulation(FakeModel(eos_token_ids=[0])) as engine:
        with pytest.raises(InvalidRequest, match="tokenizer cannot be used"):
            await generate(engine, CHOICE)
        assert engine.state == "ready"


class _HeldCompiler(GrammarCompiler):
    """Compiles when it is allowed to."""

    def __init__(self) -> None:
        super().__init__(object(), vocab_size=32, eos_token_ids=frozenset({0}))
        self.held = threading.Event()
        self.begun = threading.Event()
        self.num_compiled = 0

    def _compile(self, structure: StructuredOutput) -> Grammar:
        self.begun.set()
        self.held.wait()
        self.num_compiled += 1
        return Grammar(None, self._vocabulary, self._ends, self._eos_token_ids)  # type: ignore[arg-type]


async def test_who_is_cancelled_leaves_what_was_begun_to_the_others() -> None:
    compiler, limiter = _HeldCompiler(), trio.CapacityLimiter(1)
    found: list[Any] = []

    async def ask(scope: trio.CancelScope) -> None:
        with scope:
            found.append(await admission.compile_grammar(compiler, CHOICE, limiter))

    scopes = [trio.CancelScope() for _ in range(3)]
    async with trio.open_nursery() as nursery:
        for scope in scopes:
            nursery.start_soon(ask, scope)
            await wait_all_tasks_blocked()
        # the one whose thread compiles, and one that waits
        scopes[0].cancel()
        scopes[1].cancel()
        await wait_all_tasks_blocked()
        assert all(scope.cancelled_caught for scope in scopes[:2])
        compiler.held.set()
    assert compiler.num_compiled == 1
    assert found == [compiler.find(CHOICE)]
    assert await admission.compile_grammar(compiler, CHOICE, limiter) is found[0]


async def test_who_compiles_for_too_long_is_refused_and_who_waits_behind_is_told_to_come_again(
    mock_clock: MockClock,
) -> None:
    compiler, limiter = _HeldCompiler(), trio.CapacityLimiter(1)
    raised: dict[str, Exception] = {}

    async def ask(name: str) -> None:
        structure = StructuredOutput("regex", name)
        try:
            await admission.compile_grammar(compiler, structure, limiter)
        except (InvalidRequest, QueueFull) as error:
            raised[name] = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "first")
        await trio.to_thread.run_sync(compiler.begun.wait)
        nursery.start_soon(ask, "second")
        await wait_all_tasks_blocked()
        mock_clock.jump(admission.COMPILE_TIMEOUT - 0.1)
        await wait_all_tasks_blocked()
        assert not raised
        mock_clock.jump(0.2)
    assert isinstance(raised["first"], InvalidRequest)
    assert raised["first"].field == "structured_output"
    assert isinstance(raised["second"], QueueFull)
    compiler.held.set()
    # the thread goes on alone, and what it makes is kept
    assert await admission.compile_grammar(compiler, StructuredOutput("regex", "first"), limiter) is not None
    assert compiler.num_compiled == 1


async def test_a_request_that_is_left_while_it_compiles_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_simulation(FakeModel(eos_token_ids=[0])) as engine:
        engine._compiler = compiler = _HeldCompiler()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(functools.partial(generate, engine, CHOICE))
                await wait_all_tasks_blocked()
                assert engine._num_choices == 1
                assert engine._compiling.borrowed_tokens == 1
                scope.cancel()
        compiler.held.set()
        core = await engine.settled()
        assert core.num_steps == engine._num_choices == engine.statistics().num_requests == 0


async def test_compiling_leaves_the_event_loop_free() -> None:
    """A long one, while others are served."""
    large = {"type": "object", "properties": {f"property {number}": {"type": "string"} for number in range(1500)}}
    async with open_engine(small_model(), settings=SETTINGS) as engine:
        await generate(engine, CHOICE)  # makes the tokenizer, which does hold the lock of Python
        done: list[str] = []

        async def ask(name: str, structure: StructuredOutput) -> None:
            await generate(engine, structure, max_tokens=2)
            done.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "large", StructuredOutput("json_schema", json.dumps(large)))
            await wait_all_tasks_blocked()
            for name in ("a", "b", "c"):
                await ask(name, CHOICE)
    assert done[:3] == ["a", "b", "c"]
    assert done[3:] == ["large"]
