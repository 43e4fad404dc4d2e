"""The server that the suites talk to, and what they need to know of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

MODEL = "smollm2"
REPETITION_PENALTY = 1.1
"""Greedy, a model this small repeats itself for ever without one."""
HERE = Path(__file__).parent


@contextmanager
def running_server(url: str | None = None) -> Iterator[str]:
    """The address of a server: the given one, or one that is started and ended here."""
    if url is not None:
        yield url.rstrip("/")
        return
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        # answers of a small model may never end by themselves
        with serving(folder, "--default-max-tokens", "400") as address:
            yield address


@contextmanager
def serving(model: str, *flags: str) -> Iterator[str]:
    """The address of a server of `model`, which lives as long as this."""
    command = [sys.executable, "-m", "trio_llm", "serve", model, "--served-model-name", MODEL, "--port", "0"]
    command += ["--log-level", "warning", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        try:
            yield _address(process)
        finally:
            process.terminate()


def save_model(folder: Path) -> None:
    """SmolLM2, greedy by default, with a chat template that shows tools to it: its own knows none."""
    from trio_llm.config import EngineSettings
    from trio_llm.models.loader import load_model

    loaded = load_model(MODEL, settings=EngineSettings(dtype="float32"))
    loaded.tokenizer.chat_template = (HERE / "tools.jinja").read_text(encoding="utf-8")
    loaded.tokenizer.save_pretrained(folder)
    sampling = {"temperature": None, "top_p": None, "top_k": None, "repetition_penalty": REPETITION_PENALTY}
    loaded.model.generation_config.update(do_sample=False, **sampling)
    loaded.model.save_pretrained(folder)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stderr.write(line)
        if found := re.search(r"https?://[\d.]+:\d+", line):
            threading.Thread(target=process.stdout.read, daemon=True).start()  # so that it never blocks
            return found[0]
    raise RuntimeError("the server ended before it served")


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
