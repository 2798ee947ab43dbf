"""``eventbus queues``: what is in them, whether the bus runs, and dropping one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import Column
from eventbus.cli.session import session

if TYPE_CHECKING:
    from eventbus.postgres.admin import Queue, Status

_COLUMNS: Final = (
    Column("queue", "cyan"),
    Column("patterns"),
    Column("waiting", right=True, narrow=True),
    Column("running", right=True, narrow=True),
    Column("retrying", "yellow", right=True, narrow=True),
    Column("dead", "red", right=True, narrow=True),
    Column("oldest", right=True, narrow=True),
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = Commands(app).group(
        "queues", queues, "eventbus queues", "eventbus queues --json", "eventbus queues drop NAME"
    )
    group.add("drop", drop, "eventbus queues drop old-receipts")


def queues(invocation: Invocation) -> None:
    """Show every queue: its patterns, and how much of it is waiting, running, retrying and dead.

    Oldest is how long ago the oldest waiting event was published. The line below tells of the bus itself: its workers,
    committed events that are not relayed yet, and delayed events.
    """
    if invocation.subcommand is not None:
        return
    from eventbus.postgres import admin

    with session(invocation) as current:
        status = admin.status(current.connection, current.schema)
        found = admin.queues(current.connection, current.schema)
        lease = current.settings.lease
    screen = invocation.screen
    if screen.as_json:
        screen.json({"bus": status.bus, "workers": status.workers, "backlog": status.backlog,
                     "scheduled": status.scheduled, "queues": found})  # fmt: skip
        return
    if found:
        screen.table(_COLUMNS, [_row(queue) for queue in found])
    else:
        screen.line("no queues yet: a consumer makes them when it starts (eventbus consume MODULE)")
    _show_bus(invocation, status, lease)


def _row(queue: Queue) -> tuple[str | int, ...]:
    from eventbus.postgres.copies import duration

    patterns = " ".join(queue.patterns) or "(none: being dropped)"
    oldest = "" if queue.oldest_age is None else duration(queue.oldest_age)
    return (queue.name, patterns, queue.waiting, queue.running, queue.retrying, queue.dead, oldest)


def _show_bus(invocation: Invocation, status: Status, lease: float) -> None:
    """On a terminal below the table; in a pipe on standard error, so that the table stays one."""
    import sys

    from eventbus.postgres.admin import COUNTED_UP_TO

    silent = [w for w in status.workers if w.heartbeat_age is None or w.heartbeat_age > lease]
    parts = [f"workers: {len(status.workers) - len(silent)}" + (f" and {len(silent)} silent" if silent else "")]
    for label, count in (("not relayed yet", status.backlog.events), ("delayed", status.scheduled.events)):
        number = f"more than {COUNTED_UP_TO:,}" if count > COUNTED_UP_TO else f"{count:,}"
        parts.append(f"{label}: {number}")
    line = "   ".join(parts)
    paused = ""
    if status.bus.state == "paused":
        paused = f"the bus is PAUSED: {status.bus.reason}; to go on: eventbus resume"
    elif status.bus.foreign:
        paused = "this database was restored from another one; the next worker or eventbus resume attaches it"
    screen = invocation.screen
    if sys.stdout.isatty():
        screen.line()
        screen.line(line, "dim")
        if paused:
            screen.line(paused, "bold red")
    else:
        screen.note(line + (f"\n{paused}" if paused else ""))


def drop(
    invocation: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the queue")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask", show_default=False)] = False,
) -> None:
    """Remove a queue with everything that waits in it, its retries and its dead letters.

    Stop its consumers first: a consumer that starts makes its queue again. One that runs meanwhile loses what it holds
    of it and cannot settle it. The events stay in the outbox and in other queues.
    """
    from eventbus.postgres import admin
    from eventbus.postgres.dropping import drop_queue

    with session(invocation) as current:
        admin.find_queue(current.connection, current.schema, name)
        [queue] = [item for item in admin.queues(current.connection, current.schema) if item.name == name]
        content = (
            f"{queue.waiting:,} waiting, {queue.running:,} running, {queue.retrying:,} retrying, {queue.dead:,} dead"
        )
        if not invocation.screen.confirmed(f"drop queue {name} with {content}?", yes=yes):
            invocation.screen.note("nothing was dropped")
            raise typer.Exit(1)
        with invocation.screen.progress(f"dropping {name}", None) as progress:
            drop_queue(current.connection, current.schema, name, progress=lambda: progress(1, ""))
    invocation.screen.answer({"dropped": queue}, f"dropped {name}: {content}")
