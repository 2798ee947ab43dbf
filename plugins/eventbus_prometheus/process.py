"""What one worker process has done since it started: added up while it works, read when somebody scrapes.

Hooks add on the event loop; a scrape reads in a thread of its own.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from eventbus.plugins import Counted, Timing, by_calls

OUTCOMES: Final = ("done", "duplicate", "discarded", "retry", "dead", "released", "deferred", "parked")
"""What can come of a delivery; each begins at 0."""


class Distribution:
    """How many of some values lie up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._upto = [0] * len(bounds)
        self._count = 0
        self._sum = 0.0

    def add(self, values: Iterable[float], calls: int = 1) -> None:
        """Add values, each for so many calls. Sorting them and looking up the bounds costs less than each value."""
        ascending = sorted(values)
        for n, bound in enumerate(self._bounds):
            self._upto[n] += calls * bisect_right(ascending, bound)
        self._count += calls * len(ascending)
        self._sum += calls * sum(ascending)

    def copy(self) -> Distribution:
        """One that does not change any more."""
        twin = Distribution(self._bounds)
        twin._upto, twin._count, twin._sum = self._upto.copy(), self._count, self._sum
        return twin

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: each with all below it."""
        upto = [(str(bound), float(number)) for bound, number in zip(self._bounds, self._upto, strict=True)]
        return [*upto, ("+Inf", float(self._count))]

    @property
    def sum(self) -> float:
        """The sum of all values."""
        return self._sum


@dataclass(slots=True)
class Totals:
    """What was added up so far. ``times``: of the handler, and of waiting for it. ``away_since``: monotonic."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    claimed: Counter[str] = field(default_factory=Counter)
    relayed: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    times: dict[str, tuple[Distribution, Distribution]] = field(default_factory=dict)
    taken_over: int = 0
    took_over_from: int = 0
    outages: int = 0
    away_seconds: float = 0.0
    away_since: float | None = None

    def copy(self) -> Totals:
        """A copy that does not change any more."""
        return replace(
            self,
            outcomes=self.outcomes.copy(),
            claimed=self.claimed.copy(),
            relayed=self.relayed.copy(),
            lost=self.lost.copy(),
            times={queue: (handling.copy(), waiting.copy()) for queue, (handling, waiting) in self.times.items()},
        )


class Process:
    """Counts and distributions of one process, per queue."""

    def __init__(self, handler_bounds: Sequence[float], waiting_bounds: Sequence[float]) -> None:
        self._bounds = (handler_bounds, waiting_bounds)
        self._lock = threading.Lock()
        self._totals = Totals()

    def know(self, queues: Iterable[str]) -> None:
        """These queues are consumed here: their counters begin at 0 before anything happens."""
        with self._lock:
            for queue in queues:
                self._times_of(queue)
                for outcome in OUTCOMES:
                    self._totals.outcomes[queue, outcome] += 0
                for counter in (self._totals.claimed, self._totals.lost):
                    counter[queue] += 0

    def counted(self, queue: str, counted: Counted, ahead: float | None) -> None:
        """Outcomes were stored. ``ahead``: database's seconds since 1970 minus monotonic ones; None: not known."""
        alike = by_calls(counted.timings)
        with self._lock:
            for outcome, number in counted.counts.items():
                self._totals.outcomes[queue, outcome] += number
            handled, waited = self._times_of(queue)
            for calls, timings in alike.items():
                handled.add((timing.seconds for timing in timings), calls)
                waited.add([] if ahead is None else _waited(timings, ahead), calls)

    def claimed(self, queue: str, number: int) -> None:
        """Deliveries were claimed."""
        with self._lock:
            self._totals.claimed[queue] += number

    def relayed(self, deliveries: Mapping[str, int]) -> None:
        """Events were moved into queues."""
        with self._lock:
            self._totals.relayed.update(deliveries)

    def lost(self, queue: str, number: int) -> None:
        """Others took over what this process held."""
        with self._lock:
            self._totals.lost[queue] += number

    def took_over(self, workers: int, deliveries: int) -> None:
        """This process took over from silent workers."""
        with self._lock:
            self._totals.took_over_from += workers
            self._totals.taken_over += deliveries

    def outage_began(self) -> None:
        """The database is away."""
        with self._lock:
            self._totals.outages += 1
            self._totals.away_since = time.monotonic()

    def outage_ended(self, seconds: float) -> None:
        """It is back."""
        with self._lock:
            self._totals.away_seconds += seconds
            self._totals.away_since = None

    def families(self, pools: Mapping[str, tuple[int, int]]) -> Iterator[Metric]:
        """All metrics. ``pools``: per queue how many handlers run, and how many may."""
        with self._lock:  # the event loop waits for it meanwhile
            totals = self._totals.copy()
        return _families(totals, pools)

    def _times_of(self, queue: str) -> tuple[Distribution, Distribution]:
        found = self._totals.times.get(queue)
        if found is None:
            handler, waiting = self._bounds
            found = self._totals.times[queue] = (Distribution(handler), Distribution(waiting))
        return found


def _families(totals: Totals, pools: Mapping[str, tuple[int, int]]) -> Iterator[Metric]:
    yield _counter(
        "eventbus_events", "Deliveries whose outcome this process stored.", ("queue", "outcome"), totals.outcomes
    )
    yield _counter("eventbus_claimed_events", "Deliveries that this process claimed.", ("queue",), totals.claimed)
    yield _counter(
        "eventbus_relayed_events", "Deliveries that this process moved into queues.", ("queue",), totals.relayed
    )
    yield _counter("eventbus_lost_events", "Deliveries that others took over from here.", ("queue",), totals.lost)
    yield CounterMetricFamily(
        "eventbus_taken_over_events", "Deliveries that this process took over.", totals.taken_over
    )
    yield CounterMetricFamily(
        "eventbus_taken_over_workers", "Silent workers that this process took over from.", totals.took_over_from
    )
    yield from _histograms(totals.times)
    yield from _outage(totals)
    yield from _pools(pools)


def _histograms(times: Mapping[str, tuple[Distribution, Distribution]]) -> Iterator[Metric]:
    handler = HistogramMetricFamily("eventbus_handler_seconds", "How long handlers took.", labels=("queue",))
    waiting = HistogramMetricFamily(
        "eventbus_waiting_seconds", "From an event's INSERT to the start of its first handling.", labels=("queue",)
    )
    for queue, both in times.items():
        for family, distribution in zip((handler, waiting), both, strict=True):
            family.add_metric((queue,), distribution.buckets, distribution.sum)
    yield handler
    yield waiting


def _outage(totals: Totals) -> Iterator[Metric]:
    lasting = 0.0 if totals.away_since is None else time.monotonic() - totals.away_since
    away = float(totals.away_since is not None)
    yield GaugeMetricFamily("eventbus_database_away", "1 while this process cannot work with the database.", away)
    yield CounterMetricFamily("eventbus_database_outages", "Outages of the database, for this process.", totals.outages)
    yield CounterMetricFamily(
        "eventbus_database_away_seconds",
        "How long the database was away, for this process.",
        totals.away_seconds + lasting,
    )


def _waited(timings: Iterable[Timing], ahead: float) -> list[float]:
    """How long events waited that were handled for the first time; a clock that is set back is no negative time."""
    return [max(began + ahead - sent.timestamp(), 0.0) for sent, began, _, _ in timings if sent is not None]


def _counter(
    name: str, what: str, labels: Sequence[str], values: Mapping[tuple[str, str], int] | Mapping[str, int]
) -> Metric:
    family = CounterMetricFamily(name, what, labels=labels)
    for key, value in values.items():
        family.add_metric((key,) if isinstance(key, str) else key, value)
    return family


def _pools(pools: Mapping[str, tuple[int, int]]) -> Iterator[Metric]:
    running = GaugeMetricFamily("eventbus_handlers_running", "Handlers that run in this process.", labels=("queue",))
    slots = GaugeMetricFamily("eventbus_handlers_limit", "Handlers that may run in this process.", labels=("queue",))
    for queue, (now, most) in pools.items():
        running.add_metric((queue,), now)
        slots.add_metric((queue,), most)
    yield running
    yield slots
