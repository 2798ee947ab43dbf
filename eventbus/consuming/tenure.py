"""Until when this worker surely holds what it has claimed, by its own clock.

A process can be frozen, or cut off from the database, for longer than its lease, and others then run what it held. It
cannot know that before its next heartbeat is answered. So no handler is started once a lease has passed since the last
heartbeat that was answered; what was started before runs on, and the engine's fences refuse what comes of it.
"""

from __future__ import annotations

import asyncio
import math
import time

_LOOK = 0.02
"""Seconds between two looks while it is in doubt."""


class Tenure:
    """One worker's. ``until`` is in monotonic seconds; no heartbeat yet: for ever. Renewed from any thread."""

    def __init__(self) -> None:
        self.until = math.inf

    def renew(self, until: float) -> None:
        """A heartbeat was answered; others leave us alone until then."""
        self.until = until

    async def wait(self) -> float:
        """Wait until it is certain again; the time when it is."""
        while (now := time.monotonic()) > self.until:  # noqa: ASYNC110 - renewed by another thread, and rarely late
            await asyncio.sleep(_LOOK)
        return now

    def wait_blocking(self) -> None:
        """The same in a thread of a handler."""
        while time.monotonic() > self.until:
            time.sleep(_LOOK)
