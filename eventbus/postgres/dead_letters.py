"""Deliveries that gave up or will be tried again, as the command line lists, redrives and discards them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.errors import DeadlockDetected, SerializationFailure

from eventbus.postgres.admin import NotFound, changing, find_queue, known, looking, many
from eventbus.postgres.choosing import ALWAYS, InvalidChoice, Period, check_text
from eventbus.postgres.pacing import Pace
from eventbus.postgres.statements import Statements
from eventbus.topics import Matcher, compile_pattern

_LARGEST_ID: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter. ``payload`` and ``headers`` are JSON text; the event's are ``None`` if it is lost.

    ``blocks``: later events of its key wait until it is redriven or discarded. ``redriven_from``: it is not the first
    one of its event; that is the number of the one before.
    """

    id: int
    queue: str
    topic: str | None
    event_id: UUID | None
    key: str | None
    died_at: datetime
    published_at: datetime | None
    attempts: int
    crashes: int
    blocks: bool
    redriven_from: int | None
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
    redriven_from: int | None
    first_error: Any
    last_error: Any
    host: str | None
    pid: int | None


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters: those that fit everything that is given; nothing given takes all.

    ``topic`` may be a pattern, ``error`` is a part of the reason, of the last error's type or of its message, in
    capitals or not, and ``died`` is when they died. Raises :class:`InvalidChoice` for what can fit no letter.
    """

    ids: tuple[int, ...] | None = None
    queue: str | None = None
    topic: str | None = None
    error: str | None = None
    died: Period = ALWAYS

    def __post_init__(self) -> None:
        for number in self.ids or ():
            if not 1 <= number <= _LARGEST_ID:
                raise InvalidChoice(f"{_short(number)} is no number of a dead letter; they go from 1 to {_LARGEST_ID}")
        check_text("queue", self.queue)
        check_text("error", self.error)
        if self.topic is not None:
            compile_pattern(self.topic)

    def parameters(self, connection: psycopg.Connection, schema: str) -> dict[str, Any]:
        """As the statements want them. Unknown names raise :class:`NotFound` with those that there are."""
        since, until = self.died.bounds(connection)
        return {
            "ids": None if self.ids is None else list(self.ids),
            "queue": None if self.queue is None else find_queue(connection, schema, self.queue)[0],
            "topics": None if self.topic is None else _matching(connection, schema, compile_pattern(self.topic)),
            "error": self.error,
            "since": since,
            "until": until,
        }


@dataclass(frozen=True, slots=True)
class Group:
    """How many dead letters there are of one queue, topic and reason; ``without_event``: those that lost theirs."""

    queue: str
    topic: str | None
    reason: str
    letters: int
    without_event: int


def letters(connection: psycopg.Connection, schema: str, selection: Selection, *, limit: int) -> list[Letter]:
    """The newest dead letters of a selection."""
    parameters = selection.parameters(connection, schema)
    with looking(connection):
        return many(connection, Letter, Statements("dead_letters", schema)["list"], {**parameters, "limit": limit})


def count(connection: psycopg.Connection, schema: str, selection: Selection) -> tuple[int, int]:
    """How many dead letters a selection takes, and how many of these have lost their event."""
    parameters = selection.parameters(connection, schema)
    with looking(connection):
        [(total, lost)] = connection.execute(Statements("dead_letters", schema)["count"], parameters).fetchall()
    return total, lost


def groups(connection: psycopg.Connection, schema: str, selection: Selection) -> list[Group]:
    """What a selection takes, by queue, topic and reason."""
    parameters = selection.parameters(connection, schema)
    with looking(connection):
        return many(connection, Group, Statements("dead_letters", schema)["summary"], parameters)


def missing(connection: psycopg.Connection, schema: str, selection: Selection) -> list[int]:
    """The numbers of a selection that it does not take: there is no such letter, or it does not fit the rest."""
    parameters = selection.parameters(connection, schema)
    with looking(connection):
        present = connection.execute(Statements("dead_letters", schema)["present"], parameters).fetchall()
    return sorted(set(selection.ids or ()) - {number for (number,) in present})


def retries(connection: psycopg.Connection, schema: str, *, queue: str | None, limit: int) -> list[Retrying]:
    """The deliveries that will be tried again, the next ones first."""
    number = None if queue is None else find_queue(connection, schema, queue)[0]
    query = Statements("dead_letters", schema)["retries"]
    with looking(connection):
        return many(connection, Retrying, query, {"queue": number, "limit": limit})


def redrive(connection: psycopg.Connection, schema: str, selection: Selection, pace: Pace | None = None) -> list[int]:
    """Give dead letters back to their queues: due now, attempts from the start, same event id. The ids that were moved.

    Each batch is one transaction, so a crash leaves every letter in exactly one place, and of two redrives at once
    each letter is moved by one. A letter that has lost its event stays. In an ordered queue the order of each key is
    kept: what is earlier and not done runs first, and what was parked behind a letter follows it.
    """
    return _in_batches(connection, schema, selection, "redrive", pace or Pace())


def discard(connection: psycopg.Connection, schema: str, selection: Selection, pace: Pace | None = None) -> list[int]:
    """Delete dead letters for good, in batches; the ids that were deleted. What was parked behind one goes on."""
    return _in_batches(connection, schema, selection, "discard", pace or Pace())


def _in_batches(
    connection: psycopg.Connection, schema: str, selection: Selection, statement: str, pace: Pace
) -> list[int]:
    statements = Statements("dead_letters", schema)
    parameters = {**selection.parameters(connection, schema), "limit": pace.batch, "after": 0}
    parameters["upto"] = _newest(connection, schema)
    done: list[int] = []
    while not pace.stopped.is_set():
        try:
            with changing(connection):
                picked = connection.execute(statements["pick"], parameters).fetchall()
                numbers = [number for number, _ in picked]
                [(moved,)] = connection.execute(statements[statement], {"letters": numbers}).fetchall()
        except (SerializationFailure, DeadlockDetected):
            continue  # the lanes of a queue changed meanwhile
        if not picked:
            break
        done += moved
        parameters["after"] = picked[0][1]
        if not pace.goes_on(len(moved), finished=len(picked) < pace.batch):
            break
    return done


def _newest(connection: psycopg.Connection, schema: str) -> int:
    """The newest dead letter now: what fails again after its redrive does not belong to the same redrive."""
    with looking(connection):
        row = connection.execute(Statements("dead_letters", schema)["newest"]).fetchone()
    return row[0] if row else 0


def _matching(connection: psycopg.Connection, schema: str, matcher: Matcher) -> list[str]:
    with looking(connection):
        seen = [topic for (topic,) in connection.execute(Statements("dead_letters", schema)["topics"])]
    matching = [topic for topic in seen if matcher.matches(topic)]
    if not matching:
        raise NotFound(f"no topic matches '{matcher.pattern}'; {known('topics', seen)}")
    return matching


def _short(number: int) -> str:
    text = str(number)
    return text if len(text) <= 40 else f"{text[:40]}…"
