"""One bus with plugins of a test, on a database, and its workers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from eventbus.bus import EventBus
from eventbus.event import Event, OutboxEvent
from eventbus.postgres.admin import resume
from eventbus.retry import RetryPolicy
from eventbus.runtime.worker import Worker
from eventbus.settings import load

AT_ONCE = RetryPolicy(max_attempts=2, first=0.01, jitter=False)


class Stage:
    """``settings``: what differs from the defaults; no other plugins than those that are given."""

    def __init__(self, dsn: str, *plugins: Any, **settings: Any) -> None:
        self.dsn = dsn
        given = {"dsn": dsn, "plugins": (), "poll_interval": 0.2} | settings
        self.bus = EventBus(load(given, environment={}, folder=Path("/")), plugins=plugins)
        with psycopg.connect(dsn, autocommit=True) as connection:
            resume(connection, "eventbus")  # the database was cloned from a template, which looks like a restored copy

    def subscribe(self, handler: Callable[..., Any], name: str = "ledger", **options: Any) -> None:
        """A queue that gets everything, from the beginning."""
        given: dict[str, Any] = {"name": name, "start": "earliest", "retry": AT_ONCE} | options
        self.bus.subscribe("#", **given)(handler)

    def publish(self, *events: OutboxEvent | str) -> list[UUID]:
        """Publish in one transaction; a text is the topic of an event."""
        made = [OutboxEvent(event) if isinstance(event, str) else event for event in events]
        with psycopg.connect(self.dsn) as connection:
            return self.bus.outbox.publish_events(made, conn=connection)

    async def until_idle(self) -> int:
        """Run a worker until nothing is left to do; its exit code."""
        return await asyncio.wait_for(self.bus.worker(until_idle=True).run(), 60)

    @asynccontextmanager
    async def working(self) -> AsyncIterator[Worker]:
        """A worker that runs meanwhile, and is stopped afterwards."""
        worker = self.bus.worker()
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            await asyncio.wait_for(running, 60)

    def query(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Ask the database in a transaction of its own."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def away(self) -> Iterator[None]:
        """The database cuts every connection, and takes no new one meanwhile."""
        with psycopg.connect(make_conninfo(self.dsn, dbname="postgres"), autocommit=True) as admin:
            name = str(conninfo_to_dict(self.dsn)["dbname"])
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false".encode())
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
            yield
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true".encode())

    async def silence(self, until: Callable[[], object]) -> None:
        """Let the worker that is there now look as if it were silent, however often it says that it is not."""
        [(worker,)] = self.query("SELECT id FROM eventbus.workers WHERE state = 'live'")
        past = "UPDATE eventbus.workers SET heartbeat_at = clock_timestamp() - interval '1 hour' WHERE id = %s"
        await eventually(lambda: self.query(past, worker) or until())


async def seen(event: Event) -> None:
    """A handler that does nothing."""


async def eventually(condition: Callable[[], object]) -> None:
    """Let the loop run until it is true; fail the test after 20 seconds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in hooks, receivers and the server
            await asyncio.sleep(0.01)
