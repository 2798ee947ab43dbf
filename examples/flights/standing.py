"""How far the demo is, asked of the bus as ``eventbus queues`` does it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pandas as pd  # type: ignore[import-untyped]
import psycopg

from eventbus.postgres import admin

_RATE_WINDOW: Final = 2.0
"""Seconds over which the rate is taken."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far everything is at one moment.

    ``handled`` by queue, ``rate`` in handled events per second, ``lag``: seconds that the oldest waiting event waits,
    ``running``: deliveries that workers hold, ``quiet``: nothing is on its way, ``workers``: the process ids that the
    bus takes for alive.
    """

    seconds: float
    published: int
    relayed: int
    handled: Mapping[str, int]
    rate: float
    lag: float
    running: int
    dead: int
    quiet: bool
    workers: frozenset[int]


class Look:
    """Looks at the bus again and again. ``frame``: the flights in the order in which they are published."""

    def __init__(self, connection: psycopg.Connection, schema: str, frame: pd.DataFrame) -> None:
        self._connection = connection
        self._schema = schema
        self._departed = frame.dep_time.notna().cumsum().tolist()
        self._started = time.monotonic()
        self._rates: deque[tuple[float, int]] = deque()

    @property
    def totals(self) -> dict[str, int]:
        """Every count at the end, by the name under which it is shown."""
        everything = len(self._departed)
        return {"published": everything, "relayed": everything, **self._delivered(everything)}

    def look(self, published: int) -> Standing:
        """The standing now, when ``published`` flights have been committed."""
        status = admin.status(self._connection, self._schema)
        queues = admin.queues(self._connection, self._schema)
        seconds = time.monotonic() - self._started
        relayed = max(0, published - status.backlog.events)
        unfinished = {queue.name: queue.waiting + queue.running + queue.retrying for queue in queues}
        handled = {
            name: max(0, delivered - unfinished.get(name, delivered))
            for name, delivered in self._delivered(relayed).items()
        }
        return Standing(
            seconds=seconds,
            published=published,
            relayed=relayed,
            handled=handled,
            rate=self._rate(seconds, sum(handled.values())),
            lag=max([status.backlog.oldest_age or 0.0, *(queue.oldest_age or 0.0 for queue in queues)]),
            running=sum(queue.running for queue in queues),
            dead=sum(queue.dead for queue in queues),
            quiet=status.backlog.events == 0 and len(unfinished) > 0 and not any(unfinished.values()),
            workers=frozenset(worker.pid for worker in status.workers),
        )

    def _delivered(self, relayed: int) -> dict[str, int]:
        """How many of the first ``relayed`` flights each queue gets."""
        departed = self._departed[relayed - 1] if relayed else 0
        return {"carrier-delays": departed, "airport-board": relayed, "audit": relayed}

    def _rate(self, seconds: float, handled: int) -> float:
        self._rates.append((seconds, handled))
        while self._rates[0][0] < seconds - _RATE_WINDOW:
            self._rates.popleft()
        (before, less), (now, more) = self._rates[0], self._rates[-1]
        return max(0.0, (more - less) / (now - before)) if now > before else 0.0
