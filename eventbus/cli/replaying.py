"""``eventbus replay``: retained events into one queue once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from eventbus.cli.failures import INTERRUPTED
from eventbus.cli.moments import DryRun, Rate, Since, Until, period, until_interrupted
from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import Column, counted
from eventbus.cli.session import Session, session

if TYPE_CHECKING:
    from eventbus.postgres.replaying import Wanted

_COUNTS: Final = (
    Column("topic", "cyan"),
    Column("events", right=True, narrow=True),
    Column("first", narrow=True),
    Column("last", narrow=True),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    Commands(app).add(
        "replay",
        replay,
        "eventbus replay receipts --since 2h --dry-run",
        "eventbus replay receipts --topic 'orders.*' --since 2030-01-31T09:00:00+01:00 --rate 50",
        "eventbus replay receipts --resume 3",
    )


def replay(
    invocation: Invocation,
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="whose consumers handle the events again")],
    since: Since = None,
    until: Until = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="of what the queue gets only this; may be a pattern")
    ] = None,
    dry_run: DryRun = False,
    rate: Rate = None,
    resume: Annotated[
        int | None, typer.Option("--resume", metavar="ID", help="go on with this replay", show_default=False)
    ] = None,
) -> None:
    """Play retained events into a queue once more, in the order in which they were published.

    --since and --until go by when an event was published. Each event comes once per replay, marked as replayed, and is
    handled even if it was done before. Ctrl-C stops between two small steps; --resume goes on from there.
    """
    from eventbus.postgres.replaying import Wanted

    chosen = {"--since": since, "--until": until, "--topic": topic, "--dry-run": dry_run or None}
    wrong = [name for name, value in chosen.items() if value is not None]
    if resume is not None and wrong:
        raise typer.BadParameter("a replay that goes on has its own; leave this out", param_hint=wrong[0])
    wanted = Wanted(queue, topic, period(since, until))
    with session(invocation) as current:
        if dry_run:
            _preview(invocation, current, wanted)
        else:
            _play(invocation, current, wanted, rate, resume)


def _preview(invocation: Invocation, current: Session, wanted: Wanted) -> None:
    from eventbus.postgres.replaying import preview

    counts = preview(current.connection, current.schema, wanted)
    screen = invocation.screen
    if screen.as_json:
        screen.json(counts)
    elif counts:
        screen.table(_COUNTS, [(item.topic, item.events, str(item.first), str(item.last)) for item in counts])
    total = sum(item.events for item in counts)
    screen.note(f"{counted(total, 'event')} would be played into {wanted.queue}; nothing was changed")


def _play(invocation: Invocation, current: Session, wanted: Wanted, rate: float | None, number: int | None) -> None:
    from eventbus.postgres import replaying
    from eventbus.postgres.pacing import Pace

    screen = invocation.screen
    played = 0

    def count(deliveries: int) -> None:
        nonlocal played
        played += deliveries

    with until_interrupted() as stopped:
        pace = Pace(rate, progress=count, stopped=stopped)
        if number is None:
            started = replaying.begin(current.connection, current.schema, wanted)
        else:
            started = replaying.resume(current.connection, current.schema, wanted.queue, number)
        go_on = f"eventbus replay {wanted.queue} --resume {started.id}"
        screen.note(f"replay {started.id}; if it is interrupted, go on with: {go_on}")
        with screen.progress(f"replaying into {wanted.queue}", started.upto_id - started.last_id) as progress:
            ended = replaying.play(
                current.connection, current.schema, started, pace, lambda step: progress(step, f"{played:,} events")
            )
    screen.answer(
        {"replay": ended.id, "queue": ended.queue, "state": ended.state, "played": played, "in_all": ended.deliveries},
        f"played {counted(played, 'event')} into {ended.queue}"
        + (f", {ended.deliveries:,} in all" if ended.deliveries > played else ""),
    )
    if ended.state != "finished":
        screen.note(f"stopped before the end; go on with: {go_on}")
        raise typer.Exit(INTERRUPTED)
