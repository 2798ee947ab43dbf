"""``eventbus consume``: imports the user's modules and runs their handlers until a signal."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import shown
from eventbus.cli.session import connected, database
from eventbus.errors import BusPaused, ConfigurationError, Unavailable

if TYPE_CHECKING:
    from eventbus.bus import EventBus
    from eventbus.plugins.registry import Plugins
    from eventbus.settings import Settings


log = logging.getLogger("eventbus")


def register(app: typer.Typer) -> None:
    """Add the command."""
    Commands(app).add(
        "consume",
        consume,
        "eventbus consume shop.handlers",
        "eventbus consume shop.handlers --until-idle",
        "eventbus consume shop.orders shop.mails --queues ledger,receipts --concurrency 50",
        "eventbus consume shop.app:bus",
    )


def consume(
    invocation: Invocation,
    modules: Annotated[
        list[str], typer.Argument(metavar="MODULE…", help="package.module, package.module:bus or a .py file")
    ],
    queues: Annotated[str | None, typer.Option("--queues", metavar="A,B", help="only these queues")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="handlers at once, per queue", show_default=False)
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="stop when nothing is left to do", show_default=False)
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait for a server that is down at the start")] = True,
) -> None:
    """Run the handlers that MODULE subscribes, and the relay with them.

    Start it as often as you like, on as many machines: the processes share the queues. SIGTERM or Ctrl-C lets running
    handlers finish and gives the rest back; a second one stops at once. What handlers see as EVENTBUS_DSN and
    EVENTBUS_SCHEMA is what this command uses.
    """
    from eventbus.cli.loading import load_modules

    settings = invocation.settings(concurrency=concurrency)
    with database(invocation, settings) as (settings, dsn), _environment(dsn, settings.schema_name):
        bus = _bus_of(load_modules(modules, Path.cwd()))
        _log(as_json=invocation.given.as_json, debug=invocation.given.debug)
        plugins = bus.plugins_for(settings)
        _check_rights(settings, dsn, plugins, wait=wait)
        chosen = _names(queues)
        taken = bus.subscriptions if chosen is None else bus.subscriptions.only(chosen)
        log.info("consuming %s", ", ".join(sorted(item.name for item in taken)))
        code = bus.consume(settings, queues=chosen, until_idle=until_idle, wait=wait)
    raise typer.Exit(code)


@contextmanager
def _environment(dsn: str, schema: str) -> Iterator[None]:
    """What the handlers find in the environment, also those that connect by themselves."""
    ours = {"EVENTBUS_DSN": dsn, "EVENTBUS_SCHEMA": schema}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _bus_of(loaded: list[Any]) -> EventBus:
    """The bus that the modules name after a colon; the default one if none does."""
    from eventbus.bus import EventBus, default_bus

    named = []
    for item in loaded:
        if item.attribute is None:
            continue
        if not isinstance(item.attribute, EventBus):
            kind = type(item.attribute).__name__
            raise ConfigurationError(f"what {item.module.__name__} names after the colon is no EventBus but a {kind}")
        named.append(item.attribute)
    if any(bus is not named[0] for bus in named):
        raise ConfigurationError("the modules name different buses; run one eventbus consume for each")
    return named[0] if named else default_bus()


def _names(queues: str | None) -> list[str] | None:
    if queues is None:
        return None
    names = [name.strip() for name in queues.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter("names no queue", param_hint="--queues")
    return names


def _check_rights(settings: Settings, dsn: str, plugins: Plugins, *, wait: bool) -> None:
    """Name a missing right before anything starts. A server that is down is waited for later."""
    import psycopg

    from eventbus.postgres.admin import is_foreign
    from eventbus.postgres.link import broken, turned_away
    from eventbus.postgres.migrate import require_current
    from eventbus.postgres.privileges import ATTACH, CONSUME, Right, missing, require

    try:
        with connected(dsn, "start") as connection:
            require_current(connection, settings.schema_name, plugins.migrations())
            theirs = [Right(table, privileges) for table, privileges in plugins.rights()]
            require(connection, settings.schema_name, (*CONSUME, *theirs))
            if is_foreign(connection, settings.schema_name) and missing(connection, settings.schema_name, ATTACH):
                raise BusPaused(
                    "this database was restored from another one, and this role may not take it over; "
                    "as the owner of the schema run: eventbus resume"
                )
    except Unavailable as error:
        if not wait or turned_away(str(error)):
            raise
    except psycopg.OperationalError as error:  # it went away while it was asked
        if not wait or not broken(error):
            raise


def _log(*, as_json: bool, debug: bool) -> None:
    """Log to standard error, unless a module of the user's has set up logging by itself."""
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if as_json else _Lines("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler])


_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _Lines(logging.Formatter):
    """Text in which no event and no error message can command the terminal or feign a line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The record without its traceback, on one line."""
        return shown(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name is logging's
        """The traceback, line by line."""
        return "\n".join(map(shown, super().formatException(ei).splitlines()))


class _JsonLines(logging.Formatter):
    """One JSON object per record, with what the record carries in ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
