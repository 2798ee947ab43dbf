"""What the database says when all is over: the application's tables and where each delivery is. Plain SQL only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import psycopg

APPLICATION: Final = """
CREATE TABLE torture_published (
    token text PRIMARY KEY, event_id text NOT NULL, topic text NOT NULL, key text, payload text NOT NULL,
    headers text, delayed boolean NOT NULL, transaction integer NOT NULL, place integer NOT NULL,
    published_at bigint NOT NULL
);
CREATE TABLE torture_effects (queue text NOT NULL, event_id text NOT NULL, call text NOT NULL);
"""
PLACES: Final = """
WITH position AS (
    SELECT queue_id, lane, max(hi) AS hi FROM eventbus.claims GROUP BY queue_id, lane
), undone AS (
    SELECT d.queue_id, d.outbox_id, 'waiting' AS place
    FROM eventbus.deliveries d LEFT JOIN position p USING (queue_id, lane)
    WHERE d.replay_id = 0 AND d.seq > coalesce(p.hi, 0)
    UNION ALL
    SELECT d.queue_id, d.outbox_id, 'held'
    FROM eventbus.claims c JOIN eventbus.deliveries d USING (queue_id, lane)
    WHERE d.seq BETWEEN c.lo AND c.hi
      AND NOT EXISTS (SELECT FROM eventbus.settlements s WHERE s.claim_id = c.id)
      AND NOT EXISTS (SELECT FROM eventbus.progress p WHERE p.claim_id = c.id AND p.seq = d.seq)
    UNION ALL
    SELECT e.queue_id, e.outbox_id, e.state FROM eventbus.exceptions e WHERE e.range_hi IS NULL
    UNION ALL
    SELECT d.queue_id, d.outbox_id, e.state
    FROM eventbus.exceptions e JOIN eventbus.deliveries d USING (queue_id, lane)
    WHERE e.range_hi IS NOT NULL AND d.seq BETWEEN e.seq AND e.range_hi
    UNION ALL
    SELECT l.queue_id, l.outbox_id, 'dead' FROM eventbus.dead_letters l
)
SELECT q.name, u.place, o.payload ->> 'token' FROM undone u
JOIN eventbus.queues q ON q.id = u.queue_id LEFT JOIN eventbus.outbox o ON o.id = u.outbox_id
"""
DELIVERED: Final = """
SELECT q.name, o.payload ->> 'token' FROM eventbus.deliveries d
JOIN eventbus.queues q ON q.id = d.queue_id LEFT JOIN eventbus.outbox o ON o.id = d.outbox_id
"""
LETTERS: Final = """
SELECT q.name, l.payload ->> 'token', l.event_id::text, l.topic, l.key, l.payload::text, l.headers::text, l.attempts,
       l.reason
FROM eventbus.dead_letters l JOIN eventbus.queues q ON q.id = l.queue_id
"""
PROCESSED: Final = """
SELECT q.name, p.event_id::text, (extract(epoch FROM p.completed_at) * 1000000)::bigint * 1000
FROM eventbus.processed_events p JOIN eventbus.queues q ON q.id = p.queue_id WHERE p.replay_id = 0
"""
QUIET: Final = """
SELECT NOT EXISTS (SELECT FROM eventbus.scheduled)
   AND NOT EXISTS (SELECT FROM eventbus.exceptions e WHERE e.state <> 'parked')
   AND NOT EXISTS (SELECT FROM eventbus.claims c
                   WHERE NOT EXISTS (SELECT FROM eventbus.settlements s WHERE s.claim_id = c.id))
   AND NOT EXISTS (SELECT FROM (SELECT queue_id, lane, max(seq) AS newest FROM eventbus.deliveries GROUP BY 1, 2) d
                   LEFT JOIN (SELECT queue_id, lane, max(hi) AS hi FROM eventbus.claims GROUP BY 1, 2) c
                   USING (queue_id, lane) WHERE d.newest > coalesce(c.hi, 0)),
    (SELECT count(*) FROM eventbus.outbox), (SELECT count(*) FROM torture_published),
    (SELECT sum(events)::bigint FROM eventbus.ticks)
"""

Place = Literal["waiting", "held", "claimed", "parked", "dead"]
Spot = tuple[str, str]
"""One event in one queue: the name of the queue and the token."""


@dataclass(frozen=True, slots=True)
class Published:
    """One event as its publisher wrote it into the application's table, in the transaction that published it."""

    token: str
    event_id: str
    topic: str
    key: str | None
    payload: str
    headers: str | None
    delayed: bool
    transaction: int
    place: int
    published_at: int
    """Nanoseconds, just before it was published."""


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter."""

    queue: str
    token: str
    event_id: str
    topic: str
    key: str | None
    payload: str
    headers: str | None
    attempts: int
    reason: str

    @property
    def spot(self) -> Spot:
        """Which event in which queue."""
        return self.queue, self.token


@dataclass(frozen=True, slots=True)
class Tables:
    """One snapshot of everything that counts."""

    published: Mapping[str, Published]
    delivered: Counter[Spot]
    places: Mapping[Spot, list[Place]]
    """Where the deliveries are that are not done."""
    letters: list[Letter]
    processed: Mapping[tuple[str, str], int | None]
    """When an execution was completed, in nanoseconds, by queue and event id; none for one that is pending."""
    effects: list[tuple[str, str, str]]
    """Queue, event id and call of each effect of a transactional handler."""


def look(connection: psycopg.Connection) -> Tables:
    """Read all of it at one moment."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        places: dict[Spot, list[Place]] = {}
        for queue, place, token in _rows(connection, PLACES):
            places.setdefault((queue, token), []).append(place)
        return Tables(
            published={row[0]: Published(*row) for row in _rows(connection, "SELECT * FROM torture_published")},
            delivered=Counter(_rows(connection, DELIVERED)),
            places=places,
            letters=[Letter(*row) for row in _rows(connection, LETTERS)],
            processed={(queue, event_id): at for queue, event_id, at in _rows(connection, PROCESSED)},
            effects=_rows(connection, "SELECT * FROM torture_effects"),
        )


def is_quiet(connection: psycopg.Connection) -> bool:
    """Whether all that was published is relayed, and done, dead, or parked behind what is dead."""
    [(quiet, in_outbox, published, relayed)] = _rows(connection, QUIET)
    return bool(quiet and in_outbox == published == relayed)


def _rows(connection: psycopg.Connection, statement: str) -> list[Any]:
    return connection.execute(statement.encode()).fetchall()
