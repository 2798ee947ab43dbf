"""When a delivery that was running as a worker died gets a process for itself.

It must run alone, so what runs now has to end first, and nothing new may start meanwhile. A handler that lasts for
hours, or for ever, would hold up everything else in this process. So the wait is bounded, and after one in vain the
process works as usual for ten times as long before it waits again, for twice as long.
"""

from __future__ import annotations

_FIRST_PATIENCE = 1.0
_LONGEST_PATIENCE = 60.0
_WORK_PER_WAIT = 10.0


class Solitude:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self.not_before = 0.0
        """Until then the process works as usual."""
        self._patience = _FIRST_PATIENCE
        self._since: float | None = None

    def worth_waiting(self, now: float) -> bool:
        """Whether to start nothing and wait on for what still runs."""
        if self._since is None:
            self._since = now
        if now - self._since < self._patience:
            return True
        self.not_before = now + _WORK_PER_WAIT * self._patience
        self._patience = min(_LONGEST_PATIENCE, 2 * self._patience)
        self._since = None
        return False

    def reached(self) -> None:
        """Nothing runs."""
        self._patience = _FIRST_PATIENCE
        self._since = None
