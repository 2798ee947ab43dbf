"""When something happened by the database's clock, from the monotonic clock of this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

_REMEMBERED: Final = 12


class DatabaseClock:
    """The difference between the two clocks, as the last measurements found it.

    Each is wrong by at most half of its round trip, so the one with the shortest counts. Old ones are forgotten: a
    database that moved, or whose clock was set, is right again after ``remembered`` measurements.
    """

    def __init__(self, monotonic: Callable[[], float], remembered: int = _REMEMBERED) -> None:
        self._monotonic = monotonic
        self._measured: deque[tuple[float, float]] = deque(maxlen=remembered)

    async def measure(self, now: Callable[[], Awaitable[float]]) -> None:
        """Compare the clocks. ``now`` asks the database, in seconds since 1970; what it raises passes through."""
        before = self._monotonic()
        there = await now()
        after = self._monotonic()
        self._measured.append((after - before, there - (before + after) / 2))

    @property
    def ahead(self) -> float | None:
        """What to add to monotonic seconds for seconds since 1970 by the database; None before a measurement."""
        return min(self._measured)[1] if self._measured else None
