"""What the minutes of a period say about each queue: rates, errors, percentiles. Read by SQL, worked out here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from eventbus_stats.histogram import percentile
from eventbus_stats.sql import NAMES, QUEUES, RANGE

if TYPE_CHECKING:
    import psycopg

MOST_STEPS: Final = 60
"""The chart of a queue has at most so many whole steps, each of whole minutes, and the one that has begun."""


@dataclass(frozen=True, slots=True)
class Times:
    """In seconds. Percentiles are off by less than the factor 1.42, and never above ``longest``."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class Counts:
    """How many deliveries; ``lost_leases`` counts leases."""

    published: int = 0
    handled: int = 0
    failed: int = 0
    retried: int = 0
    dead: int = 0
    duplicates: int = 0
    discarded: int = 0
    deferred: int = 0
    released: int = 0
    lost_leases: int = 0

    @property
    def error_rate(self) -> float | None:
        """Which share of the handler's calls failed; None without calls."""
        calls = self.handled + self.discarded + self.failed
        return self.failed / calls if calls else None


@dataclass(frozen=True, slots=True)
class QueueReport:
    """One queue. ``chart``: what was handled in each step of the period; the last one has only begun."""

    queue: str
    counts: Counts
    error_rate: float | None
    per_second: float
    """Handled, on average since the first minute of the period in which anything happened."""
    per_second_now: float
    """Handled, since the beginning of the minute before this one."""
    handler: Times | None
    waiting: Times | None
    chart: Sequence[int]


@dataclass(frozen=True, slots=True)
class Report:
    """All queues, the busiest first. ``newest``: the newest minute that was ever counted."""

    since: datetime
    until: datetime
    newest: datetime | None
    step_seconds: int
    total: Counts
    error_rate: float | None
    per_second: float
    per_second_now: float
    queues: Sequence[QueueReport]


def look(connection: psycopg.Connection, schema: str, since: datetime | timedelta, queue: str | None = None) -> Report:
    """Ask the database for what happened since a moment or in the last so much time; one queue or all."""
    from psycopg.rows import dict_row

    wanted = {
        "moment": since if isinstance(since, datetime) else None,
        "age": since if isinstance(since, timedelta) else None,
        "queue": queue,
    }
    with connection.cursor(row_factory=dict_row) as cursor:
        [bounds] = cursor.execute(_for(schema, RANGE), wanted).fetchall()
        step = step_of(bounds["since"], bounds["now"])
        asked = {"since": bounds["since"], "queue": queue, "step": step, "recent": recent_of(bounds["now"])}
        rows = cursor.execute(_for(schema, QUEUES), asked).fetchall()
    return report_of(rows, bounds["since"], bounds["now"], bounds["newest"])


def names(connection: psycopg.Connection, schema: str) -> list[str]:
    """The queues that there are, or of which there are figures."""
    return [name for (name,) in connection.execute(_for(schema, NAMES)).fetchall()]


def step_of(since: datetime, until: datetime) -> int:
    """The length of the steps of the charts, in seconds."""
    minutes = (until - since) // timedelta(minutes=1)
    return 60 * max(1, math.ceil(minutes / MOST_STEPS))


def recent_of(now: datetime) -> datetime:
    """From when on what happened counts as happening now."""
    return now.astimezone(UTC).replace(second=0, microsecond=0) - timedelta(minutes=1)


def report_of(rows: Sequence[Mapping[str, Any]], since: datetime, until: datetime, newest: datetime | None) -> Report:
    """The report of what the statement ``QUEUES`` has found."""
    first = min((row["first"] for row in rows), default=since)
    elapsed = max((until - max(first, since)).total_seconds(), 1.0)
    recently = max((until - max(first, recent_of(until))).total_seconds(), 1.0)
    step = step_of(since, until)
    steps = math.floor((until - since).total_seconds() / step) + 1
    queues = []
    for row in rows:
        counts = _counts([row])
        chart = [0] * steps
        for number, handled in row["steps"].items():
            chart[min(int(number), steps - 1)] += handled
        queues.append(
            QueueReport(
                row["queue"],
                counts,
                counts.error_rate,
                counts.handled / elapsed,
                (row["recent"] or 0) / recently,
                times_of(row["seconds_buckets"], row["seconds_sum"], row["seconds_max"]),
                times_of(row["waited_buckets"], row["waited_sum"], row["waited_max"]),
                chart,
            )
        )
    queues.sort(key=lambda each: (-each.counts.handled, -each.counts.published, each.queue))
    total = _counts(rows)
    now = sum(each.per_second_now for each in queues)
    return Report(since, until, newest, step, total, total.error_rate, total.handled / elapsed, now, queues)


def times_of(buckets: Sequence[int], total: float, longest: float) -> Times | None:
    """What a histogram says; None if it is empty."""
    p50, p95, p99 = (percentile(buckets, share, longest) for share in (0.5, 0.95, 0.99))
    if p50 is None or p95 is None or p99 is None:
        return None
    count = sum(buckets)
    return Times(count, total / count, p50, p95, p99, longest)


def _counts(rows: Sequence[Mapping[str, Any]]) -> Counts:
    return Counts(**{field.name: sum(row[field.name] for row in rows) for field in fields(Counts)})


def _for(schema: str, statement: str) -> bytes:
    from psycopg.sql import Identifier

    return statement.replace("{schema}", Identifier(schema).as_string()).encode()
