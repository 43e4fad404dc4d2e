"""A client that goes away takes its request out of the batch within a step, wherever the request is."""

from __future__ import annotations

import random

import pytest
import trio

from trio_llm.core.executor import ExecutorInfo, FakeExecutor

CHAT = "/v1/chat/completions"
PROMPT = {"model": "fake", "messages": [{"role": "user", "content": "hi" * 40}]}
LONG = {**PROMPT, "max_tokens": 800}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", ["queued", "prefill", "before the first byte", "in the middle"])
async def test_disconnect(serving, launch, gated, stage, stream):
    executor, gate = gated
    # a prompt takes several steps
    engine = {"max_num_seqs": 1, "max_num_batched_tokens": 32}
    async with serving(launch, executor=executor, engine=engine) as server:
        statistics = server.engine.statistics
        neighbour = None
        if stage == "queued":
            neighbour = await server.connect()
            await neighbour.send("POST", CHAT, {**PROMPT, "max_tokens": 3})
            await server.admitted(1)
        client = await server.connect()
        await client.send("POST", CHAT, {**LONG, "stream": stream})
        await server.admitted(2 if neighbour else 1)
        if stage == "prefill":
            gate.let(1)
            await server.until(lambda: statistics().core.num_steps == 1)
            assert statistics().generation_tokens == 0
        elif stage == "in the middle":
            gate.let(20)
            await server.until(lambda: statistics().generation_tokens >= 5)
            if stream:
                await client.until(b'"content"')
            await server.until(lambda: len(executor.plans) == 20)
        planned = len(executor.plans)
        client.stream.socket.close()
        await server.until(lambda: statistics().num_requests == (1 if neighbour else 0))
        gate.let(1)  # the step that was under way
        if neighbour is not None:
            gate.open()
            assert (await neighbour.receive()).status == 200
            # the one that left was never computed
            assert all(
                row.sequence_id == executor.plans[0].rows[0].sequence_id for p in executor.plans for row in p.rows
            )
        else:
            core = await server.engine.settled()
            assert core.num_free_blocks == core.num_blocks
            assert core.num_running == core.num_waiting == 0
            assert len(executor.plans) <= planned + 1
        gate.open()
        await server.assert_all_free()
        await server.until(lambda: not server.app.exchanges)
        assert statistics().finished["abort"] == 1


async def test_half_close_is_a_disconnect(serving, launch, gated):
    executor, gate = gated
    async with serving(launch, executor=executor) as server:
        client = await server.connect()
        await client.send("POST", CHAT, LONG)
        await server.admitted(1)
        await client.stream.send_eof()
        await server.until(lambda: server.engine.statistics().num_requests == 0)
        gate.open()
        await server.assert_all_free()


async def test_disconnect_in_the_middle_of_the_request(serving, launch):
    async with serving(launch) as server:
        client = await server.connect()
        await client.stream.send_all(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
        await server.until(lambda: bool(server.app.exchanges))
        client.stream.socket.close()
        await server.until(lambda: not server.app.exchanges)
        await server.assert_all_free()


async def test_two_hundred_random_disconnects(serving, launch):
    chance = random.Random(7)
    info = ExecutorInfo(num_blocks=128, block_size=4, vocab_size=256, max_model_len=512)
    async with serving(launch, executor=FakeExecutor(info), engine={"max_num_seqs": 8, "credit_window": 16}) as server:

        async def visit(stream: bool, read: int | None, length: int, n: int) -> None:
            client = await server.connect()
            body = {**PROMPT, "max_tokens": length, "stream": stream, "n": n}
            await client.send("POST", CHAT, body, connection="close")
            if read is not None:
                while len(client.buffer) < read:
                    data = await client.stream.receive_some(chance.randint(1, 2000))
                    if not data:
                        break
                    client.buffer += data
            elif chance.random() < 0.5:
                await trio.lowlevel.checkpoint()
            client.stream.socket.close()

        with trio.fail_after(300):  # of a machine that has much else to do
            for _ in range(10):
                async with trio.open_nursery() as nursery:
                    for _ in range(20):
                        read = chance.choice([None, None, 1, 300, 3000])
                        nursery.start_soon(
                            visit, chance.random() < 0.7, read, chance.choice([1, 20, 400]), chance.choice([1, 1, 3])
                        )
        await server.assert_all_free()
        await server.until(lambda: not server.app.exchanges)
        text = (await server.ask("GET", "/metrics")).body.decode()
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert f'trio_llm_{gauge}{{model_name="fake"}} 0.0' in text
        assert (await server.ask("POST", CHAT, {**PROMPT, "max_tokens": 2})).status == 200
