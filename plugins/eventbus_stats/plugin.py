"""The plugin: which hooks count what, and when it is written and removed."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from eventbus.plugins import Counted, DatabaseClock, Duty, Migration, WorkerHandle, hookimpl
from eventbus_stats.gathering import Gathering
from eventbus_stats.sql import PURGE
from eventbus_stats.writing import Writer

_PURGE_EVERY: Final = 600.0
_PURGE_BATCH: Final = 2_000
_RIGHTS: Final[Mapping[str, tuple[str, ...]]] = {"stats_minutes": ("SELECT", "INSERT", "UPDATE", "DELETE")}

Rows = Callable[..., Awaitable[Sequence[tuple[Any, ...]]]]


class StatsSettings(BaseModel):
    """How often statistics are written, and how long they are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    interval: float = Field(
        default=5.0, ge=0.1, le=300, description="seconds between two writes; a killed worker loses as much"
    )
    retention: float = Field(
        default=30 * 86_400.0,
        ge=3_600,
        le=10 * 366 * 86_400.0,
        description="seconds for which minutes are kept; 30 days",
    )


class Stats:
    """Counts and times per minute and queue, and the command that shows them.

    Everything is added up in the process and written by one statement every few seconds, and when the worker stops. A
    process that is killed loses what it has not written; delivery never waits for statistics.
    """

    Settings = StatsSettings

    def __init__(self, settings: StatsSettings) -> None:
        self._settings = settings
        clock = DatabaseClock(time.monotonic)
        self._gathering = Gathering(lambda: clock.ahead)
        self._writer = Writer(self._gathering, clock)

    @hookimpl
    def eventbus_migrations(self) -> Sequence[Migration]:
        """The table of minutes and its functions."""
        file = resources.files("eventbus_stats") / "migrations" / "0001_minutes.sql"
        return [Migration("0001_minutes", file.read_text(encoding="utf-8"), _RIGHTS)]

    @hookimpl
    def eventbus_commands(self, commands: Any) -> None:
        """``eventbus stats``."""
        from eventbus_stats.command import stats

        commands.add(
            "stats", stats, "eventbus stats", "eventbus stats --queue ledger --since 2h", "eventbus stats --watch"
        )

    @hookimpl
    def eventbus_relayed(self, deliveries: Mapping[str, int]) -> None:
        """Count what was published into each queue."""
        for queue, number in deliveries.items():
            self._gathering.count(queue, "published", number)

    @hookimpl
    def eventbus_counted(self, queue: str, counted: Counted) -> None:
        """Count outcomes and times."""
        self._gathering.add(queue, counted)

    @hookimpl
    def eventbus_lease_lost(self, queue: str) -> None:
        """Count a lost lease."""
        self._gathering.count(queue, "lost_leases", 1)

    @hookimpl
    async def eventbus_worker_ready(self, worker: WorkerHandle) -> None:
        """Begin to write."""
        worker.every(self._settings.interval, functools.partial(self._writer.write, worker), "stats")
        await self._writer.look_at_the_clock(worker)

    @hookimpl
    async def eventbus_worker_stopped(self, worker: WorkerHandle) -> None:
        """Write the rest."""
        await self._writer.write(worker)

    @hookimpl
    def eventbus_duties(self) -> Sequence[Duty]:
        """Remove minutes that are old enough."""
        return [Duty("minutes", _PURGE_EVERY, self.purge)]

    async def purge(self, rows: Rows) -> int:
        """Remove what is old enough, in steps of at most 2,000 rows, each a transaction; how many it were."""
        removed = 0
        while True:
            [(count,)] = await rows(PURGE, (self._settings.retention, _PURGE_BATCH))
            removed += int(count)
            if count < _PURGE_BATCH:
                return removed
