"""The server that the suites talk to, and what they need to know of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

MODEL = "smollm2"


@contextmanager
def running_server(url: str | None = None) -> Iterator[str]:
    """The address of a server: the given one, or one that is started and ended here."""
    if url is not None:
        yield url.rstrip("/")
        return
    # answers of a small model may never end by themselves
    command = [sys.executable, "-m", "trio_llm", "serve", MODEL, "--port", "0", "--default-max-tokens", "200"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        try:
            found = None
            while found is None:
                line = process.stderr.readline()
                if not line:
                    raise RuntimeError("the server ended before it served")
                sys.stderr.write(line)
                found = re.search(r"https?://[\d.]+:\d+", line)
            threading.Thread(target=process.stderr.read, daemon=True).start()  # so that it never blocks
            yield found[0]
        finally:
            process.terminate()


def base_url() -> str:
    """The address that the runner gave."""
    return os.environ["TRIO_LLM_CONFORMANCE_URL"]


def serves(path: str, field: str | None = None) -> bool:
    """Whether the server has a path, and its request a field that does something."""
    document = httpx2.get(f"{base_url()}/openapi.json").json()
    if path not in document["paths"]:
        return False
    if field is None:
        return True
    (method,) = document["paths"][path].values()
    name = method["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields = document["components"]["schemas"][name]["properties"]
    return fields.get(field, {}).get("x-support") == "supported"
