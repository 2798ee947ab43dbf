"""A command's way to its database: the server of the DSN, or the embedded one of the working folder.

A database behind a DSN is never migrated by a command other than ``migrate``. The embedded one is for development, so
it is migrated by every command that uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eventbus.cli.options import Invocation
from eventbus.errors import SchemaMissing, Unavailable

if TYPE_CHECKING:
    import psycopg

    from eventbus.postgres.migrate import Steps
    from eventbus.settings import Settings


@dataclass(frozen=True, slots=True)
class Session:
    """A connection in autocommit mode, and the schema of the bus behind it."""

    connection: psycopg.Connection
    schema: str
    settings: Settings


@contextmanager
def database(invocation: Invocation, settings: Settings, *, migrated: bool = True) -> Iterator[tuple[Settings, str]]:
    """The settings with a DSN in them, and that DSN. Starts or joins the embedded server if there is none."""
    if settings.dsn is not None:
        yield settings, settings.dsn
        return
    from pathlib import Path

    from eventbus.postgres.migrate import migrate
    from eventbus.runtime.embedded import start

    with start(Path.cwd()) as server:
        invocation.screen.note(
            f"eventbus: no EVENTBUS_DSN, so this is the embedded PostgreSQL {server.version} in .eventbus/"
        )
        if migrated:
            migrate(server.dsn, settings.schema_name, steps_of_plugins(settings))
        yield settings.model_copy(update={"dsn": server.dsn}), server.dsn


def steps_of_plugins(settings: Settings) -> Steps:
    """The steps of the tables of the plugins in use; :class:`ConfigurationError` if one of them has a problem."""
    from eventbus.plugins.registry import loaded

    plugins = loaded(settings)
    plugins.require_all()
    return plugins.migrations()


@contextmanager
def session(invocation: Invocation, *, checked: bool = True) -> Iterator[Session]:
    """One connection for one command. ``checked``: the schema has to be there and to fit this code.

    Raises :class:`Unavailable` without a server, :class:`SchemaMissing` and :class:`SchemaMismatch`.
    """
    from eventbus.postgres.migrate import require_current

    with (
        database(invocation, invocation.settings()) as (settings, dsn),
        connected(dsn, invocation.command.rpartition(" ")[2]) as connection,
    ):
        if checked:
            require_current(connection, settings.schema_name)
        yield Session(connection, settings.schema_name, settings)


@contextmanager
def connected(dsn: str, name: str) -> Iterator[psycopg.Connection]:
    """A connection in autocommit mode; the server's errors on the way become the bus's own where these say more."""
    import psycopg
    from psycopg import errors

    from eventbus.postgres.connecting import conninfo

    try:
        connection = psycopg.connect(conninfo(dsn, name), autocommit=True, prepare_threshold=None)
    except psycopg.OperationalError as error:
        raise Unavailable(f"no connection to PostgreSQL: {error}") from error
    with connection:
        try:
            yield connection
        except (errors.UndefinedTable, errors.UndefinedFunction, errors.InvalidSchemaName) as error:
            raise SchemaMissing(f"{error.diag.message_primary}; run: eventbus migrate") from error
