"""``eventbus publish``: one event from the command line, or many from a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from eventbus.cli.options import Commands, Invocation
from eventbus.cli.screen import counted
from eventbus.cli.session import session
from eventbus.errors import EventBusError, PublishError

if TYPE_CHECKING:
    from eventbus.cli.event_lines import Line
    from eventbus.event import OutboxEvent

_SKIPPED_SHOWN: Final = 20


class PublishStopped(EventBusError):
    """A file was not published to its end; the message says what of it is committed."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    Commands(app).add(
        "publish",
        publish,
        "eventbus publish orders.created '{\"order\": 17}' --key customer-4 --header tenant=acme",
        "eventbus publish orders.reminder '{\"order\": 17}' --delay 2h --priority 9",
        "eventbus publish --file events.ndjson",
        "zcat payloads.ndjson.gz | eventbus publish orders.imported --file - --batch 5000",
    )


def publish(
    invocation: Invocation,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="dotted name, as orders.created")] = None,
    payload: Annotated[str | None, typer.Argument(metavar="PAYLOAD", help="JSON; null if left out")] = None,
    key: Annotated[str | None, typer.Option("--key", help="ordering key")] = None,
    header: Annotated[list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="may be repeated")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", min=0, max=9, help="9 is first, 0 (the default) last")
    ] = None,
    delay: Annotated[str | None, typer.Option("--delay", metavar="TIME", help="as 90, 90s, 15m, 2h or 1d")] = None,
    at: Annotated[str | None, typer.Option("--at", metavar="MOMENT", help="as 2030-01-31T09:00:00+01:00")] = None,
    event_id: Annotated[str | None, typer.Option("--event-id", metavar="UUID", help="instead of a new one")] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", metavar="FILE", help="publish the lines of an NDJSON file; - is standard input"),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=100_000, help="lines in one transaction")] = 1_000,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="leave out bad lines instead of stopping at the first", show_default=False),
    ] = False,
) -> None:
    """Publish one event, or the lines of a file.

    A line is an object with "topic" and, if wanted, "payload", "key", "headers", "event_id", "priority", "delay" and
    "at". With TOPIC and --file together, a line is a payload and nothing else.

    Each batch is one transaction, and is checked whole before anything of it is sent. The first bad line stops the
    command: the batches before it are committed, and nothing after them. The message says where to go on.
    """
    single = {"--key": key, "--header": header or None, "--priority": priority, "--delay": delay, "--at": at,
              "--event-id": event_id}  # fmt: skip
    if file is None:
        if topic is None:
            raise typer.BadParameter("give a TOPIC, or --file", param_hint="TOPIC")
        _publish_one(invocation, _event(topic, payload, single))
        return
    wrong = [name for name, value in single.items() if value is not None] + (["PAYLOAD"] if payload is not None else [])
    if wrong:
        raise typer.BadParameter("goes with one event, not with --file", param_hint=wrong[0])
    _publish_file(invocation, file, topic, batch, skip_bad=skip_bad)


def _event(topic: str, payload: str | None, given: dict[str, Any]) -> OutboxEvent:
    from uuid import UUID

    from eventbus.cli.event_lines import parse_duration, parse_json, parse_moment
    from eventbus.event import OutboxEvent

    return OutboxEvent(
        topic=topic,
        payload=_parsed("PAYLOAD", payload, lambda text: _payload(text, parse_json)),
        key=given["--key"],
        headers=_headers(given["--header"] or []),
        priority=given["--priority"] or 0,
        delay=_parsed("--delay", given["--delay"], parse_duration),
        at=_parsed("--at", given["--at"], parse_moment),
        event_id=_parsed("--event-id", given["--event-id"], UUID),
    )


def _payload(text: str, parse_json: Callable[[str], Any]) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        hint = "; a text needs double quotes of its own: '\"hello\"'" if str(error).startswith("not JSON") else ""
        raise ValueError(f"{error}{hint}") from None


def _parsed(name: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from None


def _headers(items: list[str]) -> dict[str, str] | None:
    headers: dict[str, str] = {}
    for name, value in map(_header, items):
        if name in headers:
            raise typer.BadParameter(f"'{name}' is given twice", param_hint="--header")
        headers[name] = value
    return headers or None


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"'{text}' is not NAME=VALUE", param_hint="--header")
    return name, value


def _publish_one(invocation: Invocation, event: OutboxEvent) -> None:
    with _publisher(invocation) as send:
        [event_id] = send([event])
    invocation.screen.answer({"event_id": event_id, "topic": event.topic}, event_id)


Send = Callable[["list[OutboxEvent]"], list[str]]
"""Publishes events in one transaction; their ids."""


@contextmanager
def _publisher(invocation: Invocation) -> Iterator[Send]:
    from psycopg.errors import InsufficientPrivilege

    from eventbus.bus import EventBus
    from eventbus.postgres.privileges import PUBLISH, require

    with session(invocation, checked=False) as current:
        outbox = EventBus(current.settings).outbox

        def send(events: list[OutboxEvent]) -> list[str]:
            with current.connection.transaction():
                return [str(event_id) for event_id in outbox.publish_events(events, conn=current.connection)]

        try:
            yield send
        except InsufficientPrivilege:
            require(current.connection, current.schema, PUBLISH)
            raise


def _publish_file(invocation: Invocation, file: str, topic: str | None, batch: int, *, skip_bad: bool) -> None:
    from eventbus.cli.event_lines import batches, read_lines
    from eventbus.topics import validate_topic

    if topic is not None:
        validate_topic(topic)
    with _opened(file) as (source, size), _publisher(invocation) as send:
        run = _FileRun(invocation, file, topic, send, skip_bad=skip_bad)
        lines = read_lines(source, topic)
        try:
            with invocation.screen.progress(f"publishing {file}", size) as progress:
                for part in batches(lines, batch):
                    run.publish(part)
                    progress(sum(line.size for line in part), f"{run.published:,} events")
        except KeyboardInterrupt:
            invocation.screen.note(f"stopped; {run.stopped()}")
            raise
    run.report()


@contextmanager
def _opened(file: str) -> Iterator[tuple[BinaryIO, int | None]]:
    """The file, and its size if that is known."""
    from pathlib import Path

    if file == "-":
        yield sys.stdin.buffer, None
        return
    try:
        path = Path(file)
        source = path.open("rb")
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}", param_hint="--file") from None
    with source:
        yield source, path.stat().st_size if path.is_file() else None


class _FileRun:
    """How far the publishing of one file has come."""

    def __init__(self, invocation: Invocation, file: str, topic: str | None, send: Send, *, skip_bad: bool) -> None:
        self._invocation = invocation
        self._file = file
        self._topic = topic
        self._send = send
        self._skip_bad = skip_bad
        self.published = 0
        self._transactions = 0
        self._upto = 0
        """The last line of the last committed batch."""
        self._skipped: list[Line] = []
        self._sending = ""
        """The lines whose transaction may have been committed, while that is not known."""

    def publish(self, batch: list[Line]) -> None:
        """Publish one batch in one transaction, or raise :class:`PublishStopped`."""
        if any(line.event is None for line in batch) or not self._sent(batch):
            batch = self._checked(batch)
            bad = [line for line in batch if line.event is None]
            if not self._skip_bad:
                raise PublishStopped(f"{self._file}, line {bad[0].number}: {bad[0].problem}; {self.so_far()}")
            self._skipped += bad
            self._sent(batch)
        self._upto, self._sending = batch[-1].number, ""

    def _checked(self, batch: list[Line]) -> list[Line]:
        from eventbus.cli.event_lines import checked

        max_bytes = self._invocation.settings().max_payload_bytes
        return [checked(line, max_bytes) for line in batch]

    def _sent(self, batch: list[Line]) -> bool:
        """Commit the good lines of a batch; false, and nothing was sent, if one of them breaks a rule after all."""
        import psycopg

        events = [line.event for line in batch if line.event is not None]
        if not events:
            return True
        self._sending = f"{batch[0].number}-{batch[-1].number}"
        try:
            self._send(events)
        except PublishError:
            self._sending = ""
            return False
        except psycopg.OperationalError as error:
            raise PublishStopped(
                f"the server went away while lines {self._sending} were being committed, so they may be committed or "
                f"not ({' '.join(str(error).split())}); before them, {self.so_far()}"
            ) from error
        self.published += len(events)
        self._transactions += 1
        return True

    def report(self) -> None:
        """The result; exit code 1 if lines were left out."""
        screen = self._invocation.screen
        for line in self._skipped[:_SKIPPED_SHOWN]:
            screen.note(f"{self._file}, line {line.number} left out: {line.problem}")
        if len(self._skipped) > _SKIPPED_SHOWN:
            screen.note(f"… and {len(self._skipped) - _SKIPPED_SHOWN} more")
        skipped = f", left out {counted(len(self._skipped), 'bad line')}" if self._skipped else ""
        screen.answer(
            {
                "published": self.published,
                "transactions": self._transactions,
                "skipped": [{"line": line.number, "problem": line.problem} for line in self._skipped],
            },
            f"published {counted(self.published, 'event')} in {counted(self._transactions, 'transaction')}{skipped}",
        )
        if self._skipped:
            raise typer.Exit(1)

    def stopped(self) -> str:
        """The same after an interruption, which may have come while something was being committed."""
        if not self._sending:
            return self.so_far()
        return (
            f"lines {self._sending} were being committed, so they may be committed or not; before them, {self.so_far()}"
        )

    def so_far(self) -> str:
        """What is committed, and how to go on."""
        if not self._upto:
            return "nothing is committed"
        source = "" if self._file == "-" else f" {self._file}"
        topic = f" {self._topic}" if self._topic else ""
        return (
            f"{counted(self.published, 'event')} of lines 1-{self._upto} and nothing else committed; "
            f"after a repair go on with: tail -n +{self._upto + 1}{source} | eventbus publish{topic} --file -"
        )
