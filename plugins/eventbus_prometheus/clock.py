"""How far the database's clock is ahead of the monotonic clock of this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

_REMEMBERED: Final = 10


class Clocks:
    """The difference as the shortest of the last few round trips showed it: wrong by half of that at most."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._seen: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    async def compare(self, ask: Callable[[], Awaitable[float]]) -> None:
        """Ask the database for its seconds since 1970. What that raises passes through and changes nothing."""
        asked = self._monotonic()
        there = await ask()
        answered = self._monotonic()
        self._seen.append((answered - asked, there - (asked + answered) / 2))

    @property
    def ahead(self) -> float | None:
        """Seconds to add to monotonic ones; None as long as they were never compared."""
        return min(self._seen)[1] if self._seen else None
