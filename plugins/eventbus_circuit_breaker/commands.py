"""``eventbus circuits``: which breakers are open and why, and closing one by hand."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

import typer

from eventbus.cli.extending import Column, Commands, Invocation, session
from eventbus_circuit_breaker.records import Breaker, breakers, close_by_hand

_COLUMNS: Final = (
    Column("queue", "cyan"),
    Column("state", narrow=True),
    Column("next", narrow=True),
    Column("trips", right=True, narrow=True),
    Column("since", narrow=True),
    Column("why"),
)


def register(commands: Commands) -> None:
    """Add the commands."""
    group = commands.group("circuits", circuits, "eventbus circuits", "eventbus circuits close receipts")
    group.add("close", close, "eventbus circuits close receipts")


def circuits(
    invocation: Invocation,
    *,
    every: Annotated[bool, typer.Option("--all", help="also those that are closed again", show_default=False)] = False,
) -> None:
    """Show the circuit breakers that are open: the queues that are paused because their handlers keep failing.

    Open means that nothing of the queue is handled, and next says when that ends. Then the breaker is ready, and the
    first worker that asks gets one event to try; probing means that it is at it. Trips is how often in a row the
    breaker has opened. The exit code is 1 if one is open.
    """
    if invocation.subcommand is not None:
        return
    with session(invocation) as current:
        found = breakers(current.connection, current.schema)
    shown = [breaker for breaker in found if every or breaker.state != "closed"]
    if invocation.screen.as_json:
        invocation.screen.json(shown)
    elif shown:
        invocation.screen.table(_COLUMNS, [_row(breaker) for breaker in shown])
    else:
        closed = sum(breaker.closed_at is not None for breaker in found)
        more = f"; {closed} {'was' if closed == 1 else 'were'}, and closed again (--all)" if closed else ""
        invocation.screen.note(f"no circuit breaker is open{more}")
    if any(breaker.state != "closed" for breaker in found):
        raise typer.Exit(1)


def _row(breaker: Breaker) -> tuple[str | int, ...]:
    since = breaker.closed_at if breaker.state == "closed" else breaker.began_at
    why = "; ".join(part for part in (breaker.reason, breaker.error) if part)
    return (breaker.queue, breaker.state, _next(breaker), breaker.trips, _moment(since), why)


def _next(breaker: Breaker) -> str:
    """What happens next, and when."""
    match breaker.state:
        case "open":
            return f"probe in {_seconds(breaker.seconds)}"
        case "probing":
            return f"known within {_seconds(breaker.seconds)}"
        case "ready":
            return "probe at the next event"
        case _:
            return ""


def _seconds(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{round(whole / 60)} min"


def _moment(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"


def close(
    invocation: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the queue")],
) -> None:
    """Let a queue go on at once that its circuit breaker has paused.

    If its handler still fails, the breaker opens again after as many failures as the first time. A pause by hand
    (eventbus queues pause) stays.
    """
    with session(invocation) as current:
        closing = close_by_hand(current.connection, current.schema, name)
    if closing is None:
        invocation.screen.answer({"closed": None}, f"the circuit breaker of {name} is not open")
        raise typer.Exit(1)
    invocation.screen.answer({"closed": name, "seconds": closing.seconds, "trips": closing.trips},
                             f"closed the circuit breaker of {name} after {_seconds(closing.seconds)}")  # fmt: skip
