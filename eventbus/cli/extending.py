"""What a plugin needs to add commands to the command line: hook ``eventbus_commands``.

A command is a function whose first parameter is an :class:`Invocation`; the rest is read from its signature by typer.
``session(invocation)`` connects to the database, ``invocation.screen`` takes the answer.
"""

from eventbus.cli.moments import Since, period
from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import Cell, Column, Screen, counted, shown
from eventbus.cli.session import Session, session

__all__ = [
    "Cell",
    "Column",
    "Commands",
    "Invocation",
    "Screen",
    "Session",
    "Since",
    "counted",
    "period",
    "session",
    "shown",
]
