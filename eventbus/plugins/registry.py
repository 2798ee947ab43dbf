"""The plugins of one bus: which of them implement what, and how their hooks are called.

Two ways to call: while something starts, a hook that raises stops it with an error that names it; while the bus works,
it is logged and left out. What is called again and again is asked for once, as implementations, by whoever calls it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from eventbus.errors import ConfigurationError, passes
from eventbus.plugins.checking import Manager, check, listed
from eventbus.plugins.loading import Plugin, brief, configured, load
from eventbus.plugins.values import Duty, Migration, Page, WorkerHandle
from eventbus.settings import Settings, plugin_name

log = logging.getLogger("eventbus")

Value = TypeVar("Value")

_PATIENCE: Final = 5.0
"""Seconds for which an async hook of a worker's life is awaited."""
_REPEATED: Final = 60.0
"""Seconds until the failure of the same hook is logged again."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """One hook of one plugin."""

    plugin: Plugin
    hook: str
    function: Callable[..., Any]
    names: tuple[str, ...]
    """The arguments that it takes."""

    def __call__(self, **given: Any) -> Any:
        """Call it with those of the arguments that it takes."""
        return self.function(*[given[name] for name in self.names])


class Complaints:
    """Logs what hooks raise: the first time with its traceback, then once a minute how often."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[tuple[str, str], float] = {}
        self._silent: dict[tuple[str, str], int] = {}

    def goes_on(self, plugin: str, hook: str, error: BaseException) -> bool:
        """Whether ``error`` is about something else and has to be raised; otherwise it is the hook's, and logged."""
        if passes(error):
            return True
        self.failed(plugin, hook, error)
        return False

    def left(self, hook: str, entered: Sequence[tuple[str, Any]], error: BaseException | None) -> None:
        """Leave plugins' context managers, the last one first. ``error`` was raised inside, and stays as it is."""
        for plugin, manager in reversed(entered):
            try:
                manager.__exit__(None if error is None else type(error), error, error and error.__traceback__)
            except BaseException as problem:
                if problem is not error and self.goes_on(plugin, hook, problem):
                    raise

    def failed(self, plugin: str, hook: str, error: BaseException) -> None:
        """``hook`` of ``plugin`` has raised ``error``, and is left out."""
        about, now = (plugin, hook), self._clock()
        if now - self._logged.get(about, float("-inf")) < _REPEATED:
            self._silent[about] = self._silent.get(about, 0) + 1
            return
        self._logged[about] = now
        times = self._silent.pop(about, 0)
        more = f" ({times} more times in the last minutes)" if times else ""
        log.error(
            "plugin %s: %s failed and is left out%s: %s", plugin, hook, more, brief(error),
            exc_info=error, extra={"plugin": plugin, "hook": hook},
        )  # fmt: skip


class Plugins:
    """The plugins of one bus, in the order in which they are called.

    ``problems``: what is wrong with those that could not be loaded; :meth:`require_all` raises the first.
    """

    def __init__(self, plugins: Iterable[Plugin] = (), problems: Sequence[ConfigurationError] = ()) -> None:
        self.complaints = Complaints()
        self._problems = list(problems)
        self._manager = Manager()
        self._plugins: dict[str, Plugin] = {}
        for plugin in plugins:
            try:
                check(plugin)
            except ConfigurationError as problem:
                self._problems.append(problem)
                continue
            if plugin.name in self._plugins:
                self._problems.append(ConfigurationError(f"there are two plugins named {plugin.name}"))
            else:
                self._plugins[plugin.name] = plugin
        for plugin in reversed(self._plugins.values()):  # pluggy calls the last one first
            self._manager.register(plugin.instance, plugin.name)

    def __iter__(self) -> Any:
        return iter(self._plugins.values())

    def __len__(self) -> int:
        return len(self._plugins)

    @property
    def problems(self) -> Sequence[ConfigurationError]:
        """Why plugins are missing here that the setting names."""
        return tuple(self._problems)

    def require_all(self) -> None:
        """Raise the first of the problems."""
        if self._problems:
            raise self._problems[0]

    def of(self, hook: str, queue: str | None = None) -> tuple[Implementation, ...]:
        """Who implements a hook, in the order of calling; with ``queue``, only those chosen for it."""
        found = []
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            plugin = self._plugins[implementation.plugin_name]
            if queue is None or plugin.choice.has(queue):
                names = tuple(implementation.argnames)
                found.append(Implementation(plugin, hook, implementation.function, names))
        return tuple(found)

    def hooks_of(self, plugin: Plugin) -> list[str]:
        """The hooks that a plugin implements, by name."""
        callers = self._manager.get_hookcallers(plugin.instance) or []
        return sorted(caller.name for caller in callers)

    def ask(self, hook: str, about: str | None = None, /, **given: Any) -> list[tuple[Plugin, Any]]:
        """What each answers while something starts, None left out. ``about``: the queue that it is about.

        Raises :class:`~eventbus.ConfigurationError` naming the one that raised.
        """
        answers = []
        for implementation in self.of(hook, about):
            try:
                answer = implementation(**given)
            except ConfigurationError:
                raise
            except BaseException as error:
                if passes(error):
                    raise
                raise implementation.plugin.problem(f"{hook} failed: {brief(error)}") from error
            if answer is not None:
                answers.append((implementation.plugin, answer))
        return answers

    def gather(self, hook: str, kind: type[Value], /, **given: Any) -> list[tuple[Plugin, Value]]:
        """The values that all of them list while something starts.

        Raises :class:`~eventbus.ConfigurationError` naming the one that raised, or that listed something else.
        """
        answers = self.ask(hook, **given)
        return [(plugin, value) for plugin, answer in answers for value in listed(plugin, hook, answer, kind)]

    def tell(self, implementations: Iterable[Implementation], **given: Any) -> list[Any]:
        """Call them; what they answer, None left out. Whoever raises is logged and left out."""
        answers = []
        for implementation in implementations:
            try:
                answer = implementation(**given)
            except BaseException as error:
                if self.complaints.goes_on(implementation.plugin.name, implementation.hook, error):
                    raise
                continue
            if answer is not None:
                answers.append(answer)
        return answers

    async def live(self, hook: str, **given: Any) -> None:
        """Call a hook of a worker's life; what is async is awaited, for five seconds at most, then left behind."""
        for implementation in self.of(hook):
            name = implementation.plugin.name
            try:
                answer = implementation(**given)
                if not inspect.isawaitable(answer):
                    continue
                task = asyncio.ensure_future(answer)
                try:
                    _, late = await asyncio.wait({task}, timeout=_PATIENCE)
                finally:
                    task.cancel()
                if late:
                    self.complaints.failed(name, hook, TimeoutError(f"it took longer than {_PATIENCE:g} s"))
                else:
                    task.result()
            except BaseException as error:
                if self.complaints.goes_on(name, hook, error):
                    raise

    def migrations(self) -> list[tuple[str, Migration]]:
        """The steps of the plugins' tables, with the name of the plugin: by plugin, then by name."""
        steps = [(plugin.name, step) for plugin, step in self.gather("eventbus_migrations", Migration)]
        for (name, step), times in Counter((name, step.name) for name, step in steps).items():
            if times > 1:
                raise ConfigurationError(f"plugin {name}: eventbus_migrations returns two steps named {step}")
        return sorted(steps, key=lambda pair: (pair[0], pair[1].name))

    def rights(self) -> list[tuple[str, tuple[str, ...]]]:
        """What a role that consumes may have to do with the plugins' tables."""
        return [pair for _, step in self.migrations() for pair in step.rights.items()]

    def duties(self, settings: Settings) -> list[tuple[str, Duty]]:
        """The upkeep of the plugins' tables, with the name of the plugin."""
        return [(plugin.name, duty) for plugin, duty in self.gather("eventbus_duties", Duty, settings=settings)]

    def pages(self, worker: WorkerHandle) -> dict[str, list[Page]]:
        """The pages of the HTTP port, by the name of the plugin."""
        pages: dict[str, list[Page]] = {}
        for plugin, page in self.gather("eventbus_pages", Page, worker=worker):
            pages.setdefault(plugin.name, []).append(page)
        return pages


def loaded(settings: Settings, own: Sequence[Any] = (), *, configure: bool = False) -> Plugins:
    """The plugins of the setting, and after them ``own``: objects or classes of the program's own.

    ``configure``: they are going to work, and are told of the settings; not those that only add commands or tables.
    """
    plugins, problems = load(settings)
    for item in own:
        kind = item if inspect.isclass(item) or inspect.ismodule(item) else type(item)
        name = getattr(item, "name", None) or plugin_name(f":{kind.__name__.rpartition('.')[2]}")
        try:
            plugins.append(
                configured(name, item, f"given to EventBus as {kind.__name__}", settings.plugin_settings.get(name, {}))
            )
        except ConfigurationError as problem:
            problems.append(problem)
    found = Plugins(plugins, problems)
    if configure and not found.problems:
        found.ask("eventbus_configure", settings=settings)
    return found
