"""``eventbus explain``, ``eventbus topics`` and ``eventbus resume``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final
from uuid import UUID

import typer

from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import Column, shown
from eventbus.cli.session import session

if TYPE_CHECKING:
    from eventbus.postgres.explanation import Copy, Explanation

_STYLES: Final[Mapping[str, str]] = {
    "done": "green",
    "dead": "red",
    "retrying": "yellow",
    "parked": "yellow",
    "filling": "dim",
    "no copy": "dim",
}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    commands = Commands(app)
    commands.add("explain", explain, "eventbus explain 0192f0c1-8a3e-7cc1-b52e-6f1d5a2b9c44")
    commands.add("topics", topics, "eventbus topics", "eventbus topics --count")
    commands.add("resume", resume, "eventbus resume")


def explain(
    invocation: Invocation,
    event_id: Annotated[str, typer.Argument(metavar="EVENT_ID", help="what publishing the event returned")],
) -> None:
    """Show where an event stands: which queues it matched, where each copy is, and why it is not moving."""
    from eventbus.postgres.explanation import explain as look

    try:
        wanted = UUID(event_id)
    except ValueError:
        raise typer.BadParameter(f"'{event_id}' is no event id (a UUID)", param_hint="EVENT_ID") from None
    with session(invocation) as current:
        explanation = look(current.connection, current.schema, wanted, lease=current.settings.lease)
    if invocation.screen.as_json:
        invocation.screen.json(explanation)
    else:
        _show(invocation, explanation)


def _show(invocation: Invocation, explanation: Explanation) -> None:
    line = invocation.screen.line
    line(f"{explanation.topic}  {explanation.event_id}", "bold")
    details = []
    if explanation.published_at is not None:
        details.append(f"published {explanation.published_at.astimezone():%Y-%m-%d %H:%M:%S %z}")
    if explanation.size is not None:
        details.append(f"{explanation.size:,} bytes")
    if explanation.key is not None:
        details.append(f"key {shown(explanation.key)}")
    line("  " + ", ".join(details))
    line(f"  {explanation.what}")
    for reason in explanation.why:
        line(f"  - {reason}", "yellow")
    for copy in explanation.copies:
        _show_copy(invocation, copy)
    if explanation.unmatched:
        line()
        line(f"no pattern of these queues matches: {_listed(explanation.unmatched)}", "dim")
    elif not explanation.copies:
        line("  no queues yet: a consumer makes them when it starts (eventbus consume MODULE)")


def _listed(names: Sequence[str], most: int = 10) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _show_copy(invocation: Invocation, copy: Copy) -> None:
    line = invocation.screen.line
    standing = copy.standing
    patterns = f"  (matches {' '.join(copy.patterns)})" if copy.patterns else ""
    line()
    line(f"queue {copy.queue}{patterns}", "cyan")
    line(f"  {shown(standing.what)}", _STYLES.get(standing.stage, ""))
    for note in standing.notes:
        line(f"  {note}", "dim")
    for reason in standing.why:
        line(f"  - {shown(reason)}", "yellow")


def topics(
    invocation: Invocation,
    count: Annotated[
        bool, typer.Option("--count", help="count the events that are kept; reads the whole outbox", show_default=False)
    ] = False,
) -> None:
    """Show every topic that was relayed, which queues get it, and how many events of it nobody got.

    Unrouted events matched no queue when they were relayed. A queue that comes later does not get them.
    """
    from eventbus.postgres import admin

    with session(invocation) as current:
        found = admin.topics(current.connection, current.schema, count=count)
    screen = invocation.screen
    if screen.as_json:
        screen.json(found)
        return
    if not found:
        screen.note("no topics yet: they appear when their first event is relayed")
        return
    columns = [Column("topic", "cyan"), Column("first seen", narrow=True), Column("queues")]
    columns.append(Column("unrouted", "yellow", right=True, narrow=True))
    rows: list[list[str | int | None]] = [
        [
            topic.topic,
            f"{topic.first_seen_at.astimezone():%Y-%m-%d %H:%M:%S}",
            " ".join(topic.queues) or "nobody",
            topic.unrouted,
        ]
        for topic in found
    ]
    if count:
        columns.append(Column("kept", right=True, narrow=True))
        rows = [[*row, topic.events] for row, topic in zip(rows, found, strict=True)]
    screen.table(columns, rows)


def resume(invocation: Invocation) -> None:
    """Let a bus go on that paused because its database turned out to be a copy restored elsewhere.

    Do this only where the copy is the real thing now: what the original had not handled when the copy was made is
    handled from here, so that it happens twice if the original still runs.
    """
    from eventbus.postgres import admin

    with session(invocation) as current:
        resumed = admin.resume(current.connection, current.schema)
    invocation.screen.answer({"resumed": resumed}, "the bus goes on" if resumed else "the bus was not paused")
