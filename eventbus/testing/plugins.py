"""A bench for one plugin: loads it as the bus does, and calls its hooks one by one.

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

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from eventbus.hookspecs import SPECIFICATIONS
from eventbus.plugins.loading import configured
from eventbus.plugins.registry import Plugins
from eventbus.plugins.values import Call, QueueFacts
from eventbus.settings import plugin_name
from eventbus.testing.values import new_queue


class PluginBench:
    """``plugin``: a class or an object. ``settings``: its table, ``queues`` and ``except_queues`` included.

    Raises :class:`~eventbus.ConfigurationError` for whatever would stop a worker: settings, hooks and their arguments.
    """

    def __init__(self, plugin: Any, settings: Mapping[str, Any] | None = None) -> None:
        kind = plugin if inspect.isclass(plugin) or inspect.ismodule(plugin) else type(plugin)
        self.name = str(getattr(plugin, "name", None) or plugin_name(f":{kind.__name__.rpartition('.')[2]}"))
        self.plugin = configured(self.name, plugin, "the plugin on the bench", settings or {})
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


def _arguments(hook: str) -> list[str]:
    """The names of a hook's arguments."""
    found = next((vars(part)[hook] for part in SPECIFICATIONS if hook in vars(part)), None)
    if found is None:
        raise TypeError(f"there is no hook {hook}; eventbus.hookspecs has them all")
    return list(inspect.signature(found).parameters)[1:]
