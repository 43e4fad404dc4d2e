"""Trio with a schedule that a seed decides, so that a failure can be seen again.

Trio shuffles the tasks that are ready, on purpose.  It has a switch that sorts them first,
and a Random that shuffles them; both are private, and `test_simulation` guards them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest import mock

import structlog
import trio


@contextmanager
def replayable(random: Random) -> Iterator[None]:
    """Let all that is left to chance in here be decided by `random`, and write no logs."""
    run = trio._core._run
    logs = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
        logger_factory=structlog.ReturnLoggerFactory(),
    )
    try:
        with (
            mock.patch.object(run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
            mock.patch.object(run, "_r", Random(random.randbytes(8))),
            mock.patch.object(secrets, "randbits", random.getrandbits),
        ):
            yield
    finally:
        structlog.configure(**logs)
