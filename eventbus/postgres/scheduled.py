"""The delayed events that have not fired yet, as the command line lists them. Taking one back is the outbox's."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import psycopg

from eventbus.postgres.admin import NotFound, known, looking, many
from eventbus.postgres.statements import Statements
from eventbus.topics import compile_pattern


@dataclass(frozen=True, slots=True)
class Delayed:
    """A delayed event. Moments are ISO 8601 in UTC; ``due_in`` in seconds, negative if it is late."""

    event_id: UUID
    topic: str
    key: str | None
    priority: int
    size: int
    created_at: str
    due_at: str
    due_in: float


def delayed(connection: psycopg.Connection, schema: str, *, topic: str | None, limit: int) -> list[Delayed]:
    """The next ones, of all topics or of those that match ``topic``, which may be a pattern.

    Raises :class:`NotFound`, with the topics that there are, if nothing of such a topic waits.
    """
    statements = Statements("scheduled", schema)
    with looking(connection):
        topics = None if topic is None else _matching(connection, statements, topic)
        return many(connection, Delayed, statements["list"], {"topics": topics, "limit": limit})


def _matching(connection: psycopg.Connection, statements: Statements, pattern: str) -> list[str]:
    matcher = compile_pattern(pattern)
    there = [topic for (topic,) in connection.execute(statements["topics"])]
    matching = [topic for topic in there if matcher.matches(topic)]
    if not matching:
        raise NotFound(f"no delayed event has a topic that matches '{pattern}'; {known('topics', there)}")
    return matching
