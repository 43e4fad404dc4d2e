"""openai's package for Node, fetched by npm: chat, stream, an error, a stream that is left."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance.server import MODEL, base_url

SCRIPT = Path(__file__).with_name("node_client.mjs")


@pytest.fixture(scope="session")
def said(tmp_path_factory):
    """What the script printed, a line for each of its parts."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("there is no Node here")
    folder = tmp_path_factory.mktemp("node")
    install = [npm, "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder), "openai@7"]
    try:
        subprocess.run(install, stdin=subprocess.DEVNULL, check=True, timeout=300)
    except subprocess.SubprocessError as error:
        pytest.skip(f"npm cannot fetch the package: {type(error).__name__}")
    shutil.copy(SCRIPT, folder)
    command = [node, SCRIPT.name, f"{base_url()}/v1", MODEL]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return {line["part"]: line for line in map(json.loads, ran.stdout.splitlines())}


def check_version(said, record_property):
    record_property("note", f"openai {said['version']['version']} on Node {said['version']['node']}")


def check_chat(said):
    assert said["chat"]["content"] and said["chat"]["finish_reason"] in ("stop", "length")
    assert said["chat"]["usage"]["completion_tokens"] > 0
    assert said["chat"]["request_id"]


def check_stream(said):
    assert said["stream"]["content"] == said["chat"]["content"]
    assert said["stream"]["usage"]["completion_tokens"] == said["chat"]["usage"]["completion_tokens"]


def check_stream_helper(said):
    assert said["helper"]["content"] == said["chat"]["content"]


def check_error(said):
    assert said["error"]["class"] == "NotFoundError"
    assert said["error"]["code"] == "model_not_found" and said["error"]["status"] == 404
    assert said["error"]["request_id"]


def check_left_stream(said):
    assert said["left"]["chunks"] == 2
