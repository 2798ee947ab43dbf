"""From the publisher's commit to the start of the handler in another process, when everything was asleep before.

Single events at random intervals, long enough for relay and consumer to fall asleep in between. Both processes read
the same monotonic clock of the machine.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Final

import psycopg

from bench import children, line
from bench.publishing import outbox
from bench.report import Figure, Target
from bench.rounds import say
from bench.servers import Server

_SHORTEST: Final = 0.05
_LONGEST: Final = 0.09
_WARM_UP: Final = 10
_P50: Final = Target("<=", 4.0)
_P99: Final = Target("<=", 15.0)


def latency(server: Server, events: int) -> list[Figure]:
    """Percentiles in milliseconds, from the return of COMMIT and from its call (which adds the commit itself)."""
    with server.database() as dsn, children.ready("bench.consumer", "--dsn", dsn) as consumer:
        say(f"  {events} single events")
        commits = _publish(dsn, events + _WARM_UP)
        arrivals = children.stop(consumer)
    missing = [event_id for event_id, _, _ in commits if event_id not in arrivals]
    if missing:
        raise RuntimeError(f"{len(missing)} of {len(commits)} events never arrived")
    measured = commits[_WARM_UP:]
    after = [(arrivals[event_id] - committed) / 1e6 for event_id, _, committed in measured]
    around = [(arrivals[event_id] - called) / 1e6 for event_id, called, _ in measured]
    note = f"{events} events"
    p50, p95, p99 = _percentiles(after)
    return [
        Figure("latency", "commit to handler, p50", p50, "ms", _P50, note=note),
        Figure("latency", "commit to handler, p95", p95, "ms", note=note),
        Figure("latency", "commit to handler, p99", p99, "ms", _P99, note=note),
        Figure("latency", "commit to handler, longest", max(after), "ms", note=note),
        Figure("latency", "the same with the commit itself, p50", _percentiles(around)[0], "ms", note=note),
    ]


def _publish(dsn: str, events: int) -> list[tuple[str, int, int]]:
    """Event id, and when COMMIT was called and returned, in nanoseconds of the machine's monotonic clock."""
    target = outbox(dsn)
    intervals = random.Random(2)
    commits = []
    with psycopg.connect(dsn) as connection:
        for number in range(events):
            time.sleep(intervals.uniform(_SHORTEST, _LONGEST))
            event_id = target.publish_event(line.TOPIC, {"n": number, "pad": "x" * line.PADDING}, conn=connection)
            called = time.monotonic_ns()
            connection.commit()
            commits.append((str(event_id), called, time.monotonic_ns()))
    time.sleep(1.0)
    return commits


def _percentiles(values: list[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[94], cuts[98]
