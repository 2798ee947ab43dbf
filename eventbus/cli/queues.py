"""``eventbus queues``: what is in them, what blocks them, whether the bus runs; choosing lanes, and dropping one.

``pausing`` pauses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from eventbus.cli.options import Commands, Invocation
from eventbus.cli.pausing import pause, resume
from eventbus.cli.screen import Column, shown
from eventbus.cli.session import session

if TYPE_CHECKING:
    from eventbus.postgres.admin import Queue, Status

_COLUMNS: Final = (
    Column("queue", "cyan"),
    Column("patterns"),
    Column("waiting", right=True, narrow=True),
    Column("running", right=True, narrow=True),
    Column("retrying", "yellow", right=True, narrow=True),
    Column("parked", "yellow", right=True, narrow=True),
    Column("dead", "red", right=True, narrow=True),
    Column("oldest", right=True, narrow=True),
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = Commands(app).group(
        "queues", queues, "eventbus queues", "eventbus queues --blocked", "eventbus queues drop NAME"
    )
    group.add("pause", pause, "eventbus queues pause receipts --reason 'the mail server is down' --for 10m")
    group.add("resume", resume, "eventbus queues resume receipts")
    group.add("lanes", lanes, "eventbus queues lanes ledger 64")
    group.add("drop", drop, "eventbus queues drop old-receipts")


def queues(
    invocation: Invocation,
    blocked: Annotated[
        bool,
        typer.Option("--blocked", help="the keys of ordered queues that stand still, and why", show_default=False),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="the most keys that --blocked shows")] = 50,
) -> None:
    """Show every queue: its patterns, and how much of it is waiting, running, retrying, parked and dead.

    Parked events wait behind an earlier one of their key. Oldest is how long ago the oldest waiting event was
    published. The line below tells of the bus itself: its workers, committed events that are not relayed yet, and
    delayed events. Below it are the queues that are paused, and why.
    """
    if invocation.subcommand is not None:
        return
    if blocked:
        show_blocked(invocation, limit)
        return
    from eventbus.postgres import admin
    from eventbus.postgres.pausing import pauses

    with session(invocation) as current:
        status = admin.status(current.connection, current.schema)
        found = admin.queues(current.connection, current.schema)
        paused = pauses(current.connection, current.schema)
        lease = current.settings.lease
    screen = invocation.screen
    if screen.as_json:
        screen.json({"bus": status.bus, "workers": status.workers, "backlog": status.backlog,
                     "scheduled": status.scheduled, "queues": found, "pauses": paused})  # fmt: skip
        return
    if found:
        screen.table(_COLUMNS, [_row(queue) for queue in found])
    else:
        screen.line("no queues yet: a consumer makes them when it starts (eventbus consume MODULE)")
    _show_bus(invocation, status, lease)
    for item in paused:
        screen.note(f"{item.queue} is {shown(item.words())}")
    for queue in found:
        if queue.filled is not None:
            screen.note(f"{queue.name} still gets what was relayed before it began: {queue.filled:.0%}")
        if queue.changing:
            screen.note(f"{queue.name} goes over to other lanes once the present ones are empty")


def _row(queue: Queue) -> tuple[str | int, ...]:
    from eventbus.postgres.copies import duration

    patterns = " ".join(queue.patterns) or "(none: being dropped)"
    oldest = "" if queue.oldest_age is None else duration(queue.oldest_age)
    counts = (queue.waiting, queue.running, queue.retrying, queue.parked, queue.dead)
    return (queue.name, patterns, *counts, oldest)


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


def show_blocked(invocation: Invocation, limit: int) -> None:
    """Print the keys that stand still."""
    from eventbus.postgres.copies import duration, message_of
    from eventbus.postgres.lanes import blocked

    with session(invocation) as current:
        found = blocked(current.connection, current.schema, limit=limit)
    screen = invocation.screen
    if screen.as_json:
        screen.json(found)
        return
    if not found:
        screen.note("no key of an ordered queue stands still")
        return
    columns = [Column("queue", "cyan"), Column("key"), Column("parked", "yellow", right=True, narrow=True)]
    columns += [Column("behind"), Column("since", narrow=True)]
    rows = []
    for item in found:
        behind = "a running event" if item.by == "running" else f"dead letter {item.dead_letter}: {item.reason}"
        if item.by == "retry":
            due = "due now" if (item.due_in or 0.0) <= 0 else f"due in {duration(item.due_in or 0.0)}"
            message = message_of(item.error)
            behind = f"a retry, {due}{': ' if message else ''}{message}"
        since = f"{item.since.astimezone():%Y-%m-%d %H:%M:%S}"
        rows.append((item.queue, shown(item.key), item.parked, shown(behind), since))
    screen.table(columns, rows)
    if any(item.by == "dead letter" for item in found):
        screen.note("to go on behind a dead letter: eventbus dead-letters redrive NUMBER, or discard it")


def lanes(
    invocation: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="an ordered queue")],
    number: Annotated[int, typer.Argument(metavar="N", min=1, max=1024, help="how many keys may be worked on at once")],
) -> None:
    """Choose into how many lanes an ordered queue is split: workers claim each lane by itself.

    What is relayed from now on goes to the new lanes. Workers turn to them once the present lanes are empty, so that
    every key keeps its order.
    """
    from eventbus.postgres.lanes import change_lanes

    with session(invocation) as current:
        change = change_lanes(current.connection, current.schema, name, number)
    text = f"{name} has {change.after} lanes"
    if change.before != change.after:
        text = f"{name} gets {change.after} lanes instead of {change.before}, once the present ones are empty"
    invocation.screen.answer(change, text)


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
            f"{queue.waiting:,} waiting, {queue.running:,} running, {queue.retrying:,} retrying, "
            + (f"{queue.parked:,} parked, " if queue.parked else "")
            + f"{queue.dead:,} dead"
        )
        if not invocation.screen.confirmed(f"drop queue {name} with {content}?", yes=yes):
            invocation.screen.note("nothing was dropped")
            raise typer.Exit(1)
        with invocation.screen.progress(f"dropping {name}", None) as progress:
            drop_queue(current.connection, current.schema, name, progress=lambda: progress(1, ""))
    invocation.screen.answer({"dropped": queue}, f"dropped {name}: {content}")
