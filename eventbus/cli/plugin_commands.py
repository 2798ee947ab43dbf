"""The commands that plugins add to the command line.

A plugin that cannot be loaded must not keep anybody from looking after a queue: it is a warning here, and an error
where the plugin is needed (``consume``, ``migrate``). ``eventbus plugins`` tells of it by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import typer

_SAY_IT_THEMSELVES: Final = frozenset({"consume", "migrate", "plugins", "doctor"})


def add_commands(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Add those of the plugins in use. Never raises; warns on standard error."""
    from eventbus.cli.failures import masked, message_of
    from eventbus.cli.options import Commands
    from eventbus.errors import ConfigurationError
    from eventbus.settings import load

    try:
        settings = load()
    except ConfigurationError:
        return  # the command that was asked for says it, or does not need them
    if any(":" in name for name in settings.plugins) and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if not settings.plugins:
        return
    from eventbus.plugins.registry import loaded

    try:
        plugins = loaded(settings)
    except ConfigurationError as error:
        _warn(arguments, masked(message_of(error)))
        return
    for problem in plugins.problems:
        _warn(arguments, masked(message_of(problem)))
    for implementation in plugins.of("eventbus_commands"):
        try:
            implementation(commands=Commands(app))
        except Exception as error:  # noqa: BLE001 - one plugin must not take the commands of the others away
            name = f"plugin {implementation.plugin.name} ({implementation.plugin.origin})"
            said = f"{name}: eventbus_commands failed: {type(error).__name__}: {error}"
            sys.stderr.write(f"eventbus: warning: {masked(' '.join(said.split()))}\n")


def _warn(arguments: Sequence[str], problem: str) -> None:
    command = next((word for word in arguments if not word.startswith("-")), "")
    if command not in _SAY_IT_THEMSELVES:
        sys.stderr.write(f"eventbus: warning: {problem}\n")
