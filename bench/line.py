"""The bus's side before a measurement: a queue, events that wait in the outbox, and the relay.

Events are written by the server, because their publishing is measured elsewhere. What is measured goes through the
public interface in :mod:`bench.consumer`; the relay is driven by the same SQL function that a worker calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg

from bench.servers import SCHEMA

QUEUE: Final = "bench"
PATTERN: Final = "bench.*"
TOPIC: Final = "bench.event"
PAYLOAD_BYTES: Final = 250
PADDING: Final = PAYLOAD_BYTES - len('{"n":' + 10 * " " + ',"pad":""}')
PAYLOAD_SQL: Final = f"""'{{"n":' || lpad(i::text, 10) || ',"pad":"' || repeat('x', {PADDING}) || '"}}'"""
"""A JSON text of exactly 250 bytes for each ``i``."""

_TICK: Final = 5_000


def connect(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    """A connection in autocommit mode."""
    return psycopg.connect(dsn, autocommit=True)


def run(
    connection: psycopg.Connection[Any], statement: str, parameters: tuple[object, ...] = ()
) -> list[tuple[Any, ...]]:
    """Run a statement in which ``{s}`` stands for the bus's schema."""
    cursor = connection.execute(statement.replace("{s}", SCHEMA).encode(), parameters or None)
    return cursor.fetchall() if cursor.description else []


def declare(connection: psycopg.Connection[Any], **fields: object) -> None:
    """Create the queue and resolve the topic, so that the relay can feed it before a worker was there.

    ``fields`` are those of the engine's ``declare_queues``.
    """
    [(_, queue_id)] = run(
        connection,
        "SELECT name, id FROM {s}.declare_queues(%s::json)",
        (json.dumps([{"name": QUEUE, "patterns": [PATTERN], **fields}]),),
    )
    [(version,)] = run(connection, "SELECT bindings_version FROM {s}.bus")
    run(connection, "SELECT {s}.resolve_topics(%s, %s::json)", (version, json.dumps({TOPIC: [queue_id]})))


def fill(connection: psycopg.Connection[Any], events: int, keys: int = 0) -> None:
    """Publish events of 250 bytes, in transactions of 10,000; then a checkpoint, so that none disturbs what follows.

    With ``keys``, they have so many different keys in turn; without, none.
    """
    key = f"'key-' || mod(i, {keys})" if keys else "NULL"
    for first in range(1, events + 1, 10_000):
        run(
            connection,
            "INSERT INTO {s}.outbox (event_id, topic, key, payload, size)"
            f" SELECT {{s}}.new_event_id(), '{TOPIC}', {key}, ({PAYLOAD_SQL})::json, {PAYLOAD_BYTES}"
            " FROM generate_series(%s::bigint, %s::bigint) AS i ORDER BY i",
            (first, min(first + 9_999, events)),
        )
    checkpoint(connection)


def checkpoint(connection: psycopg.Connection[Any]) -> None:
    """Write out what earlier steps left dirty, where that is allowed."""
    with suppress(psycopg.errors.InsufficientPrivilege):
        connection.execute("CHECKPOINT")


def relay(connection: psycopg.Connection[Any]) -> float:
    """Relay everything that waits; events per second."""
    events = 0
    started = time.perf_counter()
    while True:
        [(state, moved)] = run(connection, "SELECT state, events FROM {s}.tick(%s)", (_TICK,))
        if state == "idle":
            return events / (time.perf_counter() - started)
        if state != "ticked":
            raise RuntimeError(f"the relay did not tick but said {state}")
        events += moved


def require_settled(connection: psycopg.Connection[Any], events: int) -> None:
    """Raise unless exactly ``events`` deliveries are settled, all of them as done: a fast loss is no result."""
    [(settled, astray)] = run(
        connection,
        "SELECT (SELECT coalesce(sum(c.hi - c.lo + 1), 0) FROM {s}.claims c"
        "        JOIN {s}.settlements t ON t.claim_id = c.id AND t.kind = 'settled'),"
        "       (SELECT count(*) FROM {s}.exceptions) + (SELECT count(*) FROM {s}.dead_letters)",
    )
    if settled != events or astray:
        raise RuntimeError(f"{events} events were published, {settled} are settled and {astray} went astray")


@contextmanager
def old_snapshot(dsn: str, *, held: bool) -> Iterator[None]:
    """Another session in the same database that holds a REPEATABLE READ snapshot as long as the block runs."""
    if not held:
        yield
        return
    with psycopg.connect(dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1")
        yield
