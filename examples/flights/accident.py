"""What goes wrong in the demo, on purpose: a consumer is killed in the middle of its work and started again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from examples.flights.processes import Consumer
from examples.flights.standing import Standing

KILL_AT: Final = 0.4
"""Share of the flights after which it happens."""
RESTART_AFTER: Final = 1.0
"""Seconds between the kill and the new start."""


class Accident:
    """Kills ``victim``, starts it again, and says when the bus has noticed."""

    def __init__(self, victim: Consumer, flights: int, lease: float, say: Callable[[str], None]) -> None:
        self._victim = victim
        self._kill_at = flights * KILL_AT
        self._lease = lease
        self._say = say
        self._killed: tuple[int, float] | None = None
        self._restarted = False
        self.over = False

    def go_on(self, standing: Standing) -> None:
        """Do what is due at this standing."""
        if self._killed is None:
            far = standing.handled["audit"] >= self._kill_at and (standing.running or standing.quiet)
            if far and self._victim.pid is not None:
                self._kill(self._victim.pid, standing)
            return
        pid, killed_at = self._killed
        if not self._restarted and standing.seconds >= killed_at + RESTART_AFTER:
            self._restarted = True
            self._victim.start()
            self._say(f"{self._victim.name} is started again as process {self._victim.pid}")
        if self._restarted and not self.over and pid not in standing.workers:
            self.over = True
            self._say(
                f"{standing.seconds - killed_at:.1f} s after the kill: process {pid} is taken for dead, what it held "
                "waits again"
            )

    def _kill(self, pid: int, standing: Standing) -> None:
        self._victim.kill()
        self._killed = pid, standing.seconds
        self._say(
            f"kill -9 of {self._victim.name} (process {pid}) while both held {standing.running:,} deliveries; what was "
            f"its own comes back when its lease ends, after {self._lease:g} s (EVENTBUS_LEASE, 30 s by default)"
        )
