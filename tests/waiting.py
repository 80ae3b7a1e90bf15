"""Waiting for what must come about, however busy the machine is."""

import time
from collections.abc import Callable

# Seconds after which something hangs. Nothing is measured with it: a slow machine is no failure.
PATIENCE = 1800.0


def until(
    holds: Callable[[], object],
    what: str = "it did not come about",
    meanwhile: Callable[[], object] = lambda: time.sleep(0.05),
) -> None:
    """Do ``meanwhile`` again and again until ``holds`` does."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what
        meanwhile()
