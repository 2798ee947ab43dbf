"""Removes what is old enough, about once a minute, from every worker that records executions.

One worker at a time is at it, by a lock that lives as long as one short transaction. A connection of its own, which
lives as long as one round, so that clean-up delays nothing and keeps nothing. A failure is one line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import psycopg

from eventbus.postgres.breaker import Breaker
from eventbus.postgres.connecting import connect, conninfo
from eventbus.postgres.link import describe
from eventbus.postgres.statements import Statements
from eventbus.settings import Settings

log = logging.getLogger("eventbus")

_NAME: Final = "maintenance"
_EVERY: Final = 60.0
_BATCH: Final = 2_000
_LEISURE: Final = 30.0
"""A round is followed by at least so many times its length in which nothing is done."""


class Maintenance:
    """The clean-up of one worker. ``random`` returns numbers from 0 to 1: workers that start together drift apart."""

    def __init__(self, settings: Settings, calls: Statements, breaker: Breaker, random: Callable[[], float]) -> None:
        assert settings.dsn is not None
        self._target = conninfo(settings.dsn, _NAME)
        self._breaker = breaker
        self._retention = settings.processed_retention
        self._purge = calls["purge_executions"]
        self._random = random
        self._failing = False
        self._length = 0.0
        """Seconds that the last round worked."""

    async def run(self) -> None:
        """Clean up again and again, until cancelled."""
        pause = _EVERY
        while True:
            await asyncio.sleep(pause * (0.5 + self._random()))
            self._length = 0.0
            await self._attempt()
            pause = max(_EVERY, _LEISURE * self._length)

    async def _attempt(self) -> None:
        try:
            removed = await self.clean_up()
        except psycopg.Error as error:
            if not self._failing:
                log.warning("clean-up failed, and is tried again every minute: %s", describe(error, _NAME))
            self._failing = True
            return
        if self._failing:
            log.info("clean-up works again")
        self._failing = False
        if removed:
            log.debug("removed %d completed executions", removed, extra={"removed": removed})

    async def clean_up(self) -> int:
        """One round: everything that is old enough now. How many rows; raises :class:`psycopg.Error`.

        While the database is away it waits for a turn to connect.
        """
        connection = await connect(await self._breaker.turn(), self._target)
        began = time.monotonic()
        try:
            async with connection:
                return await self._purge_all(connection)
        finally:
            self._length = time.monotonic() - began

    async def _purge_all(self, connection: psycopg.AsyncConnection[Any]) -> int:
        removed = 0
        while True:
            cursor = await connection.execute(self._purge, (self._retention, _BATCH))
            [(count,)] = await cursor.fetchall()
            removed += count or 0
            if count != _BATCH:  # null: another worker is at it
                return removed
