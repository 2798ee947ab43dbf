"""The object on which everything hangs: settings, subscriptions, the outbox, and the worker that consumes.

``default_bus()`` is the one behind ``eventbus.subscribe`` and ``eventbus.outbox``; a program may make others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from eventbus import settings as settings_module
from eventbus.consuming.reporting import Reporter
from eventbus.consuming.subscriptions import Subscription, Subscriptions
from eventbus.errors import ConfigurationError
from eventbus.plugins.registry import Plugins, loaded
from eventbus.postgres.publishing import PublishStatements
from eventbus.publishing.interception import Interception, register_adapter
from eventbus.publishing.outbox import Outbox
from eventbus.runtime.loop import run
from eventbus.runtime.worker import Parts, Worker
from eventbus.settings import Settings
from eventbus.station import Station


class EventBus:
    """One bus: what is subscribed to it and how to publish to it.

    Settings that are not given are read from the environment and ``pyproject.toml`` when they are first needed.
    ``plugins``: classes or objects of the program's own, beside those that the settings name.
    """

    def __init__(self, settings: Settings | None = None, *, plugins: Sequence[Any] = ()) -> None:
        self.subscriptions = Subscriptions()
        self.subscribe = self.subscriptions.subscribe
        self._settings = settings
        self._own_plugins = tuple(plugins)
        self._loaded: tuple[object, Plugins] | None = None

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        if self._settings is None:
            self._settings = settings_module.load()
        return self._settings

    @functools.cached_property
    def outbox(self) -> Outbox:
        """Publishes in the caller's transaction."""
        statements = PublishStatements(self.settings.schema_name)
        outbox = Outbox(statements, self.settings, Interception(self.plugins, self))
        for plugin, adapter in self.plugins.gather("eventbus_connection_adapters", object):
            register_adapter(outbox.connections, plugin.name, adapter)
        return outbox

    @property
    def plugins(self) -> Plugins:
        """The plugins in force; loaded when they are first needed. Raises :class:`ConfigurationError`."""
        return self.plugins_for(self.settings)

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
        plugins = self.plugins_for(settings)
        chosen = self._chosen(queues)
        parts = transport_parts(plugins, settings, chosen)
        if parts is None:
            parts = Station(settings, chosen, self._using, Reporter(plugins, self), wait=wait).parts()
        return Worker(parts, drain_timeout=settings.drain_timeout, until_idle=until_idle)

    def plugins_for(self, settings: Settings) -> Plugins:
        """Those for these settings; raises :class:`ConfigurationError` for whatever is wrong with one of them."""
        wanted = (settings.plugins, settings.plugin_settings)
        if self._loaded is None or self._loaded[0] != wanted:
            self._loaded = wanted, loaded(settings, self._own_plugins, configure=True)
        self._loaded[1].require_all()
        return self._loaded[1]

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


def transport_parts(plugins: Plugins, settings: Settings, subscriptions: Sequence[Subscription]) -> Parts | None:
    """The parts of a worker that a plugin builds for the DSN; None: it is PostgreSQL's."""
    scheme, separator, _ = (settings.dsn or "").partition("://")
    if not separator or scheme in ("postgresql", "postgres"):
        return None
    for plugin, build in plugins.ask("eventbus_transport", scheme=scheme):
        parts = build(settings, subscriptions)
        if not isinstance(parts, Parts):
            raise ConfigurationError(f"the transport {scheme} of plugin {plugin.name} builds no Parts of a worker")
        return parts
    raise ConfigurationError(f"no plugin has a transport for {scheme}://; postgresql:// needs none")


@functools.cache
def default_bus() -> EventBus:
    """The bus behind the module-level ``subscribe`` and ``outbox``."""
    return EventBus()
