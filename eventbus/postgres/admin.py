"""What the command line asks about the bus as a whole and about queues, and the little that it changes.

Every function takes one autocommit connection that is in no transaction, and the schema's name. Looking is one
snapshot; changing happens in short transactions of their own. The engine's hot path does not pass here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from eventbus.errors import EventBusError
from eventbus.postgres.statements import Statements
from eventbus.topics import compile_pattern

COUNTED_UP_TO: Final = 10_000
"""Backlogs are counted up to here; one more means that there are more."""


class NotFound(EventBusError):
    """What was asked about is not there; the message lists what is."""


@dataclass(frozen=True, slots=True)
class Queue:
    """One queue and what of it is still to do.

    ``kind``, ``lanes``: how it is split (``changing``: as soon as its older lanes are empty); ``tracking`` and
    ``when_exhausted`` as they were subscribed. ``filled``: how far a queue is that still gets what was relayed before
    it began, from 0 to 1; otherwise ``None``. ``parked``: events that wait behind an earlier one of their key.
    ``oldest_age``: seconds since the oldest event was published that waits, retries and parked ones included.
    """

    number: int
    name: str
    state: str
    patterns: list[str]
    kind: str
    lanes: int
    changing: bool
    tracking: str
    when_exhausted: str
    filled: float | None
    waiting: int
    running: int
    retrying: int
    parked: int
    dead: int
    oldest_age: float | None


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker; ``heartbeat_age`` in seconds, ``None`` once it has signed off."""

    id: UUID
    host: str
    pid: int
    started_at: datetime
    heartbeat_age: float | None


@dataclass(frozen=True, slots=True)
class Backlog:
    """Committed events that the relay has not seen, counted up to a limit; ages in seconds."""

    events: int
    oldest_age: float | None


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Delayed events, counted up to a limit."""

    events: int
    next_due_at: datetime | None


@dataclass(frozen=True, slots=True)
class State:
    """Whether the bus runs. ``foreign``: the database is a copy restored elsewhere that no worker has attached."""

    state: str
    reason: str | None
    foreign: bool
    tick_age: float


@dataclass(frozen=True, slots=True)
class Status:
    """The bus as a whole."""

    bus: State
    backlog: Backlog
    scheduled: Scheduled
    workers: list[Worker]


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that the relay has seen. ``queues``: who would get an event of it now."""

    topic: str
    first_seen_at: datetime
    queues: list[str]
    unrouted: int
    events: int | None


@contextmanager
def looking(connection: psycopg.Connection) -> Iterator[None]:
    """One reading transaction: all its statements see the same moment."""
    with connection.transaction():
        connection.execute(Statements("bus", "")["look"])
        yield


@contextmanager
def changing(connection: psycopg.Connection) -> Iterator[None]:
    """One writing transaction."""
    with connection.transaction():
        connection.execute(Statements("bus", "")["change"])
        yield


def queues(connection: psycopg.Connection, schema: str) -> list[Queue]:
    """Every queue, by name."""
    with looking(connection), connection.cursor(row_factory=class_row(Queue)) as cursor:
        return cursor.execute(Statements("queues", schema)["list"]).fetchall()


def queue_names(connection: psycopg.Connection, schema: str) -> list[str]:
    """The names of all queues."""
    with looking(connection):
        return [name for (name,) in connection.execute(Statements("queues", schema)["names"])]


def status(connection: psycopg.Connection, schema: str) -> Status:
    """The bus as a whole, at one moment."""
    statements = Statements("bus", schema)
    with looking(connection):
        return Status(
            bus=one(connection, State, statements["state"], {}),
            backlog=one(connection, Backlog, statements["backlog"], {"before": None, "limit": COUNTED_UP_TO + 1}),
            scheduled=one(connection, Scheduled, statements["scheduled"], {"limit": COUNTED_UP_TO + 1}),
            workers=many(connection, Worker, statements["workers"], {}),
        )


def topics(connection: psycopg.Connection, schema: str, *, count: bool = False) -> list[Topic]:
    """Every topic that the relay has seen. ``count`` adds how many events are kept: it reads the whole outbox."""
    statements = Statements("bus", schema)
    with looking(connection):
        matchers = [(name, compile_pattern(pattern)) for name, pattern in connection.execute(statements["bindings"])]
        kept: dict[str, int] = {}
        if count:
            kept = dict(connection.execute(statements["retained"]).fetchall())
        seen = connection.execute(statements["topics"]).fetchall()
    return [
        Topic(
            topic=topic,
            first_seen_at=first_seen_at,
            queues=list(dict.fromkeys(name for name, matcher in matchers if matcher.matches(topic))),
            unrouted=unrouted,
            events=kept.get(topic, 0) if count else None,
        )
        for topic, first_seen_at, unrouted in seen
    ]


def resume(connection: psycopg.Connection, schema: str) -> bool:
    """Let a paused bus run again; false if it was not paused. A copy restored elsewhere is attached first.

    What the copy had not sent when it was made is sent from now on.
    """
    statements = Statements("bus", schema)
    foreign = is_foreign(connection, schema)
    if foreign:
        with connection.transaction():
            connection.execute(statements["begin_attach"])
            connection.execute(statements["lock_for_attach"])
            connection.execute(statements["attach"])
    with changing(connection):
        return connection.execute(statements["resume"]).fetchone() is not None or foreign


def is_foreign(connection: psycopg.Connection, schema: str) -> bool:
    """Whether this database is a copy that was restored elsewhere and that no worker has attached yet."""
    with looking(connection):
        row = connection.execute(Statements("bus", schema)["is_foreign"]).fetchone()
    return bool(row and row[0])


def find_queue(connection: psycopg.Connection, schema: str, name: str) -> tuple[int, int]:
    """Number and lanes of a queue; raises :class:`NotFound` with the names that there are."""
    with looking(connection):
        row = connection.execute(Statements("queues", schema)["find"], {"name": name}).fetchone()
    if row is None:
        raise NotFound(f"there is no queue '{name}'; {known('queues', queue_names(connection, schema))}")
    return row[0], row[1]


def known(what: str, names: list[str], most: int = 20) -> str:
    """``names`` as the end of a message that says which there are."""
    if not names:
        return f"there are no {what} yet"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"known {what}: {', '.join(names[:most])}{more}"


def one(connection: psycopg.Connection, kind: type[Any], query: bytes, parameters: dict[str, Any]) -> Any:
    """The only row of a statement as a ``kind``."""
    [row] = many(connection, kind, query, parameters)
    return row


def many(connection: psycopg.Connection, kind: type[Any], query: bytes, parameters: dict[str, Any]) -> list[Any]:
    """The rows of a statement, each as a ``kind``."""
    with connection.cursor(row_factory=class_row(kind)) as cursor:
        return cursor.execute(query, parameters).fetchall()
