"""API keys: every path but /health wants one, and no key is ever shown."""

from __future__ import annotations

import base64
import json

import pytest

from trio_llm.config import ServerSettings, resolve
from trio_llm.errors import ConfigurationError
from trio_llm.server.access import Access, access_of
from trio_llm.server.app import create_app

KEY = "sk-first-and-secret"
OTHER = "sk-other-and-secret"
CHAT = "/v1/chat/completions"
HI = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
PATHS = [
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("POST", "/v1/requests/x/abort"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/nowhere"),
    ("GET", "/healthy"),
    ("GET", "//v1/models"),
    ("GET", "/health/../v1/models"),
    ("DELETE", "/v1/models"),
    ("OPTIONS", "/v1/models"),
]


def basic(text):
    return f"Basic {base64.b64encode(text.encode('latin1')).decode()}"


def check_refused(answer):
    error = answer.json["error"]
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == 'Bearer, Basic realm="trio_llm"'
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "invalid_request_error", None)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": basic(f":{KEY}x")},
        {"authorization": basic(KEY)},
        {"authorization": basic(f"{KEY}:")},
        {"authorization": basic(f"a:b:{KEY}")},
        {"authorization": basic(f"a:{KEY}")[:-3]},
        {"authorization": "Basic \xff"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY} x"},
        {"authorization": f"Bearer {KEY.upper()}"},
        {"authorization": "Bearer \xff"},
        {"x_api_key": ""},
        {"x_api_key": f"Bearer {KEY}"},
    ],
)
async def test_every_path_wants_a_key(serving, headers):
    async with serving(api_key=[KEY, OTHER]) as server:
        for method, path in PATHS:
            check_refused(await server.ask(method, path, **headers))
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await server.ask("GET", path, **headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {OTHER}"},
        {"authorization": basic(f"anybody:{KEY}")},
        {"authorization": basic(f":{KEY}").replace("Basic", "basic")},
        {"authorization": basic(f"\xff:{KEY}")},
        {"x_api_key": OTHER},
        {"authorization": "Bearer wrong", "x_api_key": KEY},
    ],
)
async def test_any_of_the_keys_lets_in(serving, launch, headers):
    async with serving(launch, api_key=(KEY, OTHER)) as server:
        assert (await server.ask("POST", CHAT, HI, **headers)).status == 200
        assert (await server.ask("GET", "/metrics", **headers)).status == 200
        assert (await server.ask("GET", "/docs", **headers)).status == 200
        assert (await server.ask("GET", "/nowhere", **headers)).status == 404


async def test_without_keys_everybody_is_let_in(serving):
    async with serving() as server:
        assert (await server.ask("POST", CHAT, HI, authorization="Bearer anything")).status == 200


async def test_it_is_refused_before_its_body_comes(serving):
    async with serving(api_key=[KEY]) as server:
        client = await server.connect()
        await client.stream.send_all(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{{".encode())
        check_refused(await client.receive())


async def test_no_key_is_shown(serving, capfd, caplog):
    async with serving(api_key=[KEY], compat="lenient") as server:
        for headers in ({"authorization": f"Bearer {OTHER}"}, {"authorization": f"Bearer {KEY}"}, {"x_api_key": OTHER}):
            answer = await server.ask("POST", CHAT, {**HI, "wibble": 1}, **headers)
            assert b"secret" not in answer.body
        metrics = await server.ask("GET", "/metrics", x_api_key=KEY)
        assert metrics.status == 200 and b"secret" not in metrics.body
        assert "secret" not in repr(server.app.settings) + repr(server.app.access) + repr(vars(server.app.access))
        assert "secret" not in json.dumps({name: repr(value) for name, value in server.app.config.items()})
    output = "".join(capfd.readouterr()) + caplog.text
    assert "invalid_api_key" in output  # it is the log that is looked at
    assert "secret" not in output


def test_sources_add_up(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\n\n  sk-a  \nsk-b#c\n  # theirs\n")
    access = access_of(ServerSettings(api_key=("sk-d",), api_key_file=str(path)))
    assert [key for key in ("sk-a", "sk-b#c", "sk-d", "# ours", "", "sk-b") if access.allows(key)] == [
        "sk-a",
        "sk-b#c",
        "sk-d",
    ]
    assert not Access().allows("")


@pytest.mark.parametrize("content", [b"", b"# none\n", b"a b\n", b"\xff\n", "schlüssel\n".encode(), None])
def test_a_file_that_holds_no_good_keys(tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        create_app(ServerSettings(api_key_file=str(path)))
    assert caught.value.field == "api_key_file"


@pytest.mark.parametrize("value", ["", "sk-secret,", "a secret", "geheim-schlüssel-secret", ["secret", 5], 5])
def test_wrong_keys_are_not_repeated(value):
    with pytest.raises(ConfigurationError) as caught:
        resolve({"api_key": value}, environ={})
    assert caught.value.field == "api_key"
    assert "secret" not in str(caught.value)


def test_keys_from_the_environment():
    settings = resolve(environ={"TRIO_LLM_API_KEY": "a,b"})
    assert settings.api_key == ("a", "b")
    assert "'b'" not in repr(settings)
