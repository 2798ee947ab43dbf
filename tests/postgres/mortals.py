"""A worker with one transactional handler that is killed, or frozen, at a chosen point of its first event.

``python -m tests.postgres.mortals DSN KIND POINT SIGNAL``. The points: ``handler``, at its end; ``complete``, when the
event is completed and only COMMIT is missing; ``commit``, when that has happened and nothing is settled.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import psycopg

from eventbus import Event
from eventbus.bus import EventBus
from eventbus.postgres import transactions
from eventbus.postgres.claiming import PostgresConsumer
from eventbus.settings import load

INSERT = "INSERT INTO effects VALUES (%s, %s, 'mortal')"


def once(number: signal.Signals) -> Callable[[], None]:
    """Send a signal to this process, the first time only."""
    left = [number]

    def fall() -> None:
        if left:
            os.kill(os.getpid(), left.pop())

    return fall


def fall_before_commit(fall: Callable[[], None]) -> None:
    """Fall when a transaction has been completed and is not committed."""
    execute, aexecute = transactions._execute, transactions._execute_async

    def execute_and_fall(session: Any, statements: bytes) -> None:
        execute(session, statements)
        if b".complete(" in statements:
            fall()

    async def aexecute_and_fall(session: Any, statements: bytes) -> None:
        await aexecute(session, statements)
        if b".complete(" in statements:
            fall()

    transactions._execute, transactions._execute_async = execute_and_fall, aexecute_and_fall


def fall_before_settling(fall: Callable[[], None]) -> None:
    """Fall when a transaction is committed."""
    settle = PostgresConsumer.settle

    async def fall_and_settle(self: PostgresConsumer, leases: Any) -> Any:
        fall()
        return await settle(self, leases)

    PostgresConsumer.settle = fall_and_settle  # type: ignore[method-assign]


def main(dsn: str, kind: str, point: str, number: str) -> int:
    """Consume; fall once."""
    fall = once(signal.Signals[number])
    bus = EventBus(load({"dsn": dsn, "lease": 1, "plugins": ()}, environment={}))

    def plain(event: Event, conn: psycopg.Connection) -> None:
        conn.execute(INSERT, (event.event_id, event.payload))
        if point == "handler":
            fall()

    async def awaiting(event: Event, conn: psycopg.AsyncConnection) -> None:
        await conn.execute(INSERT, (event.event_id, event.payload))
        if point == "handler":
            fall()

    if point == "complete":
        fall_before_commit(fall)
    elif point == "commit":
        fall_before_settling(fall)
    bus.subscribe("orders.#", name="books", transactional=True)(awaiting if kind == "async" else plain)
    return bus.consume()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
