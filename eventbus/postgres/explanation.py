"""Where one event stands, queue by queue, and why it is not moving: the answer of ``eventbus explain``.

The facts are read in one snapshot; ``copies`` turns those about one queue into words.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from eventbus.postgres.admin import COUNTED_UP_TO, Backlog, NotFound, State, Worker, looking, many, one
from eventbus.postgres.copies import Around, Facts, Standing, duration, no_standing, standing, stopped
from eventbus.postgres.pausing import paused
from eventbus.postgres.statements import Statements
from eventbus.topics import compile_pattern


@dataclass(frozen=True, slots=True)
class Copy:
    """What one queue has of the event. ``patterns``: those of the queue's that match it now."""

    queue: str
    patterns: tuple[str, ...]
    standing: Standing


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where an event stands: as a whole (``what`` and ``why``), and its copy in each queue that matches or has one.

    ``unmatched``: the other queues.
    """

    event_id: UUID
    topic: str
    key: str | None
    size: int | None
    published_at: datetime | None
    due_at: datetime | None
    stage: Literal["scheduled", "not relayed", "relayed"]
    what: str
    why: tuple[str, ...]
    copies: tuple[Copy, ...]
    unmatched: tuple[str, ...]


def explain(connection: psycopg.Connection, schema: str, event_id: UUID, *, lease: float) -> Explanation:
    """Where the event stands at this moment; ``lease`` in seconds tells which workers are silent.

    Raises :class:`~eventbus.postgres.admin.NotFound`.
    """
    with looking(connection), connection.cursor(row_factory=dict_row) as cursor:
        return _Reader(connection, cursor, schema, event_id).explain(lease)


class _Reader:
    """Reads the facts about one event; all its statements run in one snapshot."""

    def __init__(
        self, connection: psycopg.Connection, cursor: psycopg.Cursor[Facts], schema: str, event_id: UUID
    ) -> None:
        self._connection = connection
        self._cursor = cursor
        self._explain = Statements("explain", schema)
        self._bus = Statements("bus", schema)
        self._schema = schema
        self._event_id = event_id

    def explain(self, lease: float) -> Explanation:
        published = self._rows("published") or self._rows("buried")
        around = self._around(lease)
        if not published:
            return self._scheduled(around)
        event = published[-1]
        if event["relayed"]:
            copies = self._copies(published, around)
            return self._explanation(event, "relayed", "relayed", copies=copies)
        why = self._why_not_relayed(event, around)
        return self._explanation(
            event,
            "not relayed",
            "committed, not relayed yet",
            why,
            self._no_copies(event["topic"], (), around, relayed=False),
        )

    def _around(self, lease: float) -> Around:
        return Around(
            bus=one(self._connection, State, self._bus["state"], {}),
            workers=many(self._connection, Worker, self._bus["workers"], {}),
            consumers={row["queue"]: row for row in self._rows("consumers")},
            lease=lease,
            pauses=paused(self._connection, self._schema),
        )

    def _scheduled(self, around: Around) -> Explanation:
        scheduled = self._rows("scheduled")
        if not scheduled:
            raise NotFound(
                f"no event {self._event_id}: it was never published here, its transaction has not committed, or it was "
                "delayed and taken back"
            )
        event = scheduled[0]
        late = event["due_in"] <= 0
        what = f"scheduled, due since {duration(-event['due_in'])}" if late else f"due in {duration(event['due_in'])}"
        copies = self._no_copies(event["topic"], (), around, relayed=False)
        return self._explanation(event, "scheduled", what, stopped(around) if late else (), copies)

    def _why_not_relayed(self, event: Facts, around: Around) -> tuple[str, ...]:
        why = list(stopped(around))
        limit = {"before": event["outbox_id"], "limit": COUNTED_UP_TO + 1}
        before = one(self._connection, Backlog, self._bus["backlog"], limit).events
        if before:
            number = f"more than {COUNTED_UP_TO:,}" if before > COUNTED_UP_TO else f"{before:,}"
            why.append(f"committed events before it that are not relayed either: {number}")
        return (*why, f"the relay's newest step was {duration(around.bus.tick_age)} ago")

    def _copies(self, published: list[Facts], around: Around) -> tuple[Copy, ...]:
        topic = published[-1]["topic"]
        patterns = self._patterns(topic)
        rows = self._rows("copies", outbox=[row["outbox_id"] for row in published])
        copies = tuple(
            Copy(row["queue"] or "(dropped)", patterns.get(row["queue"], ()), standing(row, around)) for row in rows
        )
        others = self._no_copies(topic, {copy.queue for copy in copies}, around, relayed=True)
        return tuple(sorted(copies + others, key=lambda copy: copy.queue))

    def _no_copies(
        self, topic: str, having: set[str] | tuple[()], around: Around, *, relayed: bool
    ) -> tuple[Copy, ...]:
        return tuple(
            Copy(queue, patterns, no_standing(around.consumers[queue]["filled"], relayed=relayed))
            for queue, patterns in self._patterns(topic).items()
            if patterns and queue not in having
        )

    def _patterns(self, topic: str) -> dict[str, tuple[str, ...]]:
        """For every queue, those of its patterns that match."""
        matching: dict[str, tuple[str, ...]] = {row["queue"]: () for row in self._rows("consumers")}
        for name, pattern in self._connection.execute(self._bus["bindings"]):
            if compile_pattern(pattern).matches(topic):
                matching[name] = (*matching[name], pattern)
        return matching

    def _explanation(
        self,
        event: Facts,
        stage: Literal["scheduled", "not relayed", "relayed"],
        what: str,
        why: tuple[str, ...] = (),
        copies: tuple[Copy, ...] = (),
    ) -> Explanation:
        return Explanation(
            event_id=self._event_id,
            topic=event["topic"],
            key=event["key"],
            size=event["size"],
            published_at=event["published_at"],
            due_at=event["due_at"],
            stage=stage,
            what=what,
            why=why,
            copies=copies,
            unmatched=self._unmatched(event["topic"], {copy.queue for copy in copies}),
        )

    def _unmatched(self, topic: str, listed: set[str]) -> tuple[str, ...]:
        return tuple(name for name, patterns in self._patterns(topic).items() if not patterns and name not in listed)

    def _rows(self, statement: str, **parameters: Any) -> list[Facts]:
        return self._cursor.execute(self._explain[statement], {"event": self._event_id, **parameters}).fetchall()
