"""Servers as programs of their own: started, waited for, and gone with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PATIENCE = 300.0
"""Seconds that a server may take until it is ready."""
LAST_WORDS = 60.0
"""Seconds that it has to end by itself."""


class DoesNotServe(Exception):
    """A server ended before it was ready, or was not ready in time."""


@contextlib.contextmanager
def serving(
    command: Sequence[str], ready: str, log: Path, *, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A server, from ready to gone.

    Args:
        ready: a URL that is answered with 200 when it serves.
        log: a file for what it says.
        environment: variables beside those of this process.

    Raises:
        DoesNotServe: with the last that it said.
    """
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while not is_ready(ready):
            if server.poll() is not None or time.monotonic() > deadline:
                raise DoesNotServe(log.read_text(errors="replace")[-2000:])
            time.sleep(0.1)
        yield
    finally:
        stop(server)


def is_ready(url: str) -> bool:
    """Whether a URL is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  ours, on this machine
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stop(server: subprocess.Popen[bytes]) -> None:
    """End a program that leads a session, and all that it started."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(LAST_WORDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
