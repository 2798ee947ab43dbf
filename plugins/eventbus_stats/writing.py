"""Writes what was counted into the database, and tells once when that does not work."""

from __future__ import annotations

import logging
from typing import Final

import orjson

from eventbus.errors import Unavailable
from eventbus.plugins import DatabaseClock, WorkerHandle
from eventbus_stats.gathering import Gathering
from eventbus_stats.sql import ADD, NOW

log: Final = logging.getLogger("eventbus.stats")


class Writer:
    """Adds what ``gathering`` has to the minute that is now, in one statement."""

    def __init__(self, gathering: Gathering, clock: DatabaseClock) -> None:
        self._gathering = gathering
        self._clock = clock
        self._refused = False

    async def write(self, worker: WorkerHandle) -> None:
        """Write it, if there is anything; never raises what the database says.

        What it refuses is dropped, and so is what it may have got without telling: nothing is ever counted twice.
        """
        import psycopg

        rows = self._gathering.take()
        if not rows:
            return
        try:
            await worker.rows(ADD, (orjson.dumps(rows).decode(),))
            await self._measure(worker)
        except (Unavailable, psycopg.Error) as error:
            self._tell_of(error)
            return
        if self._refused:
            log.info("statistics are written again")
        self._refused = False

    async def look_at_the_clock(self, worker: WorkerHandle) -> None:
        """Compare the clocks for the first time; without that no waiting times are counted."""
        import psycopg

        try:
            await self._measure(worker)
        except (Unavailable, psycopg.Error) as error:
            self._tell_of(error)

    async def _measure(self, worker: WorkerHandle) -> None:
        async def now() -> float:
            [(seconds,)] = await worker.rows(NOW)
            return float(seconds)

        await self._clock.measure(now)

    def _tell_of(self, error: Exception) -> None:
        if not self._refused:
            said = getattr(getattr(error, "diag", None), "message_primary", None) or str(error)  # without the statement
            reason = " ".join(said.split()) or type(error).__name__
            log.warning("statistics are dropped until they can be written: %s", reason)
        self._refused = True
