"""The plugin: hooks that count, and the page that shows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from eventbus.plugins import Answer, Counted, DatabaseClock, Page, WorkerHandle, hookimpl
from eventbus_prometheus import options
from eventbus_prometheus.database import Database
from eventbus_prometheus.process import Process
from eventbus_prometheus.scrape import CONTENT_TYPE, Families, Scraping, of_build, of_database, of_interpreter
from eventbus_prometheus.sql import CLOCK

_COMPARE_EVERY: Final = 60.0
"""Seconds between two looks at the database's clock."""

_COMPARISONS: Final = 10
"""The last so many comparisons of the clocks count."""


class Prometheus:
    """Metrics for Prometheus, on the page /metrics of the worker's HTTP port.

    What this process did is counted as it happens; the state of the database is read when somebody scrapes, on a
    connection that lasts as long as that. Neither can delay delivery.
    """

    Settings = options.Settings

    def __init__(self, settings: options.Settings) -> None:
        self._settings = settings
        self._process = Process(settings.handler_buckets, settings.waiting_buckets)
        self._clocks = DatabaseClock(time.monotonic, _COMPARISONS)

    @hookimpl
    def eventbus_commands(self, commands: Any) -> None:
        """``eventbus metrics``."""
        from eventbus_prometheus.command import register

        register(commands, self._settings)

    @hookimpl
    def eventbus_pages(self, worker: WorkerHandle) -> Sequence[Page]:
        """The page that Prometheus scrapes."""
        parts: list[Families] = [of_build, of_interpreter, lambda: self._process.families(worker.pools)]
        if self._settings.database:
            database = Database(worker.settings, self._settings.timeout, self._settings.statement_timeout)
            parts.append(partial(of_database, database))
        scraping = Scraping(parts, self._settings.cache)

        def answer(_query: Mapping[str, str]) -> Answer:
            return Answer(scraping.text(), CONTENT_TYPE)

        return [Page(self._settings.path, answer, "metrics for Prometheus")]

    @hookimpl
    async def eventbus_worker_ready(self, worker: WorkerHandle) -> None:
        """Begin with zeros, and compare the clocks."""
        self._process.know(worker.queues)

        async def ask() -> float:
            [(seconds,)] = await worker.rows(CLOCK)
            return float(seconds)

        compare = partial(self._clocks.measure, ask)
        worker.every(_COMPARE_EVERY, compare, "prometheus clock")
        await compare()

    @hookimpl
    def eventbus_counted(self, queue: str, counted: Counted) -> None:
        """Count outcomes and times."""
        self._process.counted(queue, counted, self._clocks.ahead)

    @hookimpl
    def eventbus_claimed(self, queue: str, count: int) -> None:
        """Count claims."""
        self._process.claimed(queue, count)

    @hookimpl
    def eventbus_relayed(self, deliveries: Mapping[str, int]) -> None:
        """Count what was relayed."""
        self._process.relayed(deliveries)

    @hookimpl
    def eventbus_lease_lost(self, queue: str, deliveries: int) -> None:
        """Count what was lost."""
        self._process.lost(queue, deliveries)

    @hookimpl
    def eventbus_took_over(self, workers: int, deliveries: int) -> None:
        """Count what was taken over."""
        self._process.took_over(workers, deliveries)

    @hookimpl
    def eventbus_outage_began(self) -> None:
        """The database is away."""
        self._process.outage_began()

    @hookimpl
    def eventbus_outage_ended(self, seconds: float) -> None:
        """It is back."""
        self._process.outage_ended(seconds)
