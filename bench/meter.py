"""Counts handled events inside a process under measurement, equally cheap for every contender."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

SLICES = 20


class Meter:
    """Counts to ``events`` and notes the time at every twentieth of them. Safe to call from several threads."""

    def __init__(self, events: int, finished: Callable[[], None]) -> None:
        self._events = events
        self._step = max(1, events // SLICES)
        self._count = itertools.count(1).__next__
        self._finished = finished
        self._marks: list[float] = []
        self._cpu = 0.0
        self._started = 0.0

    def start(self) -> None:
        """Set the clocks to zero."""
        self._cpu = time.process_time()
        self._started = time.perf_counter()

    def count(self) -> None:
        """One more event was handled."""
        number = self._count()
        if number % self._step == 0:
            self._marks.append(time.perf_counter())
        if number == self._events:
            self._finished()

    def result(self, handled: int) -> dict[str, object]:
        """What was measured until now, for :class:`bench.children.Drained`."""
        now = time.perf_counter()
        times = [self._started, *self._marks]
        return {
            "events": handled,
            "seconds": now - self._started,
            "cpu_seconds": time.process_time() - self._cpu,
            "slices": [self._step / (later - earlier) for earlier, later in itertools.pairwise(times)],
        }
