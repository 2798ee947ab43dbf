"""What a plugin has to be like: its hooks, before they are called, and the values that they list.

Before it: ``loading`` has made the plugin. After it: ``registry`` calls it. Nothing of the plugin runs here, no
property either.
"""

from __future__ import annotations

import difflib
import inspect
import math
import reprlib
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, TypeVar, cast

import pluggy

from eventbus.errors import passes
from eventbus.hookspecs import PROJECT, SPECIFICATIONS
from eventbus.plugins.loading import Plugin, brief
from eventbus.plugins.values import Duty, Finding, Migration, Page

Value = TypeVar("Value")

_HOOKS: Final[Mapping[str, str]] = {
    name: hook.__annotations__["return"]
    for part in SPECIFICATIONS
    for name, hook in vars(part).items()
    if name.startswith(f"{PROJECT}_")
}
"""What each hook returns, as its specification says it."""
_METHODS: Final = (FunctionType, MethodType, BuiltinFunctionType, staticmethod, classmethod)
_LEVELS: Final = ("ok", "degraded", "stalled")


class Manager(pluggy.PluginManager):
    """Knows all hooks. Takes methods only: to look at a property would run it."""

    def __init__(self) -> None:
        super().__init__(PROJECT)
        for specification in SPECIFICATIONS:
            self.add_hookspecs(specification)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        """How a method is marked; None if it is not."""
        found = inspect.getattr_static(plugin, name, None)
        return super().parse_hookimpl_opts(plugin, name) if isinstance(found, _METHODS) else None


def check(plugin: Plugin) -> None:
    """Raise :class:`~eventbus.ConfigurationError` if it is no plugin, or for the first hook that is wrong.

    A class, an object of one or a module may have no hooks, as when it only connects signals.
    """
    hooks = dict(_marked(plugin.instance))
    for name in _names(plugin.instance):
        close = difflib.get_close_matches(name, _HOOKS, n=1)
        if name in hooks and name not in _HOOKS:
            better = f"did you mean {close[0]}?" if close else "see eventbus.hookspecs"
            raise plugin.problem(f"there is no hook {name}; {better}")
        if name not in hooks and (name in _HOOKS or (name.startswith(f"{PROJECT}_") and close)):
            raise plugin.problem(f"{name} is not marked; put @hookimpl above it")
    if type(plugin.instance).__module__ == "builtins" and not inspect.ismodule(plugin.instance):
        shown = reprlib.repr(plugin.instance)
        raise plugin.problem(f"{shown} is no plugin; one is a class, an object of a class of its own or a module")
    for name, function in hooks.items():
        _check_kind(plugin, name, function)
    _check_arguments(plugin)


def listed(plugin: Plugin, hook: str, given: object, kind: type[Value]) -> list[Value]:
    """The values that a hook has listed; raises :class:`~eventbus.ConfigurationError` for what cannot be one."""
    try:
        values = list(cast("Any", given))
    except BaseException as error:
        if passes(error):
            raise
        problem = f"{hook} returns a list of {kind.__name__} objects, not {reprlib.repr(given)}: {brief(error)}"
        raise plugin.problem(problem) from error
    for value in values:
        if not isinstance(value, kind):
            raise plugin.problem(f"{hook} returns {kind.__name__} objects, not {reprlib.repr(value)}")
        for field, fine in _fields(value).items():
            if not fine:
                wrong = reprlib.repr(getattr(value, field))
                raise plugin.problem(f"{hook} returns a {kind.__name__} whose {field} cannot be {wrong}")
    return values


def _fields(value: object) -> dict[str, bool]:
    """The fields of a value, and whether each can be what it is."""
    match value:
        case Migration(name, sql, rights):
            return {"name": _is_text(name), "sql": _is_text(sql), "rights": _are_rights(rights)}
        case Duty(name, every, run):
            return {"name": _is_text(name), "every": _is_positive(every), "run": callable(run)}
        case Page(path, answer, title):
            return {"path": _is_text(path), "answer": callable(answer), "title": isinstance(cast("Any", title), str)}
        case Finding(level, code, message, hint):
            said = {"code": _is_text(code), "message": _is_text(message), "hint": hint is None or _is_text(hint)}
            return {"level": cast("object", level) in _LEVELS, **said}
        case _:
            return {}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and math.isfinite(value)


def _are_rights(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_text(table) and isinstance(rights, tuple | list) and all(map(_is_text, rights))
        for table, rights in value.items()
    )


def _names(instance: object) -> list[str]:
    """What its classes and it itself define; ``dir`` would ask the plugin."""
    own = getattr(instance, "__dict__", ())
    return sorted({name for kind in type(instance).__mro__ for name in vars(kind)}.union(own))


def _marked(instance: object) -> Iterator[tuple[str, Any]]:
    """The methods that are marked as hooks, whatever their names."""
    for name in _names(instance):
        found = inspect.getattr_static(instance, name, None)
        if isinstance(found, _METHODS):
            function = getattr(found, "__func__", found)
            if any(getattr(each, f"{PROJECT}_impl", None) is not None for each in (found, function)):
                yield name, function


def _check_kind(plugin: Plugin, name: str, function: Any) -> None:
    """Raise for a hook whose answer would be a coroutine or a generator that nobody runs."""
    returns = _HOOKS[name]
    if inspect.isasyncgenfunction(function):
        raise plugin.problem(f"{name} is an async generator, which nobody runs; take its yield out")
    if inspect.iscoroutinefunction(function) and not returns.startswith("Awaitable["):
        raise plugin.problem(f"{name} is not awaited; write it as def, not as async def")
    if inspect.isgeneratorfunction(function) and not returns.startswith(("Sequence[", "Iterable[")):
        raise plugin.problem(f"{name} is a generator, which nobody runs; return its answer instead of yield")


def _check_arguments(plugin: Plugin) -> None:
    trial = Manager()
    try:
        trial.register(plugin.instance, plugin.name)
    except (pluggy.PluginValidationError, ValueError) as error:
        raise plugin.problem(" ".join(str(error).split())) from None
    except BaseException as error:
        if passes(error):
            raise
        raise plugin.problem(f"its hooks cannot be found: {brief(error)}") from error
    for caller in trial.get_hookcallers(plugin.instance) or []:
        if any(each.hookwrapper or each.wrapper for each in caller.get_hookimpls()):
            raise plugin.problem(f"{caller.name} is a hook wrapper; only plain hooks exist")
