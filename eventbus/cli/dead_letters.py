"""``eventbus dead-letters`` and ``eventbus retries``."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import Column, counted, shown
from eventbus.cli.session import Session, session

if TYPE_CHECKING:
    from eventbus.postgres.dead_letters import Letter, Retrying, Selection

Ids = Annotated[list[int] | None, typer.Argument(metavar="ID…", help="numbers of dead letters")]
Queue = Annotated[str | None, typer.Option("--queue", metavar="NAME", help="those of this queue")]
Topic = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="those of this topic; may be a pattern")]
Everything = Annotated[bool, typer.Option("--all", help="all of them", show_default=False)]
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
        "redrive", redrive, "eventbus dead-letters redrive 17 18", "eventbus dead-letters redrive --queue receipts"
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


def list_letters(invocation: Invocation, queue: Queue = None, topic: Topic = None, limit: Limit = 50) -> None:
    """Show dead letters, the newest first."""
    from eventbus.postgres import dead_letters as admin

    with session(invocation) as current:
        chosen = admin.select(current.connection, current.schema, ids=None, queue=queue, topic=topic)
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

    with session(invocation) as current:
        found = admin.letters(current.connection, current.schema, Selection(ids=(number,)), limit=1)
    if not found:
        raise NotFound(f"there is no dead letter {number}; eventbus dead-letters list shows them")
    if invocation.screen.as_json:
        invocation.screen.json(_letter_json(found[0]))
    else:
        _show_letter(invocation, found[0])


def redrive(
    invocation: Invocation, ids: Ids = None, queue: Queue = None, topic: Topic = None, everything: Everything = False
) -> None:
    """Give dead letters back to their queues, to be tried again from the first attempt.

    It is the same event, with the same id. Each letter is moved in one piece; of two redrives at once each letter is
    moved by one.
    """
    from eventbus.postgres import dead_letters as admin

    with session(invocation) as current:
        chosen = _chosen(current, ids, queue, topic, everything=everything)
        total, lost = admin.count(current.connection, current.schema, chosen)
        with invocation.screen.progress("redriving", total) as progress:
            moved = admin.redrive(
                current.connection, current.schema, chosen, progress=lambda step: progress(step, f"{step}")
            )
    _report(invocation, "redriven", "back in the queue", moved, chosen, lost)


def discard(
    invocation: Invocation,
    ids: Ids = None,
    queue: Queue = None,
    topic: Topic = None,
    everything: Everything = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask", show_default=False)] = False,
) -> None:
    """Delete dead letters for good."""
    from eventbus.postgres import dead_letters as admin

    with session(invocation) as current:
        chosen = _chosen(current, ids, queue, topic, everything=everything)
        total, _ = admin.count(current.connection, current.schema, chosen)
        if total and not invocation.screen.confirmed(f"delete {counted(total, 'dead letter')} for good?", yes=yes):
            invocation.screen.note("nothing was deleted")
            raise typer.Exit(1)
        with invocation.screen.progress("discarding", total) as progress:
            gone = admin.discard(
                current.connection, current.schema, chosen, progress=lambda step: progress(step, f"{step}")
            )
    _report(invocation, "discarded", "deleted", gone, chosen, 0)


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


def _chosen(
    current: Session, ids: list[int] | None, queue: str | None, topic: str | None, *, everything: bool
) -> Selection:
    from eventbus.postgres.dead_letters import select

    if not (ids or queue or topic or everything):
        raise typer.BadParameter("say which dead letters: ID…, --queue, --topic or --all", param_hint="ID")
    if ids and everything:
        raise typer.BadParameter("takes all; leave the ids out", param_hint="--all")
    return select(current.connection, current.schema, ids=ids or None, queue=queue, topic=topic)


def _report(invocation: Invocation, verb: str, outcome: str, moved: list[int], chosen: Selection, lost: int) -> None:
    """What was done; exit code 1 if something that was asked for was not."""
    missing = sorted(set(chosen.ids or ()) - set(moved))
    screen = invocation.screen
    screen.answer(
        {verb: moved, "missing": missing, "without_event": lost},
        f"{counted(len(moved), 'dead letter')} {outcome}" if moved else f"nothing was {verb}",
    )
    if missing:
        screen.note(f"no such dead letter, or not {verb}: {', '.join(map(str, missing))}")
    if lost:
        screen.note(f"{counted(lost, 'dead letter')} without its event: stays, and can only be discarded")
    if missing or lost:
        raise typer.Exit(1)


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
