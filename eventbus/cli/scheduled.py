"""``eventbus scheduled``: the delayed events that have not fired yet, and taking them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final
from uuid import UUID

import typer

from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import Column, counted
from eventbus.cli.session import session

if TYPE_CHECKING:
    from eventbus.postgres.scheduled import Delayed

Topic = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="those of this topic; may be a pattern")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=100_000, help="at most so many")]

_COLUMNS: Final = (
    Column("event", "cyan", narrow=True),
    Column("topic"),
    Column("due", right=True, narrow=True),
    Column("at", narrow=True),
    Column("key"),
    Column("priority", right=True, narrow=True),
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    commands = Commands(app).group("scheduled", scheduled, "eventbus scheduled list")
    commands.add("list", list_scheduled, "eventbus scheduled list --topic 'orders.*'")
    commands.add("cancel", cancel, "eventbus scheduled cancel 019e0b2c-5a4e-7c3a-9d55-0f6f2f1f8a10")


def scheduled(invocation: Invocation) -> None:
    """Delayed events that have not fired yet: list them, or take them back."""
    if invocation.subcommand is None:
        list_scheduled(invocation)


def list_scheduled(invocation: Invocation, topic: Topic = None, limit: Limit = 50) -> None:
    """Show the delayed events, the next ones first."""
    from eventbus.postgres.scheduled import delayed

    with session(invocation) as current:
        found = delayed(current.connection, current.schema, topic=topic, limit=limit + 1)
    screen = invocation.screen
    if screen.as_json:
        screen.json(found[:limit])
        return
    if not found:
        screen.note("no delayed events")
        return
    screen.table(_COLUMNS, [_row(item) for item in found[:limit]])
    if len(found) > limit:
        screen.note(f"the next {counted(limit, 'event')}; there are more, --limit shows them")


def cancel(
    invocation: Invocation,
    ids: Annotated[list[str], typer.Argument(metavar="EVENT_ID…", help="ids of delayed events")],
) -> None:
    """Take back delayed events: they are never delivered.

    Each is taken back on its own, or reported if it is not there (any more). An event that has fired cannot be taken
    back.
    """
    chosen = list(dict.fromkeys(_event_id(text) for text in ids))
    cancelled = _cancelled(invocation, chosen)
    missing = [event_id for event_id in chosen if event_id not in cancelled]
    screen = invocation.screen
    screen.answer(
        {"cancelled": cancelled, "missing": missing},
        f"{counted(len(cancelled), 'event')} cancelled" if cancelled else "nothing was cancelled",
    )
    if missing:
        screen.note(f"not among the delayed events, or fired already: {', '.join(map(str, missing))}")
        raise typer.Exit(1)


def _cancelled(invocation: Invocation, chosen: list[UUID]) -> list[UUID]:
    from psycopg.errors import InsufficientPrivilege

    from eventbus.bus import EventBus
    from eventbus.postgres.privileges import PUBLISH, require

    with session(invocation, checked=False) as current:
        outbox = EventBus(current.settings).outbox
        try:
            return [one for one in chosen if outbox.cancel_event(one, conn=current.connection, autocommit=True)]
        except InsufficientPrivilege:
            require(current.connection, current.schema, PUBLISH)
            raise


def _event_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise typer.BadParameter(f"'{text}' is no event id", param_hint="EVENT_ID") from None


def _row(item: Delayed) -> tuple[str | int | None, ...]:
    from eventbus.postgres.copies import duration

    due = f"in {duration(item.due_in)}" if item.due_in > 0 else "now"
    return (str(item.event_id), item.topic, due, item.due_at[:19].replace("T", " ") + "Z", item.key, item.priority)
