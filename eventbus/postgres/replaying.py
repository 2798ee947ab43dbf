"""Retained events once more: plays what the outbox still has into one queue, whose consumers handle it again.

A replay is a row that says what is played and how far it has come; each step appends deliveries to the queue and moves
that row in one transaction. So a replay that was killed goes on where it was, and no event comes twice in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg

from eventbus.errors import BusPaused
from eventbus.postgres.admin import NotFound, changing, known, looking, many, queue_names
from eventbus.postgres.choosing import ALWAYS, InvalidChoice, Period, check_text
from eventbus.postgres.pacing import Pace
from eventbus.postgres.statements import Statements
from eventbus.topics import compile_pattern

_LOOK_AT: Final = 10
"""Rows of the outbox that one step looks at, for each event that it may play."""
_LARGEST_NUMBER: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to play into ``queue``: what was published in the period, of the topics that match the pattern ``topic``.

    Without ``topic``, of all that the queue subscribes to.
    """

    queue: str
    topic: str | None = None
    published: Period = ALWAYS

    def __post_init__(self) -> None:
        check_text("queue", self.queue)


@dataclass(frozen=True, slots=True)
class Count:
    """How many events of a topic would be played, and when the first and the last of them were published."""

    topic: str
    events: int
    first: datetime
    last: datetime


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay: ``deliveries`` were made so far, by the events up to ``last_id`` of the outbox; it ends at ``upto_id``.

    ``state`` is ``running`` until the end was reached, also while nobody plays it.
    """

    id: int
    queue: str
    topics: list[str]
    since: datetime | None
    until: datetime | None
    deliveries: int
    last_id: int
    upto_id: int
    state: str
    created_at: datetime


def preview(connection: psycopg.Connection, schema: str, wanted: Wanted) -> list[Count]:
    """What a replay would play now, by topic. Reads that part of the outbox, and changes nothing."""
    parameters = _parameters(connection, schema, wanted)
    with looking(connection):
        return many(connection, Count, Statements("replaying", schema)["preview"], parameters)


def begin(connection: psycopg.Connection, schema: str, wanted: Wanted) -> Replay:
    """A new replay, of which nothing is played yet. Its end is where the relay is now.

    Raises :class:`~eventbus.postgres.admin.NotFound` for an unknown queue, and
    :class:`~eventbus.postgres.choosing.InvalidChoice` for what the queue does not subscribe to.
    """
    parameters = _parameters(connection, schema, wanted)
    with changing(connection):
        [(number,)] = connection.execute(Statements("replaying", schema)["begin"], parameters).fetchall()
    return _found(connection, schema, number)


def resume(connection: psycopg.Connection, schema: str, queue: str, number: int) -> Replay:
    """A replay of ``queue`` that did not come to its end; raises :class:`InvalidChoice` if this one did."""
    _queue(connection, schema, queue)
    replay = _find(connection, schema, number)
    if replay is None or replay.queue != queue:
        other = f"replay {number} is one of queue '{replay.queue}'" if replay else f"there is no replay {number}"
        with looking(connection):
            unfinished = connection.execute(Statements("replaying", schema)["unfinished"], {"queue": queue}).fetchall()
        raise NotFound(f"{other}; {known('unfinished replays', [str(replay_id) for (replay_id,) in unfinished])}")
    if replay.state == "finished":
        raise InvalidChoice(f"replay {number} of queue '{queue}' has come to its end; begin a new one without --resume")
    return replay


def play(
    connection: psycopg.Connection,
    schema: str,
    replay: Replay,
    pace: Pace | None = None,
    passed: Callable[[int], None] = lambda _: None,
) -> Replay:
    """Play a replay to its end, or until the pace stops; how it stands then.

    ``passed`` gets by how many rows of the outbox each step has come closer to the end. Whoever plays the same replay
    at the same time shares the work. Raises :class:`~eventbus.errors.BusPaused`, and
    :class:`~eventbus.postgres.admin.NotFound` if the queue is dropped meanwhile.
    """
    pace = pace or Pace()
    step = Statements("replaying", schema)["step"]
    parameters = {"replay": replay.id, "limit": pace.batch, "look": max(pace.batch, 500) * _LOOK_AT}
    last_id = replay.last_id
    while not pace.stopped.is_set():
        with changing(connection):
            [(state, deliveries, at_id)] = connection.execute(step, parameters).fetchall()
        if state in ("paused", "foreign"):
            raise BusPaused("the bus is paused, so nothing is replayed; to go on: eventbus resume")
        if state == "gone":
            raise NotFound(f"queue '{replay.queue}' was dropped, and its replay {replay.id} with it")
        passed(at_id - last_id)
        last_id = at_id
        if not pace.goes_on(deliveries, finished=state == "finished"):
            break
    return _found(connection, schema, replay.id)


def _parameters(connection: psycopg.Connection, schema: str, wanted: Wanted) -> dict[str, Any]:
    number, state, patterns = _queue(connection, schema, wanted.queue)
    if state != "active":
        raise InvalidChoice(f"queue '{wanted.queue}' is still being filled with all retained events; wait until it is")
    since, until = wanted.published.bounds(connection)
    topics = _topics(connection, schema, wanted, patterns)
    return {"queue": number, "topics": topics, "since": since, "until": until}


def _topics(connection: psycopg.Connection, schema: str, wanted: Wanted, patterns: list[str]) -> list[str]:
    with looking(connection):
        seen = [topic for (topic,) in connection.execute(Statements("replaying", schema)["topics"])]
    matchers = [compile_pattern(pattern) for pattern in patterns]
    subscribed = [topic for topic in seen if any(matcher.matches(topic) for matcher in matchers)]
    if wanted.topic is None:
        return subscribed
    narrower = compile_pattern(wanted.topic)
    topics = [topic for topic in subscribed if narrower.matches(topic)]
    if not topics:
        raise InvalidChoice(
            f"queue '{wanted.queue}' subscribes to no topic that matches '{wanted.topic}' and was ever relayed; "
            f"{known('patterns', patterns)}"
        )
    return topics


def _queue(connection: psycopg.Connection, schema: str, name: str) -> tuple[int, str, list[str]]:
    """Number, state and patterns of a queue."""
    with looking(connection):
        row = connection.execute(Statements("replaying", schema)["queue"], {"queue": name}).fetchone()
    if row is None:
        raise NotFound(f"there is no queue '{name}'; {known('queues', queue_names(connection, schema))}")
    if not row[2]:
        raise NotFound(f"queue '{name}' is being dropped")
    return row[0], row[1], row[2]


def _find(connection: psycopg.Connection, schema: str, number: int) -> Replay | None:
    if not 1 <= number <= _LARGEST_NUMBER:
        raise InvalidChoice(f"{number} is no number of a replay; they go from 1 to {_LARGEST_NUMBER}")
    with looking(connection):
        found = many(connection, Replay, Statements("replaying", schema)["find"], {"replay": number})
    return found[0] if found else None


def _found(connection: psycopg.Connection, schema: str, number: int) -> Replay:
    replay = _find(connection, schema, number)
    if replay is None:
        raise NotFound(f"replay {number} is gone: its queue was dropped")
    return replay
