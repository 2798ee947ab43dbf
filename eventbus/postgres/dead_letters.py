"""Deliveries that gave up or will be tried again, as the command line lists, redrives and discards them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from eventbus.postgres.admin import NotFound, changing, find_queue, known, looking, many
from eventbus.postgres.statements import Statements
from eventbus.topics import compile_pattern

BATCH = 500


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter. ``payload`` and ``headers`` are JSON text; the event's are ``None`` if it is lost."""

    id: int
    queue: str
    topic: str | None
    event_id: UUID | None
    key: str | None
    died_at: datetime
    published_at: datetime | None
    attempts: int
    crashes: int
    reason: str
    first_error: Any
    last_error: Any
    payload: str | None
    headers: str | None


@dataclass(frozen=True, slots=True)
class Retrying:
    """A delivery that failed or crashed and will be tried again; ``due_in`` in seconds; host and pid while it runs."""

    id: int
    queue: str
    topic: str | None
    event_id: UUID | None
    key: str | None
    state: str
    attempts: int
    crashes: int
    due_at: datetime
    due_in: float
    first_error: Any
    last_error: Any
    host: str | None
    pid: int | None


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters: those that fit every part that is given. Nothing given takes all."""

    ids: tuple[int, ...] | None = None
    queue: int | None = None
    topics: tuple[str, ...] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """As the statements want them."""
        return {
            "ids": None if self.ids is None else list(self.ids),
            "queue": self.queue,
            "topics": None if self.topics is None else list(self.topics),
        }


def select(
    connection: psycopg.Connection, schema: str, *, ids: list[int] | None, queue: str | None, topic: str | None
) -> Selection:
    """A selection by names. ``topic`` may be a pattern. Unknown names raise with those that there are."""
    number = None if queue is None else find_queue(connection, schema, queue)[0]
    topics = None if topic is None else _matching(connection, schema, topic)
    return Selection(None if ids is None else tuple(ids), number, topics)


def letters(connection: psycopg.Connection, schema: str, selection: Selection, *, limit: int) -> list[Letter]:
    """The newest dead letters of a selection."""
    query = Statements("dead_letters", schema)["list"]
    with looking(connection):
        return many(connection, Letter, query, {**selection.parameters, "limit": limit})


def count(connection: psycopg.Connection, schema: str, selection: Selection) -> tuple[int, int]:
    """How many dead letters a selection takes, and how many of these have lost their event."""
    with looking(connection):
        row = connection.execute(Statements("dead_letters", schema)["count"], selection.parameters).fetchone()
    assert row is not None
    return row[0], row[1]


def retries(connection: psycopg.Connection, schema: str, *, queue: str | None, limit: int) -> list[Retrying]:
    """The deliveries that will be tried again, the next ones first."""
    number = None if queue is None else find_queue(connection, schema, queue)[0]
    query = Statements("dead_letters", schema)["retries"]
    with looking(connection):
        return many(connection, Retrying, query, {"queue": number, "limit": limit})


def redrive(
    connection: psycopg.Connection,
    schema: str,
    selection: Selection,
    *,
    batch: int = BATCH,
    progress: Callable[[int], None] = lambda _: None,
) -> list[int]:
    """Give dead letters back to their queues: due now, attempts from the start, same event id. The ids that were moved.

    Each batch is one transaction, so a crash leaves every letter in exactly one place, and of two redrives at once
    each letter is moved by one. A letter that has lost its event stays. ``progress`` gets the size of each batch.
    """
    return _in_batches(connection, schema, selection, "redrive", batch=batch, progress=progress)


def discard(
    connection: psycopg.Connection,
    schema: str,
    selection: Selection,
    *,
    batch: int = BATCH,
    progress: Callable[[int], None] = lambda _: None,
) -> list[int]:
    """Delete dead letters for good, in batches; the ids that were deleted."""
    return _in_batches(connection, schema, selection, "discard", batch=batch, progress=progress)


def _in_batches(
    connection: psycopg.Connection,
    schema: str,
    selection: Selection,
    statement: str,
    *,
    batch: int,
    progress: Callable[[int], None],
) -> list[int]:
    statements = Statements("dead_letters", schema)
    lock_tick = Statements("bus", schema)["lock_tick"]
    parameters = {**selection.parameters, "limit": batch, "after": 0, "upto": _newest(connection, schema)}
    done: list[int] = []
    while True:
        with changing(connection):
            connection.execute(lock_tick)
            moved = [letter for (letter,) in connection.execute(statements[statement], parameters)]
            if moved and statement == "redrive":
                connection.execute(statements["wake"])
        if not moved:
            return done
        done += moved
        parameters["after"] = moved[-1]
        progress(len(moved))


def _newest(connection: psycopg.Connection, schema: str) -> int:
    """The newest dead letter now: what fails again after its redrive does not belong to the same redrive."""
    with looking(connection):
        row = connection.execute(Statements("dead_letters", schema)["newest"]).fetchone()
    return row[0] if row else 0


def _matching(connection: psycopg.Connection, schema: str, pattern: str) -> tuple[str, ...]:
    matcher = compile_pattern(pattern)
    with looking(connection):
        seen = [topic for (topic,) in connection.execute(Statements("dead_letters", schema)["topics"])]
    matching = tuple(topic for topic in seen if matcher.matches(topic))
    if not matching:
        raise NotFound(f"no topic matches '{pattern}'; {known('topics', seen)}")
    return matching
