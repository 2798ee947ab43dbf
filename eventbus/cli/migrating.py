"""``eventbus migrate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import Column, counted
from eventbus.cli.session import database, steps_of_plugins
from eventbus.errors import Unavailable

if TYPE_CHECKING:
    from eventbus.postgres.migrate import Migration


def register(app: typer.Typer) -> None:
    """Add the command."""
    Commands(app).add(
        "migrate",
        migrate,
        "eventbus migrate",
        "eventbus migrate --plan",
        "eventbus migrate --sql > eventbus.sql && psql --file=eventbus.sql",
    )


def migrate(
    invocation: Invocation,
    plan: Annotated[bool, typer.Option("--plan", help="only show what would be done", show_default=False)] = False,
    sql: Annotated[
        bool, typer.Option("--sql", help="only print it all as SQL for psql, for a DBA to run", show_default=False)
    ] = False,
) -> None:
    """Install the bus's schema, or bring it up to date.

    Run it with every deployment, before the new code starts: it does what is missing and nothing else. Any number of
    processes may run it at once.
    """
    if sql:
        _print_script(invocation)
        return
    import psycopg

    from eventbus.postgres import migrate as steps

    try:
        with database(invocation, invocation.settings(), migrated=False) as (settings, dsn):
            schema, theirs = settings.schema_name, steps_of_plugins(settings)
            if plan:
                _show_plan(invocation, schema, steps.pending(dsn, schema, theirs))
            else:
                _show_applied(invocation, schema, steps.migrate(dsn, schema, theirs))
    except psycopg.OperationalError as error:
        raise Unavailable(f"no connection to PostgreSQL: {error}") from error


def _print_script(invocation: Invocation) -> None:
    from eventbus.postgres.migrate import script

    settings = invocation.settings()
    schema = settings.schema_name
    text = script(schema, steps_of_plugins(settings))
    invocation.screen.answer({"schema": schema, "sql": text}, text.rstrip("\n"))


def _show_plan(invocation: Invocation, schema: str, pending: list[Migration]) -> None:
    screen = invocation.screen
    if screen.as_json:
        steps = [{"name": migration.name, "purpose": migration.purpose} for migration in pending]
        screen.json({"schema": schema, "pending": steps})
    elif pending:
        rows = [(migration.name, migration.purpose) for migration in pending]
        screen.table([Column("step", "cyan", narrow=True), Column("what it does")], rows)
    else:
        screen.line(f"schema {schema} is up to date")


def _show_applied(invocation: Invocation, schema: str, applied: list[str]) -> None:
    text = (
        f"schema {schema} is ready: applied {counted(len(applied), 'step')}"
        if applied
        else f"schema {schema} is up to date"
    )
    invocation.screen.answer({"schema": schema, "applied": applied}, text)
