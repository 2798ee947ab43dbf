"""``eventbus doctor``: is everything fine, and what to do about what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import typer

from eventbus.cli.failures import masked, message_of
from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import shown
from eventbus.cli.session import connected, database
from eventbus.errors import ConfigurationError, Unavailable, passes

if TYPE_CHECKING:
    from eventbus.plugins.registry import Implementation, Plugins
    from eventbus.plugins.values import Finding
    from eventbus.postgres.migrate import Steps
    from eventbus.settings import Settings

Level = Literal["ok", "degraded", "stalled"]
_LEVELS: Final[tuple[Level, ...]] = ("ok", "degraded", "stalled")
_STYLES: Final = ("green", "yellow", "bold red")
_WIDTH: Final = 17


@dataclass(frozen=True, slots=True)
class Checked:
    """What one check found. ``check``: its name, or that of the plugin whose finding it is."""

    check: str
    level: Level
    code: str
    message: str
    hint: str | None = None


def register(app: typer.Typer) -> None:
    """Add the command."""
    Commands(app).add("doctor", doctor, "eventbus doctor", "eventbus doctor --json")


def doctor(invocation: Invocation) -> None:
    """Check everything, and say what to do about what is not fine.

    Each check is ok, degraded (it works, and somebody should look) or stalled (it does not work). A check that fails
    says so, and the others go on. Plugins add findings of their own. The exit code is 0 if everything is ok, else 1.
    """
    found = list(_examine(invocation))
    worst = max((_LEVELS.index(each.level) for each in found), default=0)
    if invocation.screen.as_json:
        invocation.screen.json({"level": _LEVELS[worst], "findings": found})
    else:
        for each in found:
            _show(invocation, each)
    if worst:
        raise typer.Exit(1)


def _examine(invocation: Invocation) -> Iterator[Checked]:
    try:
        settings = invocation.settings()
    except ConfigurationError as error:
        yield _failed("settings", error, "settings_invalid")
        return
    yield Checked("settings", "ok", "settings_ok", "every setting is known and valid")
    plugins = _plugins(settings)
    yield from _of_plugins(plugins)
    with ExitStack() as stack:
        try:
            settings, dsn = stack.enter_context(database(invocation, settings, migrated=False))
            stack.enter_context(connected(dsn, "doctor"))
        except Exception as error:  # noqa: BLE001 - whatever it is, this is the place to say so
            code = "server_unreachable" if isinstance(error, Unavailable) else "check_failed"
            yield _failed("server", error, code)
            return
        yield from _of_the_database(settings, dsn, plugins)


def _of_the_database(settings: Settings, dsn: str, plugins: Plugins | ConfigurationError) -> Iterator[Checked]:
    from eventbus.plugins.registry import Plugins
    from eventbus.postgres import checkup

    steps: Steps = ()
    try:
        steps = plugins.migrations() if isinstance(plugins, Plugins) else ()
    except ConfigurationError as error:
        yield _failed("plugins", error, "plugin_broken")

    def patiently(check: Callable[[checkup.Patient], Finding | list[Finding]]) -> Callable[[], Iterable[Finding]]:
        def run() -> Iterable[Finding]:
            with connected(dsn, "doctor") as connection:
                given = check(checkup.Patient(connection, settings.schema_name, settings, dsn, steps))
            return given if isinstance(given, list) else [given]

        return run

    usable = True
    for name, check in checkup.OF_THE_SERVER.items():
        for each in _run(name, patiently(check)):
            usable = usable and not (name == "schema" and each.level == "stalled")
            yield each
    if not usable:
        return
    for name, check in checkup.OF_THE_BUS.items():
        yield from _run(name, patiently(check))
    if isinstance(plugins, Plugins):
        for implementation in plugins.of("eventbus_health"):
            yield from _run(implementation.plugin.name, _asked(implementation, dsn, settings.schema_name), "degraded")


def _run(name: str, check: Callable[[], Iterable[Finding]], failed: Level = "stalled") -> Iterator[Checked]:
    """What a check found; that it failed, if it did."""
    try:
        found = [Checked(name, each.level, each.code, each.message, each.hint) for each in check()]
    except BaseException as error:  # one check that fails must not hide what the others find
        if passes(error):
            raise
        found = [_failed(name, error, "check_failed", failed)]
    yield from found


def _asked(implementation: Implementation, dsn: str, schema: str) -> Callable[[], Iterable[Finding]]:
    """The findings of a plugin, on a connection of its own."""
    from eventbus.plugins.checking import listed
    from eventbus.plugins.values import Finding

    def run() -> Iterable[Finding]:
        with connected(dsn, "doctor") as connection:
            given = implementation(connection=connection, schema=schema)
            return () if given is None else listed(implementation.plugin, implementation.hook, given, Finding)

    return run


def _plugins(settings: Settings) -> Plugins | ConfigurationError:
    from eventbus.plugins.registry import loaded

    try:
        return loaded(settings)
    except ConfigurationError as error:
        return error


def _of_plugins(plugins: Plugins | ConfigurationError) -> Iterator[Checked]:
    problems = [plugins] if isinstance(plugins, ConfigurationError) else plugins.problems
    for problem in problems:
        yield _failed("plugins", problem, "plugin_broken")
    if not problems:
        names = [] if isinstance(plugins, ConfigurationError) else [plugin.name for plugin in plugins]
        yield Checked("plugins", "ok", "plugins_ok", f"loaded: {', '.join(names) or 'none'}")


def _failed(check: str, error: BaseException, code: str, level: Level = "stalled") -> Checked:
    return Checked(check, level, code, masked(message_of(error)))


def _show(invocation: Invocation, each: Checked) -> None:
    line = invocation.screen.line
    line(f"{each.level:<10}{each.check:<{_WIDTH}}{shown(each.message)}", _STYLES[_LEVELS.index(each.level)])
    if each.hint:
        line(f"{'':<{10 + _WIDTH}}{shown(each.hint)}", "dim")
