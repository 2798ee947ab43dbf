"""Pauses of queues as operators see and change them; workers pause through ``watching``.

Every function takes one autocommit connection that is in no transaction, and the schema's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import psycopg

from eventbus.postgres.admin import changing, find_queue, looking, many
from eventbus.postgres.copies import duration
from eventbus.postgres.statements import Statements
from eventbus.postgres.watching import MANUAL


@dataclass(frozen=True, slots=True)
class QueuePause:
    """Why nothing of ``queue`` is claimed. ``since``: when ``source`` began to pause it; it may have done so anew.

    ``until``, ``ends_in`` (seconds): none if it only ends when it is resumed. ``probed``: it does not end by itself
    then, but lets one event through to see; ``probing``: that one is out.
    """

    queue: str
    source: str
    reason: str
    since: datetime
    until: datetime | None
    ends_in: float | None
    probed: bool
    probing: bool

    def words(self) -> str:
        """By whom, since when, why, and how it ends, on one line."""
        by = "" if self.source == MANUAL else f" by {self.source}"
        said = f"paused{by} since {self.since.astimezone():%Y-%m-%d %H:%M:%S}: {self.reason}; {self._end()}"
        return " ".join(said.split())

    def _end(self) -> str:
        if self.probing:
            return "one event is let through now to see"
        if self.ends_in is None:
            return f"to go on: eventbus queues resume {self.queue}{'' if self.source == MANUAL else ' --all'}"
        return f"{'one event is let through to see' if self.probed else 'it goes on'} in {duration(self.ends_in)}"


def pauses(connection: psycopg.Connection, schema: str) -> list[QueuePause]:
    """Every pause, by queue, the oldest first."""
    with looking(connection):
        return _lasting(connection, schema)


def paused(connection: psycopg.Connection, schema: str) -> dict[str, tuple[str, ...]]:
    """The same in words, by queue; within a transaction."""
    found: dict[str, tuple[str, ...]] = {}
    for item in _lasting(connection, schema):
        found[item.queue] = (*found.get(item.queue, ()), item.words())
    return found


def pause(connection: psycopg.Connection, schema: str, queue: str, reason: str, seconds: float | None) -> QueuePause:
    """Pause a queue by hand, for ``seconds`` or until it is resumed; a manual pause that is there is replaced.

    What runs goes on. Committed when it returns, and workers are told.
    Raises :class:`~eventbus.postgres.admin.NotFound`.
    """
    find_queue(connection, schema, queue)
    asked = {"queue": queue, "source": MANUAL, "reason": reason, "seconds": seconds}
    with changing(connection):
        connection.execute(Statements("pausing", schema)["pause"], asked)
        [made] = [item for item in _all(connection, schema) if (item.queue, item.source) == (queue, MANUAL)]
    return made


def resume(connection: psycopg.Connection, schema: str, queue: str, *, every: bool = False) -> list[QueuePause]:
    """End the manual pause of a queue, or ``every`` one; those that are gone now.

    Raises :class:`~eventbus.postgres.admin.NotFound`.
    """
    find_queue(connection, schema, queue)
    there = [item for item in pauses(connection, schema) if item.queue == queue and (every or item.source == MANUAL)]
    ended = []
    with changing(connection):
        for item in there:
            asked = {"queue": queue, "source": item.source}
            row = connection.execute(Statements("pausing", schema)["resume"], asked).fetchone()
            if row and row[0]:
                ended.append(item)
    return ended


def _lasting(connection: psycopg.Connection, schema: str) -> list[QueuePause]:
    """Those that are not over."""
    return [item for item in _all(connection, schema) if item.probed or item.ends_in != 0]


def _all(connection: psycopg.Connection, schema: str) -> list[QueuePause]:
    return many(connection, QueuePause, Statements("pausing", schema)["list"], {})
