"""The commands that plugins add to the command line.

A command of the bus itself loads no plugin for this: it starts faster, and a plugin that cannot be loaded keeps nobody
from looking after a queue. It is an error where plugins are needed (``consume``, ``migrate``), and a warning for the
help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def add_commands(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Add those of the plugins in use, if no other command was asked for, or warn. Raises Ctrl-C only."""
    own = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    if next((word for word in arguments if word in own), None) is not None:
        return
    from eventbus.cli.failures import masked, message_of
    from eventbus.cli.options import Commands, find_own_plugins
    from eventbus.errors import ConfigurationError, passes
    from eventbus.settings import load

    try:
        settings = load()
    except ConfigurationError:
        return  # the command that was asked for says it, or does not need them
    if not settings.plugins:
        return
    find_own_plugins(settings.plugins)
    from eventbus.plugins.loading import brief
    from eventbus.plugins.registry import loaded

    try:
        plugins = loaded(settings)
    except ConfigurationError as error:
        _warn(masked(message_of(error)))
        return
    for problem in plugins.problems:
        _warn(masked(message_of(problem)))
    for implementation in plugins.of("eventbus_commands"):
        try:
            implementation(commands=Commands(app))
        except BaseException as error:  # one plugin must not take the commands of the others away
            if passes(error):
                raise
            _warn(masked(str(implementation.plugin.problem(f"eventbus_commands failed: {brief(error)}"))))


def _warn(problem: str) -> None:
    sys.stderr.write(f"eventbus: warning: {problem}\n")
