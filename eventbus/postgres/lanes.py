"""Ordered queues for the command line: how many lanes they have, and which keys stand still and why.

Every function takes one autocommit connection that is in no transaction, and the schema's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

import psycopg

from eventbus.errors import EventBusError
from eventbus.postgres.admin import changing, find_queue, looking, many
from eventbus.postgres.statements import Statements

MOST_LANES: Final = 1024


class NotOrdered(EventBusError):
    """Only the lanes of an ordered queue can be chosen; the message says what decides those of this one."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A key of an ordered queue whose later events wait. The event that they wait for is ``event_id``.

    ``by``: ``retry`` (due in ``due_in`` seconds), ``running``, or ``dead letter`` (the number ``dead_letter``, which
    gave up for ``reason``). ``since``: when it left the line. ``parked``: how many events of the key wait behind it,
    apart from those that no worker has claimed yet.
    """

    queue: str
    key: str
    by: Literal["retry", "running", "dead letter"]
    event_id: UUID | None
    dead_letter: int | None
    reason: str | None
    attempts: int
    due_in: float | None
    since: datetime
    parked: int
    error: Any


@dataclass(frozen=True, slots=True)
class Lanes:
    """How many lanes a queue has, and how many it gets when those are empty; the same when nothing changes."""

    queue: str
    before: int
    after: int


def change_lanes(connection: psycopg.Connection, schema: str, name: str, lanes: int) -> Lanes:
    """Give an ordered queue another number of lanes, from what is relayed next on.

    Its workers go over to the new lanes once the present ones are empty, so that the order of each key is kept. Raises
    :class:`~eventbus.postgres.admin.NotFound` and :class:`NotOrdered`.
    """
    number, _ = find_queue(connection, schema, name)
    queues = Statements("queues", schema)
    with changing(connection):
        connection.execute(Statements("bus", schema)["lock_tick"])
        [(kind, before)] = connection.execute(queues["newest_layout"], {"queue": number}).fetchall()
        if kind != "ordered":
            raise NotOrdered(_NOT_ORDERED[kind].format(name=name))
        connection.execute(queues["change_lanes"], {"queue": number, "lanes": lanes})
    return Lanes(name, before, lanes)


_NOT_ORDERED: Final[Mapping[str, str]] = {
    "plain": "queue '{name}' is not ordered and has no lanes; subscribe it with ordered=True, start a worker, then "
    "choose its lanes",
    "prioritized": "queue '{name}' has a lane for each priority; change priorities=… where it is subscribed",
}


def blocked(connection: psycopg.Connection, schema: str, *, limit: int) -> list[Blocked]:
    """The keys of ordered queues whose later events wait, those with the most parked events first."""
    with looking(connection):
        return many(connection, Blocked, Statements("queues", schema)["blocked"], {"limit": limit})
