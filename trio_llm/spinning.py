"""How long the threads of tensor operations burn a core while they wait for each other."""

from __future__ import annotations

import os

SPIN_COUNT = 3000
"""Looks that such a thread takes at a lock before it sleeps: some 50 microseconds, longer than the others mostly need
and far less than the slice of time that another program's thread would otherwise wait for."""


def spin_shortly() -> None:
    """Set it for this process and its children, unless the environment does; torch reads it when it is imported."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
