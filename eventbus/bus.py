"""The object on which everything hangs: settings, subscriptions, the outbox, and the worker that consumes.

``default_bus()`` is the one behind ``eventbus.subscribe`` and ``eventbus.outbox``; a program may make others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from eventbus import settings as settings_module
from eventbus.consuming.subscriptions import Subscription, Subscriptions
from eventbus.errors import ConfigurationError
from eventbus.postgres.publishing import PublishStatements
from eventbus.publishing.outbox import Outbox
from eventbus.runtime.loop import run
from eventbus.runtime.worker import Worker
from eventbus.settings import Settings
from eventbus.station import Station


class EventBus:
    """One bus: what is subscribed to it and how to publish to it.

    Settings that are not given are read from the environment and ``pyproject.toml`` when they are first needed.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.subscriptions = Subscriptions()
        self.subscribe = self.subscriptions.subscribe
        self._settings = settings

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        if self._settings is None:
            self._settings = settings_module.load()
        return self._settings

    @functools.cached_property
    def outbox(self) -> Outbox:
        """Publishes in the caller's transaction."""
        return Outbox(PublishStatements(self.settings.schema_name), self.settings)

    def worker(
        self,
        settings: Settings | None = None,
        *,
        queues: Sequence[str] | None = None,
        until_idle: bool = False,
        wait: bool = True,
    ) -> Worker:
        """A worker for this process; ``await worker.run()`` consumes. See :meth:`consume`."""
        settings = settings or self.settings
        station = Station(settings, self._chosen(queues), self._using, wait=wait)
        return Worker(station.parts(), drain_timeout=settings.drain_timeout, until_idle=until_idle)

    def consume(
        self,
        settings: Settings | None = None,
        *,
        queues: Sequence[str] | None = None,
        until_idle: bool = False,
        wait: bool = True,
    ) -> int:
        """Run a worker until SIGTERM, SIGINT or, with ``until_idle``, until nothing is left; returns the exit code.

        ``queues`` selects subscriptions by queue name. ``wait``: wait for a server that is away at the start instead
        of raising :class:`~eventbus.errors.Unavailable`. Raises :class:`ConfigurationError` for what cannot work.
        """
        settings = settings or self.settings
        self._chosen(queues)
        return run(self._consume(settings, queues, until_idle=until_idle, wait=wait))

    async def _consume(self, settings: Settings, queues: Sequence[str] | None, *, until_idle: bool, wait: bool) -> int:
        return await self.worker(settings, queues=queues, until_idle=until_idle, wait=wait).run()

    def _using(self, conn: Any) -> AbstractContextManager[None]:
        """Bind the connection of a transactional handler; only then the settings of the outbox are needed."""
        return self.outbox.using(conn)

    def _chosen(self, queues: Sequence[str] | None) -> Sequence[Subscription]:
        chosen = tuple(self.subscriptions) if queues is None else self.subscriptions.only(queues)
        if not chosen:
            raise ConfigurationError("nothing to consume: no handler is subscribed; decorate one with @subscribe(...)")
        return chosen


@functools.cache
def default_bus() -> EventBus:
    """The bus behind the module-level ``subscribe`` and ``outbox``."""
    return EventBus()
