"""From whatever goes wrong in a command to one line on standard error and an exit code.

0: fine. 1: what was asked about is not fine (no server, no schema, no such event, …). 2: usage (an option, a setting, a
module, an event that breaks the rules). 130: Ctrl-C. 141: nobody reads the output any more. A traceback only with
``--debug``, and a password never.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from typing import Any, Final

import typer

from eventbus.cli.options import Given
from eventbus.cli.screen import OutputClosed
from eventbus.errors import (
    ConfigurationError,
    EventBusError,
    PayloadMismatch,
    PublishError,
    SchemaMismatch,
    SchemaMissing,
)

NOT_FINE: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
NOBODY_READS: Final = 141

_USAGE_ERROR: Final = typer.BadParameter.__mro__[1]
"""typer's own class for every error in the arguments; it has no public name."""

_PASSWORD_IN_URL = re.compile(r"(//[^\s:/@]*:)[^\s@]*@")
_PASSWORD_PARAMETER = re.compile(r"((?:ssl)?password\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&]+)", re.IGNORECASE)


def run(app: typer.Typer, arguments: list[str]) -> int:
    """Run the application; returns the exit code and never raises."""
    given = Given()
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="eventbus", standalone_mode=False, obj=given)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - the end of the program
        return _report(error, debug=given.debug or "--debug" in arguments)
    return code if isinstance(code, int) else 0


def _report(error: BaseException, *, debug: bool) -> int:
    if isinstance(error, BrokenPipeError | OutputClosed):
        _forget_output()
        return NOBODY_READS
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        sys.stderr.write("\n")
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else NOT_FINE
    if debug:
        sys.stderr.write(masked("".join(traceback.format_exception(error))))
    sys.stderr.write(f"eventbus: {masked(message_of(error))}\n")
    return code_of(error)


def code_of(error: BaseException) -> int:
    """The exit code of an error."""
    if isinstance(error, SchemaMissing | SchemaMismatch | PayloadMismatch):
        return NOT_FINE
    if isinstance(error, _USAGE_ERROR | ConfigurationError | PublishError) or _lacks_a_right(error):
        return USAGE
    return NOT_FINE


def message_of(error: BaseException) -> str:
    """An error on one line, with what to do about it where we know."""
    if isinstance(error, _USAGE_ERROR):
        return _usage(error)
    text = " ".join(str(error).split()) or type(error).__name__
    if _lacks_a_right(error):
        return f"{_server_says(error)}; run this as the owner of the schema, or grant the right"
    if isinstance(error, EventBusError | OSError) or _is_from_the_server(error):
        return text
    return f"unexpected error: {type(error).__name__}: {text} (--debug shows where)"


def masked(text: str) -> str:
    """``text`` without the passwords of connection strings in it."""
    return _PASSWORD_PARAMETER.sub(r"\1***", _PASSWORD_IN_URL.sub(r"\1***@", text))


def _usage(error: BaseException) -> str:
    message = getattr(error, "format_message", lambda: str(error))()
    text = " ".join(str(message).split())
    context = getattr(error, "ctx", None)
    return f"{text} (see: {context.command_path} --help)" if context is not None else text


def _is_from_the_server(error: BaseException) -> bool:
    psycopg = sys.modules.get("psycopg")
    return psycopg is not None and isinstance(error, psycopg.Error)


def _lacks_a_right(error: BaseException) -> bool:
    return _is_from_the_server(error) and getattr(error, "sqlstate", None) == "42501"


def _server_says(error: Any) -> str:
    """What the server said, without the statement in which it happened."""
    return " ".join(str(error.diag.message_primary or error).split())


def _forget_output() -> None:
    """Let Python's last flush of standard output go nowhere instead of failing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
