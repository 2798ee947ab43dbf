"""What the database says of a torture run: the tables of the business, and where each delivery is. Plain SELECTs."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import psycopg
from psycopg import sql

from eventbus.testing.torture.facts import Published, Tables

BUSINESS: Final = """
CREATE SCHEMA {business};
CREATE TABLE {business}.published (
    token text PRIMARY KEY, event_id text NOT NULL, key text, sequence bigint NOT NULL, due bigint NOT NULL
);
CREATE TABLE {business}.effects (queue text NOT NULL, event_id text NOT NULL, call text NOT NULL);
"""
DELIVERED: Final = """
SELECT q.name, o.payload ->> 'token' FROM {bus}.deliveries d
JOIN {bus}.queues q ON q.id = d.queue_id JOIN {bus}.outbox o ON o.id = d.outbox_id
"""
UNDONE: Final = """
WITH position AS (
    SELECT queue_id, lane, max(hi) AS hi FROM {bus}.claims GROUP BY queue_id, lane
), undone AS (
    SELECT d.queue_id, d.outbox_id, 'waiting' AS place
    FROM {bus}.deliveries d LEFT JOIN position p USING (queue_id, lane)
    WHERE d.replay_id = 0 AND d.seq > coalesce(p.hi, 0)
    UNION ALL
    SELECT d.queue_id, d.outbox_id, 'held' FROM {bus}.claims c JOIN {bus}.deliveries d USING (queue_id, lane)
    WHERE d.seq BETWEEN c.lo AND c.hi
      AND NOT EXISTS (SELECT FROM {bus}.settlements s WHERE s.claim_id = c.id)
      AND NOT EXISTS (SELECT FROM {bus}.progress p WHERE p.claim_id = c.id AND p.seq = d.seq)
    UNION ALL
    SELECT e.queue_id, e.outbox_id, e.state FROM {bus}.exceptions e WHERE e.range_hi IS NULL
    UNION ALL
    SELECT d.queue_id, d.outbox_id, e.state FROM {bus}.exceptions e JOIN {bus}.deliveries d USING (queue_id, lane)
    WHERE e.range_hi IS NOT NULL AND d.seq BETWEEN e.seq AND e.range_hi
)
SELECT q.name, o.payload ->> 'token', u.place FROM undone u
JOIN {bus}.queues q ON q.id = u.queue_id JOIN {bus}.outbox o ON o.id = u.outbox_id
"""
LETTERS: Final = """
SELECT q.name, l.payload ->> 'token', l.attempts FROM {bus}.dead_letters l JOIN {bus}.queues q ON q.id = l.queue_id
"""
RELAYED: Final = """
SELECT (SELECT count(*) FROM {bus}.outbox) = (SELECT coalesce(sum(events), 0) FROM {bus}.ticks)
   AND NOT EXISTS (SELECT FROM {bus}.scheduled)
"""
EFFECT: Final = "INSERT INTO {}.effects (queue, event_id, call) VALUES (%s, %s, %s)"
ROW: Final = "INSERT INTO {}.published (token, event_id, key, sequence, due) VALUES (%s, %s, %s, %s, %s)"
NAME: Final = "SELECT set_config('application_name', %s, false)"
"""Gives a connection the name under which it can be terminated."""
TERMINATE: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user
  AND (application_name = %s OR (%s AND application_name LIKE 'eventbus %%'))
ORDER BY random() LIMIT 2
"""
"""The name of the publishers' connections, and whether those of all consumers may be hit too."""
WORKERS: Final = "SELECT pid FROM {bus}.workers"
BINDINGS: Final = "SELECT count(*) FROM {bus}.bindings"


class Database:
    """The two schemas of one run, on one connection in autocommit mode."""

    def __init__(self, connection: psycopg.Connection, schema: str) -> None:
        self._connection = connection
        self._names = {"bus": sql.Identifier(schema), "business": sql.Identifier(business(schema))}

    def create(self) -> None:
        """Make the tables of the business."""
        self._connection.execute(sql.SQL(BUSINESS).format(**self._names))

    def drop(self) -> None:
        """Drop both schemas with everything in them."""
        self._connection.execute("SET client_min_messages TO warning")
        for name in self._names.values():
            self._connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(name))

    def look(self) -> Tables:
        """Everything at one moment."""
        with self._connection.transaction():
            self._connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            published = self._rows("SELECT token, event_id, key, sequence, due FROM {business}.published")
            return Tables(
                published={row[0]: Published(*row) for row in published},
                delivered=Counter(self._rows(DELIVERED)),
                undone=self._rows(UNDONE),
                letters=self._rows(LETTERS),
                effects=self._rows("SELECT queue, event_id, call FROM {business}.effects"),
            )

    def is_quiet(self) -> bool:
        """Whether everything is relayed and nothing is under way; what is parked stays."""
        return bool(self._rows(RELAYED)[0][0]) and all(row[2] == "parked" for row in self._rows(UNDONE))

    def workers(self) -> frozenset[int]:
        """The processes that have ever registered as workers."""
        return frozenset(row[0] for row in self._rows(WORKERS))

    def bindings(self) -> int:
        """How many topics are bound to queues."""
        return int(self._rows(BINDINGS)[0][0])

    def _rows(self, statement: Any) -> list[Any]:
        return self._connection.execute(sql.SQL(statement).format(**self._names)).fetchall()


def business(schema: str) -> str:
    """The schema of the business tables next to the schema of the bus."""
    return f"{schema}_business"
