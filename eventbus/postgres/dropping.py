"""Drops a queue while workers run: nothing of it is handled twice, and none of its numbers is used again.

A queue can be large, so this is many short transactions. What makes that safe is the order. First ends what feeds it
(routing, filling, replays), and everything that waits is claimed for nobody; then the rows go, except the newest
delivery and claim of each lane, which hold the positions; these go with the queue itself, in one transaction. A drop
that was interrupted is simply repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg

from eventbus.errors import EventBusError
from eventbus.postgres.admin import changing, find_queue
from eventbus.postgres.statements import Statements

BATCH = 5_000


class QueueInUse(EventBusError):
    """A worker declared the queue again while it was dropped; what waited is gone, the queue goes on."""


def drop_queue(
    connection: psycopg.Connection,
    schema: str,
    name: str,
    *,
    batch: int = BATCH,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Remove a queue and everything in it. ``progress`` is called after each transaction of ``batch`` rows.

    A worker that holds some of it finds its lease lost and settles nothing. Raises
    :class:`~eventbus.postgres.admin.NotFound` if there is no such queue, :class:`QueueInUse` if it was declared again.
    """
    number, lanes = find_queue(connection, schema, name)
    drop = _Drop(connection, schema, {"queue": number, "lanes": lanes, "limit": batch}, progress)
    drop.close()
    while not drop.finish(name):
        drop.empty()


class _Drop:
    """The steps of one drop."""

    def __init__(
        self, connection: psycopg.Connection, schema: str, parameters: dict[str, Any], progress: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._queues = Statements("queues", schema)
        self._lock_tick = Statements("bus", schema)["lock_tick"]
        self._parameters = parameters
        self._progress = progress

    def close(self) -> None:
        """End the routing into the queue, and take everything out of the reach of its workers."""
        with changing(self._connection):
            self._connection.execute(self._lock_tick)
            self._run("unbind")
            for (lanes,) in self._run("lanes"):  # no other layout gets anything from now on
                self._parameters["lanes"] = lanes
        with changing(self._connection):
            self._run("lock_lanes")
            self._run("end_claims")
            self._run("cover_waiting")
        self.empty()

    def empty(self) -> None:
        """Remove all rows but the newest of each lane."""
        self._all_of("delete_exceptions")
        self._all_of("delete_letters")
        self._all_executions()
        for lane in range(self._parameters["lanes"]):
            self._all_of("delete_deliveries", lane)
            self._all_of("delete_claims", lane)

    def finish(self, name: str) -> bool:
        """Remove the queue; false if there was something in it again."""
        with changing(self._connection):
            self._connection.execute(self._lock_tick)
            self._run("lock_lanes")
            bound, refilled = self._run("leftover").fetchall()[0]
            if bound:
                raise QueueInUse(
                    f"queue '{name}' was declared again while it was dropped: stop its consumers, then drop it once "
                    "more; what waited in it is gone"
                )
            if not refilled:
                self._run("finish")
            return not refilled

    def _all_of(self, statement: str, lane: int = 0) -> None:
        after = 0
        while after is not None:
            with changing(self._connection):
                after = self._run(statement, lane=lane, after=after).fetchall()[0][0]
            self._progress()

    def _all_executions(self) -> None:
        last: tuple[UUID, int] | None = (UUID(int=0), -1)
        while last is not None:
            with changing(self._connection):
                last = self._run("delete_executions", event=last[0], replay=last[1]).fetchone()
            self._progress()

    def _run(self, statement: str, **more: Any) -> psycopg.Cursor:
        return self._connection.execute(self._queues[statement], {**self._parameters, **more})
