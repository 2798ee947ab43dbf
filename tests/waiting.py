"""Waiting for what another process or server does, and cannot announce."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(predicate: Callable[[], object], timeout: float = 10.0) -> None:
    """Return as soon as ``predicate()`` is true; fail the test after ``timeout`` seconds.

    Only for conditions across processes. Inside one process wait for the event itself.
    """
    deadline = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"still not true after {timeout:g} s: {predicate}")
        time.sleep(0.01)
