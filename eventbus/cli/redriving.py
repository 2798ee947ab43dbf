"""``eventbus dead-letters redrive`` and ``discard``: what becomes of dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from eventbus.cli.failures import INTERRUPTED, NOT_FINE
from eventbus.cli.moments import DryRun, Rate, Since, Until, period, until_interrupted
from eventbus.cli.options import Invocation
from eventbus.cli.screen import Column, counted
from eventbus.cli.session import Session, session

if TYPE_CHECKING:
    from eventbus.postgres.choosing import Period
    from eventbus.postgres.dead_letters import Selection

Ids = Annotated[list[int] | None, typer.Argument(metavar="ID…", help="numbers of dead letters")]
Queue = Annotated[str | None, typer.Option("--queue", metavar="NAME", help="those of this queue")]
Topic = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="those of this topic; may be a pattern")]
Error = Annotated[
    str | None,
    typer.Option("--error", metavar="TEXT", help="those with this in their reason, their error's type or its message"),
]
Everything = Annotated[bool, typer.Option("--all", help="all of them", show_default=False)]

_GROUPS: Final = (
    Column("queue", "cyan"),
    Column("topic"),
    Column("reason", "red"),
    Column("letters", right=True, narrow=True),
    Column("without event", right=True, narrow=True),
)


def redrive(
    invocation: Invocation,
    ids: Ids = None,
    queue: Queue = None,
    topic: Topic = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    everything: Everything = False,
    dry_run: DryRun = False,
    rate: Rate = None,
) -> None:
    """Give dead letters back to their queues, to be tried again from the first attempt.

    Filters add up: a letter has to fit all of them. It is the same event, with the same id, and in an ordered queue it
    keeps its place. Each letter is moved in one piece; of two redrives at once each letter is moved by one.
    """
    chosen = _chosen(ids, queue, topic, error, period(since, until), everything=everything)
    with session(invocation) as current:
        if dry_run:
            _preview(invocation, current, chosen, "redriven")
        else:
            _change(invocation, current, chosen, "redrive", rate)


def discard(
    invocation: Invocation,
    ids: Ids = None,
    queue: Queue = None,
    topic: Topic = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    everything: Everything = False,
    dry_run: DryRun = False,
    rate: Rate = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask", show_default=False)] = False,
) -> None:
    """Delete dead letters for good.

    Filters add up: a letter has to fit all of them. In an ordered queue, what waits behind a letter goes on.
    """
    from eventbus.postgres.dead_letters import count

    chosen = _chosen(ids, queue, topic, error, period(since, until), everything=everything)
    with session(invocation) as current:
        if dry_run:
            _preview(invocation, current, chosen, "discarded")
            return
        total, _ = count(current.connection, current.schema, chosen)
        if total and not invocation.screen.confirmed(f"delete {counted(total, 'dead letter')} for good?", yes=yes):
            invocation.screen.note("nothing was deleted")
            raise typer.Exit(NOT_FINE)
        _change(invocation, current, chosen, "discard", rate)


def _chosen(
    ids: list[int] | None, queue: str | None, topic: str | None, error: str | None, died: Period, *, everything: bool
) -> Selection:
    from eventbus.postgres.choosing import ALWAYS
    from eventbus.postgres.dead_letters import Selection

    if not ids and (queue, topic, error, died) == (None, None, None, ALWAYS) and not everything:
        raise typer.BadParameter(
            "say which dead letters: ID…, --queue, --topic, --error, --since, --until or --all", param_hint="ID"
        )
    if ids and everything:
        raise typer.BadParameter("takes all; leave the ids out", param_hint="--all")
    return Selection(tuple(ids) if ids else None, queue, topic, error, died)


def _preview(invocation: Invocation, current: Session, chosen: Selection, verb: str) -> None:
    """What would be done; exit code 1 if something that was asked for is not there."""
    from eventbus.postgres import dead_letters as admin

    groups = admin.groups(current.connection, current.schema, chosen)
    missing = admin.missing(current.connection, current.schema, chosen)
    screen = invocation.screen
    if screen.as_json:
        screen.json({"groups": groups, "missing": missing})
    elif groups:
        rows = [(item.queue, item.topic, item.reason, item.letters, item.without_event) for item in groups]
        screen.table(_GROUPS, rows)
    screen.note(f"{counted(sum(item.letters for item in groups), 'dead letter')} would be {verb}; nothing was changed")
    if missing:
        screen.note(f"no such dead letter, or not of this choice: {', '.join(map(str, missing))}")
        raise typer.Exit(NOT_FINE)


def _change(
    invocation: Invocation,
    current: Session,
    chosen: Selection,
    verb: Literal["redrive", "discard"],
    rate: float | None,
) -> None:
    """Do it and say what was done; exit code 1 if something that was asked for was not."""
    from eventbus.postgres import dead_letters as admin
    from eventbus.postgres.pacing import Pace

    screen = invocation.screen
    change = admin.redrive if verb == "redrive" else admin.discard
    past, outcome = ("redriven", "back in the queue") if verb == "redrive" else ("discarded", "deleted")
    with until_interrupted() as stopped:
        total, lost = admin.count(current.connection, current.schema, chosen)
        with screen.progress(f"{verb} dead letters", total) as progress:
            pace = Pace(rate, progress=lambda step: progress(step, ""), stopped=stopped)
            moved = change(current.connection, current.schema, chosen, pace)
    interrupted = stopped.is_set()
    missing = [] if interrupted else sorted(set(chosen.ids or ()) - set(moved))
    lost = lost if verb == "redrive" and not interrupted else 0
    screen.answer(
        {past: moved, "missing": missing, "without_event": lost},
        f"{counted(len(moved), 'dead letter')} {outcome}" if moved else f"nothing was {past}",
    )
    if interrupted:
        screen.note("stopped before the end; the others stay as they are: say the same again to go on")
        raise typer.Exit(INTERRUPTED)
    if missing:
        screen.note(f"no such dead letter, or not {past}: {', '.join(map(str, missing))}")
    if lost:
        screen.note(f"{counted(lost, 'dead letter')} without its event: stays, and can only be discarded")
    if missing or lost:
        raise typer.Exit(NOT_FINE)
