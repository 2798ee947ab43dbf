"""``eventbus plugins``: what is used, in its order, what else is installed, and what is wrong; starting a new one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from eventbus.cli.failures import masked
from eventbus.cli.options import Commands, Invocation

if TYPE_CHECKING:
    from pydantic import BaseModel

    from eventbus.plugins.loading import Known, Plugin
    from eventbus.plugins.registry import Plugins
    from eventbus.settings import Settings

_SECRET: Final = re.compile(r"password|passwd|secret|token|credential|(^|_)key$|dsn$", re.IGNORECASE)
_HIDDEN: Final = "***"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a plugin; what may be secret is hidden in ``value``."""

    name: str
    value: Any
    description: str


@dataclass(frozen=True, slots=True)
class Used:
    """A plugin that is loaded. ``queues`` None: for all of them. ``distribution``: that which registers it, if any."""

    name: str
    purpose: str
    origin: str
    distribution: str | None
    version: str | None
    hooks: Sequence[str]
    settings: Sequence[Setting]
    queues: Sequence[str] | None
    except_queues: Sequence[str]


@dataclass(frozen=True, slots=True)
class Unused:
    """A plugin that is installed and not in the setting ``plugins``. ``enable``: the variable that adds it."""

    name: str
    value: str
    distribution: str
    version: str | None
    enable: str


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = Commands(app).group("plugins", plugins, "eventbus plugins", "eventbus plugins new tenant_guard")
    group.add("new", new, "eventbus plugins new tenant_guard", "eventbus plugins new tenant_guard --folder ~/src")


def plugins(invocation: Invocation) -> None:
    """Show the plugins in the order in which they are called: where each comes from, its hooks, settings and queues.

    Below are those that are installed and not used, and what is wrong with those that could not be loaded; with one of
    these the exit code is 1. What may be secret in a setting is not shown.
    """
    if invocation.subcommand is not None:
        return
    from eventbus.plugins.loading import installed
    from eventbus.plugins.registry import loaded

    settings = invocation.settings()
    found = loaded(settings)
    known = installed()
    used = [describe(found, plugin, known) for plugin in found]
    others = unused(settings, known)
    problems = [masked(str(problem)) for problem in found.problems]
    if invocation.screen.as_json:
        invocation.screen.json({"plugins": used, "not_enabled": others, "problems": problems})
    else:
        _show(invocation, used, others, problems)
    if problems:
        raise typer.Exit(1)


def describe(found: Plugins, plugin: Plugin, known: Iterable[Known]) -> Used:
    """What there is to say of a plugin that is loaded."""
    point = next((each for each in known if f"entry point {each.value} " in f"{plugin.origin} "), None)
    return Used(
        plugin.name,
        plugin.purpose,
        plugin.origin,
        point.distribution if point else None,
        _version(point.distribution) if point else None,
        found.hooks_of(plugin),
        () if plugin.settings is None else shown_settings(plugin.settings),
        plugin.choice.queues,
        plugin.choice.except_queues,
    )


def shown_settings(settings: BaseModel) -> list[Setting]:
    """The values as JSON has them, secrets hidden."""
    return [
        Setting(name, _harmless(name, _plain(settings, name)), field.description or "")
        for name, field in type(settings).model_fields.items()
    ]


def unused(settings: Settings, known: Iterable[Known]) -> list[Unused]:
    """What is installed and not in the setting."""
    return [
        Unused(
            each.name,
            each.value,
            each.distribution,
            _version(each.distribution),
            f"EVENTBUS_PLUGINS={','.join((*settings.plugins, each.name))}",
        )
        for each in known
        if each.name not in settings.plugins
    ]


def _plain(settings: BaseModel, name: str) -> Any:
    try:
        return settings.model_dump(mode="json", include={name})[name]
    except Exception:  # noqa: BLE001 - a value that has no JSON form, of whatever class a plugin likes
        return str(getattr(settings, name))


def _harmless(name: str, value: Any) -> Any:
    """``value`` without secrets: whole, if the name says that it is one; the passwords of connection strings in it."""
    if value not in (None, "", False, True) and _SECRET.search(name):
        return masked(value) if isinstance(value, str) and masked(value) != value else _HIDDEN
    if isinstance(value, Mapping):
        return {key: _harmless(str(key), item) for key, item in value.items()}
    if isinstance(value, list):
        return [_harmless("", item) for item in value]
    return masked(value) if isinstance(value, str) else value


def _version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _show(invocation: Invocation, used: Sequence[Used], others: Sequence[Unused], problems: Sequence[str]) -> None:
    line = invocation.screen.line
    if not used:
        line("no plugins are used; the setting plugins names them (EVENTBUS_PLUGINS, or plugins in [tool.eventbus])")
    for number, plugin in enumerate(used, start=1):
        _show_one(invocation, number, plugin)
    if others:
        line()
        line("installed and not used", "bold")
    for other in others:
        line(f"  {other.name}  {other.distribution} {other.version or ''}".rstrip(), "cyan")
        line(f"    to use it: {other.enable}", "dim")
    if problems:
        line()
        line("problems", "bold")
    for problem in problems:
        line(f"  - {problem}", "red")


def _show_one(invocation: Invocation, number: int, plugin: Used) -> None:
    line = invocation.screen.line
    line(f"{number}. {plugin.name}" + (f"  {plugin.version}" if plugin.version else ""), "cyan")
    line(f"   {plugin.purpose or '(its class has no docstring)'}")
    line(f"   from      {plugin.origin}", "dim")
    line(f"   queues    {_queues(plugin)}")
    line(f"   hooks     {', '.join(hook.removeprefix('eventbus_') for hook in plugin.hooks) or 'none'}")
    for at, setting in enumerate(plugin.settings):
        line(f"   {'' if at else 'settings':<10}{setting.name} = {_text(setting.value)}  ({setting.description})")


def _queues(plugin: Used) -> str:
    chosen = "all" if plugin.queues is None else ", ".join(plugin.queues) or "none"
    return chosen + (f", without {', '.join(plugin.except_queues)}" if plugin.except_queues else "")


def _text(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, default=str)


def new(
    invocation: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="lower-case letters, digits and underscores")],
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="where its folder is made")] = Path(),
) -> None:
    """Start a plugin: a folder eventbus_NAME with a package, an entry point, settings, a README and tests that pass.

    Nothing that exists is overwritten.
    """
    from eventbus.cli.new_plugin import write

    made = write(name, folder)
    files = sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file())
    then = f"cd {made} && python -m pytest && python -m pip install --editable ."
    text = "\n".join([f"{made}", *(f"  {file}" for file in files), f"next: {then}", f"then: EVENTBUS_PLUGINS=…,{name}"])
    invocation.screen.answer({"folder": str(made), "files": files, "next": then}, text)
