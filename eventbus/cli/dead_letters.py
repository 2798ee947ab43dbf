"""``eventbus dead-letters`` and ``eventbus retries``: what is there."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from eventbus.cli.moments import Since, Until, period
from eventbus.cli.options import Commands, Invocation
from eventbus.cli.redriving import Error, Queue, Topic, discard, redrive
from eventbus.cli.screen import Column, shown
from eventbus.cli.session import session

if TYPE_CHECKING:
    from eventbus.postgres.dead_letters import Letter, Retrying

Limit = Annotated[int, typer.Option("--limit", min=1, max=100_000, help="at most so many")]

_LETTERS: Final = (
    Column("id", "cyan", right=True, narrow=True),
    Column("queue"),
    Column("topic"),
    Column("event", narrow=True),
    Column("died", right=True, narrow=True),
    Column("attempts", right=True, narrow=True),
    Column("reason", "red"),
)
_RETRIES: Final = (
    Column("queue", "cyan"),
    Column("topic"),
    Column("event", narrow=True),
    Column("attempts", right=True, narrow=True),
    Column("next", narrow=True),
    Column("last error", "yellow"),
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    commands = Commands(app)
    letters = commands.group("dead-letters", dead_letters, "eventbus dead-letters list --queue receipts")
    letters.add("list", list_letters, "eventbus dead-letters list --topic 'orders.*'")
    letters.add("show", show, "eventbus dead-letters show 17")
    letters.add(
        "redrive",
        redrive,
        "eventbus dead-letters redrive 17 18",
        "eventbus dead-letters redrive --queue receipts --error 'connection refused' --since 2h --dry-run",
        "eventbus dead-letters redrive --topic 'orders.*' --rate 10",
    )
    letters.add("discard", discard, "eventbus dead-letters discard 17", "eventbus dead-letters discard --all --yes")
    waiting = commands.group("retries", retries, "eventbus retries list")
    waiting.add("list", list_retries, "eventbus retries list --queue receipts")


def dead_letters(invocation: Invocation) -> None:
    """Deliveries that gave up: list, show, redrive (try again) or discard them."""
    if invocation.subcommand is None:
        list_letters(invocation)


def retries(invocation: Invocation) -> None:
    """Deliveries that failed and will be tried again."""
    if invocation.subcommand is None:
        list_retries(invocation)


def list_letters(
    invocation: Invocation,
    queue: Queue = None,
    topic: Topic = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 50,
) -> None:
    """Show dead letters, the newest first."""
    from eventbus.postgres import dead_letters as admin
    from eventbus.postgres.dead_letters import Selection

    chosen = Selection(None, queue, topic, error, period(since, until))
    with session(invocation) as current:
        found = admin.letters(current.connection, current.schema, chosen, limit=limit)
        total, _ = admin.count(current.connection, current.schema, chosen)
    screen = invocation.screen
    if screen.as_json:
        screen.json([_letter_json(letter) for letter in found])
        return
    if not found:
        screen.note("no dead letters")
        return
    screen.table(_LETTERS, [_letter_row(item) for item in found])
    if total > len(found):
        screen.note(f"the newest {len(found):,} of {total:,}; --limit shows more")


def show(invocation: Invocation, number: Annotated[int, typer.Argument(metavar="ID", help="its number")]) -> None:
    """Show one dead letter with its whole event and why it gave up."""
    from eventbus.postgres import dead_letters as admin
    from eventbus.postgres.admin import NotFound
    from eventbus.postgres.dead_letters import Selection

    chosen = Selection(ids=(number,))
    with session(invocation) as current:
        found = admin.letters(current.connection, current.schema, chosen, limit=1)
    if not found:
        raise NotFound(f"there is no dead letter {number}; eventbus dead-letters list shows them")
    if invocation.screen.as_json:
        invocation.screen.json(_letter_json(found[0]))
    else:
        _show_letter(invocation, found[0])


def list_retries(invocation: Invocation, queue: Queue = None, limit: Limit = 50) -> None:
    """Show what failed or crashed and will be tried again, the next ones first."""
    from eventbus.postgres import dead_letters as admin

    with session(invocation) as current:
        found = admin.retries(current.connection, current.schema, queue=queue, limit=limit)
    screen = invocation.screen
    if screen.as_json:
        screen.json(found)
    elif found:
        screen.table(_RETRIES, [_retry_row(item) for item in found])
    else:
        screen.note("no retries")


def _letter_row(item: Letter) -> tuple[str | int | None, ...]:
    from eventbus.postgres.copies import duration, message_of

    event = "(lost)" if item.event_id is None else str(item.event_id)
    age = max((datetime.now(UTC) - item.died_at).total_seconds(), 0.0)
    error = message_of(item.last_error)
    reason = f"{item.reason}: {error}" if error else item.reason
    return (item.id, item.queue, item.topic, event, f"{duration(age)} ago", item.attempts, reason)


def _letter_json(letter: Letter) -> dict[str, Any]:
    from dataclasses import asdict

    from orjson import Fragment

    texts = {name: None if text is None else Fragment(text) for name, text in _texts(letter).items()}
    return asdict(replace(letter, payload=None, headers=None)) | texts


def _texts(letter: Letter) -> dict[str, str | None]:
    return {"payload": letter.payload, "headers": letter.headers}


def _show_letter(invocation: Invocation, letter: Letter) -> None:
    line = invocation.screen.line
    for name in ("id", "queue", "topic", "event_id", "key", "published_at", "died_at", "attempts", "crashes", "reason"):
        line(f"{name.replace('_', ' '):<13} {shown(getattr(letter, name))}")
    if letter.redriven_from is not None:
        line(f"{'redriven from':<13} {letter.redriven_from}")
    if letter.blocks:
        line(f"{'blocks':<13} later events of its key wait until it is redriven or discarded")
    for name, text in _texts(letter).items():
        line(f"{name:<13} {'' if text is None else shown(text)}")
    for name in ("first_error", "last_error"):
        error = getattr(letter, name)
        if isinstance(error, dict) and (name == "last_error" or error != letter.last_error):
            line()
            line(f"{name.replace('_', ' ')}: {shown(error.get('type'))}: {shown(error.get('message'))}")
            for part in str(error.get("traceback") or "").splitlines():
                line("  " + shown(part))


def _retry_row(item: Retrying) -> tuple[str | int | None, ...]:
    from eventbus.postgres.copies import duration, message_of

    if item.state == "claimed":
        due = f"running in {item.host}/{item.pid}"
    elif item.state == "parked":
        due = "parked behind its key"
    else:
        due = f"in {duration(item.due_in)}" if item.due_in > 0 else "now"
    tries = f"{item.attempts}" + (f" + {item.crashes} crashed" if item.crashes else "")
    return (item.queue, item.topic, str(item.event_id or ""), tries, due, message_of(item.last_error))
