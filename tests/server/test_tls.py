"""HTTPS, with certificates made on the spot."""

from __future__ import annotations

import os
import signal
import ssl
from functools import partial

import httpx2
import pytest
import trio
import trustme

from trio_llm.config import ServerSettings
from trio_llm.core.executor import FakeExecutor
from trio_llm.engine.nursery import open_engine
from trio_llm.engine.simulation import FakeModel
from trio_llm.errors import ConfigurationError
from trio_llm.server.serve import serve

HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    """Certificate, key, and both in one file."""
    directory = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    issued.private_key_and_cert_chain_pem.write_to_path(directory / "both.pem")
    return directory


@pytest.fixture
def trusting(authority):
    """What a client verifies with."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.mark.parametrize("names", [("cert.pem", "key.pem"), ("both.pem", None)])
async def test_https(files, trusting, names):
    certfile, keyfile = (None if name is None else str(files / name) for name in names)
    settings = ServerSettings(port=0, ssl_certfile=certfile, ssl_keyfile=keyfile, write_timeout=1)
    opener = partial(open_engine, FakeModel(), executor=FakeExecutor())
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(partial(serve, settings, open_engine=opener))
            assert url.startswith("https://127.0.0.1:")
            port = int(url.rpartition(":")[2])
            async with httpx2.AsyncClient(verify=trusting, base_url=url) as client:
                for _ in range(2):  # over one connection
                    answer = await client.post("/v1/chat/completions", json=HI)
                    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 6)
                async with client.stream("POST", "/v1/chat/completions", json={**HI, "stream": True}) as answer:
                    text = "".join([piece async for piece in answer.aiter_text()])
                assert text.endswith("data: [DONE]\n\n")
                assert (await client.post("/v1/models", headers={"connection": "close"})).status_code == 405

            # a peer that says nothing, one that speaks plainly, one that leaves in the middle of an answer
            silent = await trio.open_tcp_stream("127.0.0.1", port)
            plain = await trio.open_tcp_stream("127.0.0.1", port)
            await plain.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert not (await plain.receive_some()).startswith(b"HTTP")
            leaving = await trio.open_ssl_over_tcp_stream("127.0.0.1", port, ssl_context=trusting)
            await leaving.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            leaving.transport_stream.socket.close()

            async with httpx2.AsyncClient(verify=trusting, base_url=url) as client:
                assert (await client.get("/health")).status_code == 200
            os.kill(os.getpid(), signal.SIGTERM)
        for stream in (silent, plain):
            await stream.aclose()


async def test_what_cannot_be_used(files, tmp_path):
    other = trustme.CA().issue_cert("other")
    other.private_key_pem.write_to_path(tmp_path / "other.pem")
    for certfile, keyfile in [
        (files / "none.pem", None),
        (files / "cert.pem", None),
        (files / "cert.pem", files / "none.pem"),
        (files / "cert.pem", tmp_path / "other.pem"),
    ]:
        settings = ServerSettings(ssl_certfile=str(certfile), ssl_keyfile=None if keyfile is None else str(keyfile))
        with pytest.raises(ConfigurationError, match="no certificate with its key in") as caught:
            await serve(settings)
        assert caught.value.field == "ssl_certfile"


def test_a_key_without_a_certificate():
    with pytest.raises(ConfigurationError, match="ssl_certfile"):
        ServerSettings(ssl_keyfile="key.pem")
