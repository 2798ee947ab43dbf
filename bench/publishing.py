"""Publishing from one process: singly against a bare INSERT, and in bulk.

The table to compare with is the outbox without its trigger: same columns, defaults, indexes and checks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final
from uuid import uuid4

import orjson
import psycopg

from bench import line
from bench.report import Figure, Target, median, ratio
from bench.rounds import take_turns
from bench.servers import SCHEMA, Server
from eventbus import EventBus
from eventbus.publishing.outbox import Outbox
from eventbus.settings import load

_BULK: Final = 1_000
_PAYLOAD: Final = {"n": 1234567890, "pad": "x" * line.PADDING}
_BARE_INSERT: Final = (
    f"INSERT INTO {SCHEMA}.bare (event_id, topic, payload, size) VALUES (%s, %s, %s::json, %s)".encode()
)


def create_bare(connection: psycopg.Connection[Any]) -> None:
    """The table without a trigger."""
    line.run(connection, "CREATE TABLE {s}.bare (LIKE {s}.outbox INCLUDING ALL)")


def outbox(dsn: str) -> Outbox:
    """The outbox of a bus on ``dsn``."""
    return EventBus(load({"dsn": dsn})).outbox


def publish_one(connection: psycopg.Connection[Any], target: Outbox) -> None:
    """One event in one transaction, through the bus."""
    target.publish_event(line.TOPIC, _PAYLOAD, conn=connection)
    connection.commit()


def insert_one(connection: psycopg.Connection[Any]) -> None:
    """The same by hand."""
    payload = orjson.dumps(_PAYLOAD).decode()
    connection.execute(_BARE_INSERT, (uuid4(), line.TOPIC, payload, len(payload)))
    connection.commit()


def publish(server: Server, events: int, rounds: int) -> list[Figure]:
    """Single events: ``publish_event`` and commit, against INSERT and COMMIT."""
    with server.database() as dsn, psycopg.connect(dsn) as connection:
        create_bare(connection)
        connection.commit()
        target = outbox(dsn)
        ours: Callable[[], float] = functools.partial(_rate, functools.partial(publish_one, connection, target), events)
        theirs: Callable[[], float] = functools.partial(_rate, functools.partial(insert_one, connection), events)
        ours(), theirs()  # both statements are prepared now
        results = take_turns({"publish_event": ours, "bare INSERT": theirs}, rounds)
    figures = [median("publish", f"{name} + COMMIT", found, "events/s") for name, found in results.items()]
    ours_by_theirs = ratio("publish", "publish_event / bare INSERT", *results.values(), target=Target(">=", 0.9))
    return [*figures, ours_by_theirs]


def bulk(server: Server, events: int, rounds: int) -> list[Figure]:
    """Many events: ``publish_events`` of 1,000 per transaction, against ``executemany``."""
    with server.database() as dsn, psycopg.connect(dsn) as connection:
        create_bare(connection)
        connection.commit()
        target = outbox(dsn)
        ours: Callable[[], float] = functools.partial(
            _rate, functools.partial(_publish_many, connection, target), events, _BULK
        )
        theirs: Callable[[], float] = functools.partial(
            _rate, functools.partial(_insert_many, connection), events, _BULK
        )
        results = take_turns({f"publish_events({_BULK:,})": ours, f"bare executemany({_BULK:,})": theirs}, rounds)
    return [median("bulk", f"{name} + COMMIT", found, "events/s") for name, found in results.items()]


def _publish_many(connection: psycopg.Connection[Any], target: Outbox) -> None:
    target.publish_events([(line.TOPIC, _PAYLOAD)] * _BULK, conn=connection)
    connection.commit()


def _insert_many(connection: psycopg.Connection[Any]) -> None:
    payload = orjson.dumps(_PAYLOAD).decode()
    with connection.cursor() as cursor:
        cursor.executemany(_BARE_INSERT, [(uuid4(), line.TOPIC, payload, len(payload)) for _ in range(_BULK)])
    connection.commit()


def _rate(step: Callable[[], None], events: int, per_step: int = 1) -> float:
    started = time.perf_counter()
    for _ in range(events // per_step):
        step()
    return events / (time.perf_counter() - started)
