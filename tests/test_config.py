"""Settings: where they come from, and what is said about wrong ones."""

from __future__ import annotations

import logging

import pytest

from trio_llm import config
from trio_llm.config import EngineSettings, ServerSettings, parse_size, resolve
from trio_llm.docstrings import attribute_docstrings
from trio_llm.errors import ConfigurationError


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "trio_llm.toml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults():
    assert resolve(environ={}) == ServerSettings()


def test_order(toml):
    path = toml('bind = "hypercorn\'s own"\n[trio_llm]\nport = 1\nhost = "file"\nmodel = "file"\nmax-num-seqs = 7\n')
    environ = {"TRIO_LLM_CONFIG": path, "TRIO_LLM_PORT": "2", "TRIO_LLM_HOST": "environment"}
    settings = resolve({"port": "3"}, environ=environ)
    assert (settings.port, settings.host, settings.model) == (3, "environment", "file")
    assert settings.engine.max_num_seqs == 7


def test_types(toml):
    path = toml(
        '[trio_llm]\nserved_model_name = ["a", "b"]\nkv_cache_memory = "2GiB"\nshutdown_timeout = 5\n'
        "trust_remote_code = true\nmax_request_bytes = 1000\n"
    )
    settings = resolve(environ={"TRIO_LLM_DEFAULT_MAX_TOKENS": "9"}, config=path)
    assert settings.served_model_name == ("a", "b")
    assert settings.engine.kv_cache_memory == 2 * 2**30
    assert settings.engine.trust_remote_code is True
    assert settings.shutdown_timeout == 5.0 and isinstance(settings.shutdown_timeout, float)
    assert settings.max_request_bytes == 1000
    assert settings.default_max_tokens == 9
    assert resolve(environ={"TRIO_LLM_SERVED_MODEL_NAME": "a,b"}).served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("10k", 10_000), ("1.5GiB", 3 * 2**29), ("2 MB", 2_000_000), ("3Gi", 3 * 2**30), ("4g", 4 * 10**9)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1x", "-1", "1 2", "1i"])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "abc"),
        ("port", "70000"),
        ("port", 1.5),
        ("port", True),
        ("dtype", "float8"),
        ("compat", "loose"),
        ("trust_remote_code", "perhaps"),
        ("shutdown_timeout", "nan"),
        ("shutdown_timeout", -1),
        ("write_timeout", 0),
        ("max_num_seqs", 0),
        ("kv_cache_memory", "lots"),
        ("served_model_name", [1]),
        ("host", 5),
        ("default_max_tokens", 0),
    ],
)
def test_wrong_values_name_the_setting(name, value):
    with pytest.raises(ConfigurationError, match=name) as caught:
        resolve({name: value}, environ={})
    assert caught.value.field == name


def test_wrong_values_name_their_source(toml):
    path = toml('[trio_llm]\nport = "x"\n')
    for environ, flags, source in [
        ({}, {}, f"the file {path}"),
        ({"TRIO_LLM_PORT": "70000"}, {}, "the variable TRIO_LLM_PORT"),
        ({"TRIO_LLM_PORT": "1"}, {"port": "y"}, "the flag --port"),
        ({"TRIO_LLM_PORT": "1", "TRIO_LLM_MAX_NUM_SEQS": "-3"}, {}, "the variable TRIO_LLM_MAX_NUM_SEQS"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            resolve(flags, environ=environ, config=path)
        assert str(caught.value).endswith(f"(from {source})")


def test_unknown_key_in_a_file(toml):
    with pytest.raises(ConfigurationError, match=r"unknown key prot.*did you mean port"):
        resolve(environ={}, config=toml("[trio_llm]\nprot = 1\n"))


@pytest.mark.parametrize("text", ["trio_llm = 1", "[trio_llm", "\x00"])
def test_broken_files(toml, text):
    with pytest.raises(ConfigurationError):
        resolve(environ={}, config=toml(text))


def test_missing_file():
    with pytest.raises(ConfigurationError, match="cannot read"):
        resolve(environ={}, config="/does/not/exist.toml")


def test_unknown_variable_warns_with_the_closest_name(caplog):
    resolve(environ={"TRIO_LLM_MAX_NUM_SEQ": "3", "OTHER": "x"})
    (record,) = caplog.records
    assert "TRIO_LLM_MAX_NUM_SEQ" in record.getMessage() and "TRIO_LLM_MAX_NUM_SEQS?" in record.getMessage()
    assert record.levelno == logging.WARNING


def test_kubernetes_service_links_are_ignored(caplog):
    environ = {
        "TRIO_LLM_PORT": "tcp://10.0.0.1:8000",
        "TRIO_LLM_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "TRIO_LLM_PORT_8000_TCP_ADDR": "10.0.0.1",
        "TRIO_LLM_SERVICE_HOST": "10.0.0.1",
        "TRIO_LLM_SERVICE_PORT_HTTP": "8000",
        "TRIO_LLM_HOST": "tcp://10.0.0.1:80",
    }
    settings = resolve(environ=environ)
    assert (settings.port, settings.host) == (8000, "127.0.0.1")
    assert len(caplog.records) == 2
    assert any("enableServiceLinks" in record.getMessage() for record in caplog.records)


def test_every_setting_has_a_docstring():
    described = {**attribute_docstrings(ServerSettings), **attribute_docstrings(EngineSettings)}

    assert set(config.SETTINGS) <= set(described)
