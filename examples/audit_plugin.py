"""A complete plugin: it marks and refuses events, times handlers, and keeps what was given up in a table of its own.

Every hook may be left out; a plugin has those that it needs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from eventbus import OutboxEvent
from eventbus.errors import Unavailable
from eventbus.hookspecs import Around
from eventbus.plugins import Call, Duty, Migration, QueueFacts, Settled, WorkerHandle, hookimpl

log = logging.getLogger("eventbus.audit")

CREATE: Final = """-- What handlers gave up, for the auditors.
CREATE TABLE {schema}.audit_letters (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    queue text NOT NULL,
    topic text NOT NULL,
    event_id uuid NOT NULL,
    reason text
);
CREATE INDEX audit_letters_at ON {schema}.audit_letters (at);
"""
ADD: Final = """
INSERT INTO {schema}.audit_letters (queue, topic, event_id, reason)
SELECT * FROM unnest(%s::text[], %s::text[], %s::uuid[], %s::text[])
"""
FORGET: Final = """
DELETE FROM {schema}.audit_letters WHERE id IN (
    SELECT a.id FROM {schema}.audit_letters a WHERE a.at < now() - %s * interval '1 day' ORDER BY a.at LIMIT 1000)
RETURNING id
"""
NEWEST: Final = "SELECT queue, topic, event_id::text, reason FROM {}.audit_letters ORDER BY at DESC LIMIT 50"
MOST_UNWRITTEN: Final = 10_000

Letter = tuple[str, str, str, str | None]


class Audit:
    """Says who published an event, refuses topics, and keeps a record of what was given up."""

    minimum_eventbus = "0.1"

    class Settings(BaseModel):
        """What ``[tool.eventbus.audit]`` may hold."""

        model_config = ConfigDict(frozen=True, extra="forbid")

        tenant: str = Field(default="default", description="the header tenant of events that have none")
        refuse: str = Field(default="", description="topics that nobody may publish; * stands for any characters")
        slow: float = Field(default=1.0, gt=0, description="handlers that take longer are logged, in seconds")
        keep: float = Field(default=90.0, gt=0, description="how long the record is kept, in days")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._unwritten: list[Letter] = []

    @hookimpl
    def eventbus_amend_headers(self, headers: dict[str, str]) -> None:
        """Mark the event. A hook takes only the arguments that it wants: this one does not look at ``event``."""
        headers.setdefault("tenant", self.settings.tenant)

    @hookimpl
    def eventbus_veto_publish(self, event: OutboxEvent) -> str | None:
        """Refuse a topic; the publisher gets ``PublishVetoed`` with this reason."""
        return f"{self.settings.refuse} is closed" if fnmatchcase(event.topic, self.settings.refuse) else None

    @hookimpl
    def eventbus_around_handler(self, queue: QueueFacts) -> Around:
        """Time each call. Asked once for each queue, so what can be decided beforehand costs nothing later."""

        @contextmanager
        def timed(call: Call) -> Iterator[None]:
            begun = time.monotonic()
            try:
                yield
            finally:
                seconds = time.monotonic() - begun
                if seconds > self.settings.slow:
                    log.warning("%s took %.1f s for %s", queue.handler, seconds, call.event.event_id_text)

        return timed

    @hookimpl
    def eventbus_migrations(self) -> Sequence[Migration]:
        """The table; ``eventbus migrate`` makes it."""
        return [Migration("0001_letters", CREATE)]

    @hookimpl
    def eventbus_settled(self, queue: str, settled: Settled) -> None:
        """Remember what was given up. This runs on the event loop: no I/O here, and nothing if nothing failed."""
        if not settled.has_failures:
            return
        for result in settled.results:
            if result.outcome == "dead" and result.event is not None:
                why = f"{result.reason}: {result.error['message']}" if result.error else result.reason
                self._unwritten.append((queue, result.event.topic, result.event.event_id_text, why))
        del self._unwritten[:-MOST_UNWRITTEN]

    @hookimpl
    def eventbus_worker_ready(self, worker: WorkerHandle) -> None:
        """Write now and then, in one statement."""
        worker.every(5.0, partial(self._write, worker), "audit")

    @hookimpl
    async def eventbus_worker_stopped(self, worker: WorkerHandle) -> None:
        """Write the rest."""
        await self._write(worker)

    @hookimpl
    def eventbus_duties(self) -> Sequence[Duty]:
        """Forget what is old, once an hour, in one worker at a time."""
        return [Duty("audit", 3600.0, self._forget)]

    @hookimpl
    def eventbus_commands(self, commands: Any) -> None:
        """Add ``eventbus audit``."""
        commands.add("audit", show, "eventbus audit", "eventbus audit --queue ledger")

    async def _write(self, worker: WorkerHandle) -> None:
        letters, self._unwritten = self._unwritten, []
        if not letters:
            return
        try:
            await worker.rows(ADD, [list(column) for column in zip(*letters, strict=True)])
        except Unavailable:
            self._unwritten[:0] = letters  # the database is away: next time

    async def _forget(self, rows: Callable[..., Awaitable[Sequence[tuple[Any, ...]]]]) -> int:
        return len(await rows(FORGET, (self.settings.keep,)))


def show(invocation: Any, queue: str = "") -> None:
    """Show the newest events that were given up; ``--queue`` chooses one queue."""
    from psycopg import sql

    from eventbus.cli.extending import Column, session  # here, because publishers need no command line

    with session(invocation) as current:
        statement = sql.SQL(NEWEST).format(sql.Identifier(current.schema))
        found = [row for row in current.connection.execute(statement) if queue in ("", row[0])]
    if invocation.screen.as_json:
        invocation.screen.json(found)
    else:
        columns = [Column("queue", "cyan"), Column("topic"), Column("event", narrow=True), Column("reason")]
        invocation.screen.table(columns, found)
