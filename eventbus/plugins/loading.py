"""From the setting ``plugins`` to plugin objects: finds, imports, checks and configures them.

A name is that of an entry point in the group ``eventbus``; ``package.module:attribute`` needs none. What is wrong is a
:class:`~eventbus.ConfigurationError` that names the plugin, and where it comes from.
"""

from __future__ import annotations

import difflib
import inspect
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from eventbus.errors import ConfigurationError, passes
from eventbus.plugins.marks import PROJECT
from eventbus.settings import Settings, plugin_name

_CHOICE: Final = ("queues", "except_queues")


@dataclass(frozen=True, slots=True)
class Choice:
    """For which queues a plugin's hooks are called: glob patterns, ``None`` for all, minus ``except_queues``."""

    queues: tuple[str, ...] | None = None
    except_queues: tuple[str, ...] = ()

    def has(self, queue: str) -> bool:
        """Whether hooks are called for this queue."""
        if any(fnmatchcase(queue, pattern) for pattern in self.except_queues):
            return False
        return self.queues is None or any(fnmatchcase(queue, pattern) for pattern in self.queues)


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin that was loaded. ``settings`` None: it has none. ``origin``: where it comes from, for people."""

    name: str
    instance: Any
    origin: str
    settings: BaseModel | None = None
    choice: Choice = field(default_factory=Choice)

    @property
    def purpose(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.instance) or "").partition("\n")[0]

    def problem(self, text: str) -> ConfigurationError:
        """An error that names the plugin, and where it comes from."""
        return _problem(self.name, self.origin, f": {text}")


@dataclass(frozen=True, slots=True)
class Known:
    """A plugin that is installed, enabled or not."""

    name: str
    value: str
    """``package.module:attribute``."""
    distribution: str


def installed() -> list[Known]:
    """Every plugin that an installed distribution registers, by name."""
    return sorted((_known(point) for point in entry_points(group=PROJECT)), key=lambda known: (known.name, known.value))


def load(settings: Settings) -> tuple[list[Plugin], list[ConfigurationError]]:
    """The plugins of the setting, in its order, and what is wrong with those that are missing in it."""
    loaded: list[Plugin] = []
    problems: list[ConfigurationError] = []
    for name, times in Counter(map(plugin_name, settings.plugins)).items():
        if times > 1:
            problems.append(ConfigurationError(f"plugin {name} is listed twice in the setting plugins"))
    for name, spelling in {plugin_name(spelling): spelling for spelling in settings.plugins}.items():
        try:
            loaded.append(_load(name, spelling, settings.plugin_settings.get(name, {})))
        except ConfigurationError as problem:
            problems.append(problem)
    return loaded, problems


def configured(name: str, plugin: Any, origin: str, given: Mapping[str, Any]) -> Plugin:
    """A plugin with its settings. A class is called: with its settings if it has ``Settings``, else with nothing."""
    _check_version(name, plugin, origin)
    choice, own = _chosen(name, given)
    model = inspect.getattr_static(plugin, "Settings", None)
    if model is None and own:
        raise ConfigurationError(f"plugin {name} has no settings, but {', '.join(sorted(own))} was given")
    if model is not None and not (inspect.isclass(model) and issubclass(model, BaseModel)):
        raise _problem(name, origin, f": Settings has to be a class, a pydantic model; it is {reprlib.repr(model)}")
    settings = None if model is None else _validated(name, origin, model, own)
    if not inspect.isclass(plugin):
        return Plugin(name, plugin, origin, settings, choice)
    make: Callable[..., Any] = plugin
    try:
        instance = make() if settings is None else make(settings)
    except ConfigurationError:
        raise
    except BaseException as error:
        if passes(error):
            raise
        raise _problem(name, origin, f" failed to start: {brief(error)}") from error
    return Plugin(name, instance, origin, settings, choice)


def _load(name: str, spelling: str, given: Mapping[str, Any]) -> Plugin:
    if ":" in spelling:
        return configured(name, _imported(name, spelling, spelling), spelling, given)
    points = [point for point in entry_points(group=PROJECT) if point.name == name]
    if not points:
        raise ConfigurationError(_unknown(name))
    if len({point.value for point in points}) > 1:
        where = " and ".join(_origin(point) for point in points)
        raise ConfigurationError(f"plugin {name} is registered twice: by {where}; uninstall one of them")
    origin = _origin(points[0])
    return configured(name, _imported(name, points[0].value, origin), origin, given)


def _imported(name: str, value: str, origin: str) -> Any:
    module, _, attribute = value.partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
    except BaseException as error:
        if passes(error):
            raise
        raise _problem(name, origin, f" cannot be imported: {brief(error)}") from error
    return found


def _unknown(name: str) -> str:
    names = [known.name for known in installed()]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"installed are: {', '.join(names) or 'none'}"
    return f"unknown plugin {name} in the setting plugins; {hint} (package.module:attribute names one of your own code)"


def _check_version(name: str, plugin: Any, origin: str) -> None:
    wanted = inspect.getattr_static(plugin, "minimum_eventbus", None)
    if wanted is None:
        return
    least = _numbers(wanted) if isinstance(wanted, str) else None
    if least is None:
        raise _problem(name, origin, f": minimum_eventbus is no version: {reprlib.repr(wanted)}; write it as '1.2'")
    ours = version("eventbus")
    if (_numbers(ours) or ()) < least:
        raise _problem(name, origin, f" needs eventbus {wanted} or newer, and this is {ours}; upgrade eventbus")


def _numbers(text: str) -> tuple[int, ...] | None:
    """The release of a version, trailing zeros apart."""
    found = re.match(r"\d+(\.\d+)*", text)
    if found is None:
        return None
    numbers = [int(part) for part in found[0].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _chosen(name: str, given: Mapping[str, Any]) -> tuple[Choice, dict[str, Any]]:
    own = {key: value for key, value in given.items() if key not in _CHOICE}
    lists: dict[str, tuple[str, ...]] = {}
    for key in _CHOICE:
        value = given.get(key)
        if value is None:
            continue
        patterns = value.split(",") if isinstance(value, str) else value
        if not isinstance(patterns, list | tuple) or not all(isinstance(item, str) for item in patterns):
            raise ConfigurationError(f"{key} of plugin {name} is a list of queue names; * stands for any characters")
        lists[key] = tuple(item.strip() for item in patterns)
    return Choice(lists.get("queues"), lists.get("except_queues", ())), own


def _validated(name: str, origin: str, model: type[BaseModel], given: Mapping[str, Any]) -> BaseModel:
    for key in given:
        if key not in model.model_fields:
            known = [*model.model_fields, *_CHOICE]
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConfigurationError(f"unknown setting {key} of plugin {name}; {hint}")
    try:
        return model(**given)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors()
        )
        raise ConfigurationError(f"invalid setting of plugin {name}: {problems}") from None
    except BaseException as error:
        if passes(error):
            raise
        raise _problem(name, origin, f": its Settings failed: {brief(error)}") from error


def _known(point: EntryPoint) -> Known:
    return Known(point.name, point.value, point.dist.name if point.dist is not None else "unknown distribution")


def _origin(point: EntryPoint) -> str:
    known = _known(point)
    return f"entry point {known.value} of {known.distribution}"


def _problem(name: str, origin: str, text: str) -> ConfigurationError:
    return ConfigurationError(f"plugin {name} ({origin}){text}")


def brief(error: BaseException) -> str:
    """Its class and what it says, on one line."""
    try:
        said = str(error)
    except BaseException as problem:
        if passes(problem):
            raise
        said = "(it cannot say what)"
    return f"{type(error).__name__}: {' '.join(said.split())}"
