"""What this process has counted of each queue since it was last written. Bounded: some kilobytes for each queue.

Before it: the hooks. After it: rows for the SQL function ``stats_add``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from eventbus.plugins import Counted, Timing, by_calls
from eventbus_stats.histogram import Histogram

_TOGETHER: Final = 1_000
"""So many times are sorted into their buckets at once, which costs less than one by one."""

_OUTCOMES: Final[Mapping[str, str]] = {
    "done": "handled",
    "duplicate": "duplicates",
    "discarded": "discarded",
    "retry": "retried",
    "dead": "dead",
    "deferred": "deferred",
    "released": "released",
}
"""Which column counts an outcome. Parked deliveries are counted when they are handled."""


@dataclass(slots=True)
class Tally:
    """One queue. ``timings`` are those that were not sorted into the buckets yet."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: Histogram = field(default_factory=Histogram)
    waited: Histogram = field(default_factory=Histogram)
    timings: list[Timing] = field(default_factory=list)

    def add(self, counted: Counted, ahead: float | None) -> None:
        """Count a group. ``ahead``: what to add to monotonic seconds for the database's time, None: unknown."""
        counts = self.counts
        for outcome, number in counted.counts.items():
            if (column := _OUTCOMES.get(outcome)) is not None:
                counts[column] += number
        if failed := counted.failures:
            counts["failed"] += failed
        self.timings += counted.timings
        if len(self.timings) >= _TOGETHER:
            self.sort(ahead)

    def sort(self, ahead: float | None) -> None:
        """Sort the timings into the buckets."""
        for calls, timings in by_calls(self.timings).items():
            self.seconds.add([timing.seconds for timing in timings], calls)
            self.waited.add(_waited(timings, ahead), calls)
        self.timings.clear()

    def row(self, queue: str) -> dict[str, Any]:
        """What ``stats_add`` wants to know."""
        return {
            "queue": queue,
            **self.counts,
            "seconds_sum": self.seconds.total,
            "seconds_max": self.seconds.longest,
            "seconds_buckets": self.seconds.trimmed,
            "waited_sum": self.waited.total,
            "waited_max": self.waited.longest,
            "waited_buckets": self.waited.trimmed,
        }


class Gathering:
    """All queues. ``ahead`` tells what to add to monotonic seconds for the database's time, None while not known.

    Several workers of one process may use it from their threads.
    """

    def __init__(self, ahead: Callable[[], float | None]) -> None:
        self._ahead = ahead
        self._tallies: dict[str, Tally] = {}
        self._lock = threading.Lock()

    def count(self, queue: str, column: str, number: int) -> None:
        """Add to one counter of a queue."""
        with self._lock:
            self._of(queue).counts[column] += number

    def add(self, queue: str, counted: Counted) -> None:
        """Count a group of a queue."""
        with self._lock:
            self._of(queue).add(counted, self._ahead())

    def take(self) -> list[dict[str, Any]]:
        """A row for each queue in which something happened since the last call, which is forgotten here."""
        with self._lock:
            taken, self._tallies = self._tallies, {}
            ahead = self._ahead()
        for tally in taken.values():
            tally.sort(ahead)
        return [tally.row(queue) for queue, tally in sorted(taken.items()) if any(tally.counts.values())]

    def _of(self, queue: str) -> Tally:
        tally = self._tallies.get(queue)
        if tally is None:
            tally = self._tallies[queue] = Tally()
        return tally


def _waited(timings: Iterable[Timing], ahead: float | None) -> list[float]:
    """How long first attempts waited, in seconds; nothing while the database's time is not known."""
    if ahead is None:
        return []
    return [
        started + ahead - published_at.timestamp()
        for published_at, started, _, _ in timings
        if published_at is not None
    ]
