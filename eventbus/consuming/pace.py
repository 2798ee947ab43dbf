"""How far ahead one queue is claimed in one process. Pure arithmetic over counts and monotonic seconds.

Claiming ahead hides the round trip to the database; claiming too far ahead takes events from idle peers and makes a
crash repeat more. So a queue holds what its handlers finish in half a second, whatever that is: one event ahead for
handlers of seconds, thousands for handlers of microseconds.
"""

from __future__ import annotations

_AHEAD_SECONDS = 0.5
_MEASURED_SECONDS = 0.05
_SLOWEST_DECAY = 0.5


class Pace:
    """The measured speed of one queue's handlers, and the room that follows from it."""

    def __init__(self, slots: int, prefetch: int, now: float) -> None:
        self._slots = slots
        self._prefetch = prefetch
        self._handled = 0
        self._since = now
        self._rate = 0.0
        self.refill = prefetch
        """Claim again when no more than this many deliveries wait."""

    def finished(self) -> None:
        """One more delivery was handled."""
        self._handled += 1

    def room(self, waiting: int, running: int, now: float) -> int:
        """How many more deliveries to claim now; 0 while more than half of what may wait is still there."""
        self._measure(now, idle=waiting == 0 and running == 0)
        ahead = min(self._prefetch, max(1, int(self._rate * _AHEAD_SECONDS)))
        free = max(0, self._slots - running)
        self.refill = free + ahead // 2
        if waiting > self.refill:
            return 0
        return max(0, min(self._prefetch, free + ahead) - waiting)

    def _measure(self, now: float, *, idle: bool) -> None:
        elapsed = now - self._since
        if elapsed < _MEASURED_SECONDS and not (idle and self._handled):
            return
        measured = self._handled / max(elapsed, 1e-6)
        self._rate = max(measured, self._rate * _SLOWEST_DECAY)
        self._handled = 0
        self._since = now
