"""``eventbus torture``: hurts publishers and consumers on a real server for a while, and checks every promise."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import Column
from eventbus.cli.session import database

_COLUMNS: Final = (Column("what", "cyan", narrow=True), Column("count", right=True, narrow=True))
_SHOWN: Final = 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    examples = ("eventbus torture", "eventbus torture --minutes 10 --faults kill,stop", "eventbus torture --seed 17")
    Commands(app).add("torture", torture, *examples)


def torture(
    invocation: Invocation,
    minutes: Annotated[float, typer.Option("--minutes", min=0.05, max=1440, help="how long to publish and hurt")] = 2,
    faults: Annotated[
        str, typer.Option("--faults", metavar="A,B", help="kill, stop, term, terminate; all; none")
    ] = "all",
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, help="decides what is published and hurt; a new one if not given", show_default=False
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--history", metavar="FILE", help="keep what happened in this new file", show_default=False),
    ] = None,
) -> None:
    """Hurt publishers and consumers on a real server, then check that every promise was kept.

    Processes publish transactions of every shape, others consume them with handlers of every kind, and meanwhile some
    are killed, frozen, stopped or lose their connections. Exit code 1 if an event was lost, invented, repeated without
    a reason or out of order. Works in two schemas of its own, which stay if a promise was broken.
    """
    if invocation.given.schema is not None:
        raise typer.BadParameter("torture makes a schema of its own", param_hint="--schema")
    chosen = _faults(faults)
    if file is not None and file.exists():
        raise typer.BadParameter(f"{file} is there already", param_hint="--history")
    number = secrets.randbelow(1_000_000) if seed is None else seed
    from eventbus.testing.torture.run import Plan, run

    path = file.resolve() if file else Path(tempfile.mkdtemp(prefix="eventbus-torture-")) / "history.jsonl"
    settings = invocation.settings(schema=f"eventbus_torture_{number}")
    owned = settings.dsn is None
    with database(invocation, settings, migrated=False) as (settings, dsn):
        plan = Plan(dsn, settings.schema_name, str(number), minutes * 60, chosen, path, owned)
        result = run(plan)
    again = f"eventbus torture --seed {number} --minutes {minutes:g} --faults {faults}"
    screen = invocation.screen
    if screen.as_json:
        screen.json({"seed": number, "counts": result.counts, "again": again, "history": str(path),
                     "violations": [str(each) for each in result.violations]})  # fmt: skip
    else:
        screen.table(_COLUMNS, [(name, f"{count:,}") for name, count in result.counts.items()])
        for each in result.violations[:_SHOWN]:
            screen.line(str(each), "red")
        verdict = f"{len(result.violations):,} broken promises" if result.violations else "every promise was kept"
        screen.line(f"{verdict}; seed {number}, again with: {again}")
    if result.violations:
        screen.note(f"kept to look at: {path}, schemas {settings.schema_name} and {settings.schema_name}_business")
        raise typer.Exit(1)


def _faults(text: str) -> tuple[str, ...]:
    from eventbus.testing.torture.crew import FAULTS

    if text in ("all", "none"):
        return FAULTS if text == "all" else ()
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in FAULTS]:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known are {', '.join(FAULTS)}", param_hint="--faults")
    return names
