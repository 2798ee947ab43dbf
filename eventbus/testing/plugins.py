"""A bench for one plugin: loads it as the bus does, calls its hooks one by one, and runs it in a real worker.

::

    from eventbus.testing.plugins import PluginBench
    from eventbus.testing.values import new_failure

    def test_the_failure_is_reported():
        bench = PluginBench(ErrorReporting, {"capture": "tracker:capture"})
        bench.call("eventbus_handler_failed", queue="ledger", failure=new_failure(ValueError("no such order")))
        assert tracker.captured

Other than in a worker, what a hook raises is not isolated here: it fails the test.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from eventbus.event import OutboxEvent
from eventbus.hookspecs import SPECIFICATIONS
from eventbus.plugins.loading import configured
from eventbus.plugins.marks import hookimpl
from eventbus.plugins.registry import Plugins
from eventbus.plugins.values import Call, QueueFacts, Result, Settled
from eventbus.settings import load, plugin_name
from eventbus.testing.values import QUEUE, new_queue


class PluginBench:
    """``plugin``: a class or an object. ``settings``: its table, ``queues`` and ``except_queues`` included.

    Raises :class:`~eventbus.ConfigurationError` for whatever would stop a worker: settings, hooks and their arguments.
    """

    def __init__(self, plugin: Any, settings: Mapping[str, Any] | None = None) -> None:
        kind = plugin if inspect.isclass(plugin) or inspect.ismodule(plugin) else type(plugin)
        self.name = str(getattr(plugin, "name", None) or plugin_name(f":{kind.__name__.rpartition('.')[2]}"))
        self._given = dict(settings or {})
        self.plugin = configured(self.name, plugin, "the plugin on the bench", self._given)
        self._plugins = Plugins([self.plugin])
        self._plugins.require_all()

    @property
    def instance(self) -> Any:
        """The plugin itself."""
        return self.plugin.instance

    @property
    def hooks(self) -> Sequence[str]:
        """The names of the hooks that it implements."""
        return self._plugins.hooks_of(self.plugin)

    def call(self, hook: str, **given: Any) -> Any:
        """What the hook answers; None also if it is not there, or not chosen for the queue. Await that of an async one.

        ``given``: the arguments of the hook, those that the plugin does not take may be missing. :class:`TypeError` for
        others than the hook has.
        """
        strange = set(given) - set(_arguments(hook))
        if strange:
            raise TypeError(
                f"{hook} has no {', '.join(sorted(strange))}; it has {', '.join(_arguments(hook)) or 'none'}"
            )
        queue = given.get("queue")
        for implementation in self._plugins.of(hook, queue.name if isinstance(queue, QueueFacts) else queue):
            missing = [name for name in implementation.names if name not in given]
            if missing:
                raise TypeError(f"{hook} of {self.name} takes {', '.join(missing)} too")
            return implementation(**given)
        return None

    @contextmanager
    def around(self, call: Call, queue: QueueFacts | None = None) -> Iterator[None]:
        """What the plugin puts around a call of a handler; the block is the handler."""
        around = self.call("eventbus_around_handler", queue=queue or new_queue(call.queue))
        if around is None:
            yield
            return
        with around(call):
            yield

    def run(
        self, dsn: str, handler: Callable[..., Any], *events: OutboxEvent, schema: str = "eventbus", **subscribe: Any
    ) -> list[Result]:
        """Publish ``events``, handle all of them in a worker with this plugin, and return what came of each delivery.

        It works on the database behind ``dsn``, where the tables of the bus and of the plugin are made: one for tests.
        ``subscribe``: options of ``@subscribe``; the queue is called ``bench`` and gets everything otherwise. Returns
        when nothing is left to do, retries included. Not for use inside an event loop.
        """
        import psycopg

        from eventbus.bus import EventBus
        from eventbus.postgres.migrate import migrate

        seen = _Recorder()
        chosen = {"dsn": dsn, "schema": schema, "on_restore": "resume", "plugins": ()}
        settings = load(chosen | {"plugin_settings": {self.name: self._given}}, environment={})
        bus = EventBus(settings, plugins=[self.instance, seen])
        migrate(dsn, schema, bus.plugins.migrations())
        patterns = subscribe.pop("patterns", ("#",))
        bus.subscribe(*patterns, **({"name": QUEUE} | subscribe))(handler)
        asyncio.run(bus.worker(until_idle=True).run())
        with psycopg.connect(dsn) as connection:
            bus.outbox.publish_events(events, conn=connection)
        asyncio.run(bus.worker(until_idle=True).run())
        return seen.results


class _Recorder:
    """Keeps every result."""

    def __init__(self) -> None:
        self.results: list[Result] = []

    @hookimpl
    def eventbus_settled(self, settled: Settled) -> None:
        """Keep them."""
        self.results += settled.results


def _arguments(hook: str) -> list[str]:
    """The names of a hook's arguments."""
    found = next((vars(part)[hook] for part in SPECIFICATIONS if hook in vars(part)), None)
    if found is None:
        raise TypeError(f"there is no hook {hook}; eventbus.hookspecs has them all")
    return list(inspect.signature(found).parameters)[1:]
