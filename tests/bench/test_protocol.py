"""The protocol's costs are measured on what the server does."""

from __future__ import annotations

import protocol
import protocol_parts as bench
import protocol_streams
import pytest

from tests.engine.test_detokenizer import trained
from trio_llm.core.executor import FakeExecutor
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.simulation import FakeModel
from trio_llm.server.openai.parsing import parse_chat


@pytest.mark.parametrize("size", [1024, 2048, 8192])
def test_a_request_has_its_size_and_is_valid(size: int) -> None:
    data = bench.request_of(size)
    assert size - 64 < len(data) <= size
    assert parse_chat(bench.orjson.loads(data), lenient=False).stream


async def test_every_part_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "microseconds", lambda function: [function(), 1.0][1:])
    tokenizer = trained("byte-level")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with open_engine(FakeModel(), executor=FakeExecutor(protocol_streams.INFO)) as engine:
        found = await bench.parts(engine, tokenizer, 1024)
    assert len(found) == 9
    assert all(values for values in found.values())


async def test_all_tokens_come_and_clients_that_leave_are_noticed() -> None:
    found = await protocol_streams.streams(3, 16, protocol.parse(["--repeats", "1", "--step-ms", "0"]))
    assert found["clients that left"] == found["aborted for it"] == [3]
    assert found["blocks not given back"] == [0]
    assert sum(found["channel: tokens that wait for their reader"]) == 3 * 16
    assert len(found["request: queue wait, milliseconds on the clock"]) == 3
    assert all(values for values in found.values())
    assert "| aborted for it | 3.00 |" in protocol.table(found)
