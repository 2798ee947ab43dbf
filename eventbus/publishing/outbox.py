"""Publishing and taking back: one statement on the caller's connection, in the caller's transaction.

Before it: ``outgoing`` checks and encodes, ``connections`` knows the caller's kind of connection. After it: once the
caller has committed, the relay finds the row. Nothing here opens a connection, commits, or changes the caller's
connection; what the caller's connection raises passes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, Final, Protocol, Unpack
from uuid import UUID

from eventbus.errors import NotInTransaction, PublishError
from eventbus.event import OutboxEvent
from eventbus.publishing.connections import Adapter, AsyncAdapter, Connections, Statement
from eventbus.publishing.interception import Interception
from eventbus.publishing.outgoing import EventOptions, Row, checked_event_id, prepare
from eventbus.settings import Settings

_BATCH_EVENTS: Final = 1_000
_BATCH_CHARACTERS: Final = 8 * 1024 * 1024


class Statements(Protocol):
    """The SQL texts, which live with the rest of the SQL."""

    @property
    def publish(self) -> str:
        """One event."""

    @property
    def publish_many(self) -> str:
        """Lists of events."""

    @property
    def schedule_many(self) -> str:
        """Lists of events with when they are due."""

    @property
    def cancel(self) -> str:
        """The id of an event; answers null if it does not wait."""


class Outbox:
    """Publishes and takes back events in the caller's transaction; safe to share between threads and tasks.

    Each method raises :class:`~eventbus.errors.PublishError` before any SQL if something is wrong with an event or
    with the connection; the caller's transaction is then as it was.
    """

    def __init__(self, statements: Statements, settings: Settings, interception: Interception | None = None) -> None:
        self.connections = Connections()
        self._interception = interception
        self._statements = statements
        self._max_bytes = settings.max_payload_bytes
        self._bound: ContextVar[_Binding | None] = ContextVar("eventbus_connection", default=None)

    def publish_event(
        self, topic: str, payload: Any, *, autocommit: bool = False, conn: Any = None, **options: Unpack[EventOptions]
    ) -> UUID:
        """Publish one event when the caller commits; returns its id at once.

        The options are ``key``, ``headers``, ``priority`` (0 to 9), ``delay`` (seconds or a timedelta, by the
        database's clock) or ``at`` (an aware datetime), and ``event_id``: the fields of :class:`OutboxEvent`.
        ``autocommit=True`` allows a connection in autocommit mode without a transaction: the event is then
        published at once, on its own.
        """
        event = OutboxEvent(topic, payload, **options)
        row = prepare(event, max_bytes=self._max_bytes)
        with self._intercepted([event], [row]) as [row]:
            self._send(conn, self._one(row), autocommit=autocommit)
        return row.event_id

    async def apublish_event(
        self, topic: str, payload: Any, *, autocommit: bool = False, conn: Any = None, **options: Unpack[EventOptions]
    ) -> UUID:
        """As :meth:`publish_event`, on an async connection."""
        event = OutboxEvent(topic, payload, **options)
        row = prepare(event, max_bytes=self._max_bytes)
        with self._intercepted([event], [row]) as [row]:
            await self._asend(conn, self._one(row), autocommit=autocommit)
        return row.event_id

    def publish_events(
        self, events: Iterable[OutboxEvent | tuple[str, Any]], *, autocommit: bool = False, conn: Any = None
    ) -> list[UUID]:
        """Publish many events in their order; returns their ids. All of them are checked before any SQL.

        An event is an :class:`OutboxEvent` or a tuple of topic and payload. With ``autocommit=True`` outside a
        transaction, too, it is all of them or none.
        """
        given, rows = self._prepare_all(events)
        if rows:
            with self._intercepted(given, rows) as sent:
                self._send(conn, self._many(sent), autocommit=autocommit)
        return [row.event_id for row in rows]

    async def apublish_events(
        self, events: Iterable[OutboxEvent | tuple[str, Any]], *, autocommit: bool = False, conn: Any = None
    ) -> list[UUID]:
        """As :meth:`publish_events`, on an async connection."""
        given, rows = self._prepare_all(events)
        if rows:
            with self._intercepted(given, rows) as sent:
                await self._asend(conn, self._many(sent), autocommit=autocommit)
        return [row.event_id for row in rows]

    def cancel_event(self, event_id: UUID, *, autocommit: bool = False, conn: Any = None) -> bool:
        """Take back a delayed event when the caller commits; False if there is none that has not fired.

        An event is either cancelled or delivered. If the relay is firing it right now, this waits for the relay, a
        few milliseconds; until the caller's transaction ends, the relay leaves the event alone. ``autocommit`` as for
        :meth:`publish_event`.
        """
        statement = self._cancel(event_id)
        connection, adapter = self._ready(conn, "cancel", autocommit=autocommit)
        return adapter.fetch(connection, statement) is not None

    async def acancel_event(self, event_id: UUID, *, autocommit: bool = False, conn: Any = None) -> bool:
        """As :meth:`cancel_event`, on an async connection."""
        statement = self._cancel(event_id)
        connection, adapter = await self._aready(conn, "cancel", autocommit=autocommit)
        return await adapter.fetch(connection, statement) is not None

    @contextmanager
    def using(self, conn: Any) -> Iterator[None]:
        """Bind a connection, sync or async, for every publish of this block that names none; blocks nest.

        Tasks that start inside the block see it too; one that outlives it gets an error instead of a connection that
        somebody else may be using by then.
        """
        self.connections.check(conn)
        binding = _Binding(conn)
        token = self._bound.set(binding)
        try:
            yield
        finally:
            binding.ended = True
            with suppress(ValueError):  # an async generator may be closed in another context than it began in
                self._bound.reset(token)

    def _send(self, conn: Any, statements: Sequence[Statement], *, autocommit: bool) -> None:
        connection, adapter = self._ready(conn, "publish", autocommit=autocommit)
        adapter.execute(connection, statements)

    async def _asend(self, conn: Any, statements: Sequence[Statement], *, autocommit: bool) -> None:
        connection, adapter = await self._aready(conn, "publish", autocommit=autocommit)
        await adapter.execute(connection, statements)

    def _ready(self, conn: Any, verb: str, *, autocommit: bool) -> tuple[Any, Adapter]:
        """The connection to use and its adapter, if what is done there now belongs to a transaction or need not."""
        connection = self._connection(conn)
        adapter = self.connections.find(connection)
        if not autocommit and not adapter.in_transaction(connection):
            raise NotInTransaction(_not_in_transaction(verb))
        return connection, adapter

    async def _aready(self, conn: Any, verb: str, *, autocommit: bool) -> tuple[Any, AsyncAdapter]:
        connection = self._connection(conn)
        adapter = self.connections.find_async(connection)
        if not autocommit and not await adapter.in_transaction(connection):
            raise NotInTransaction(_not_in_transaction(verb))
        return connection, adapter

    def _connection(self, conn: Any) -> Any:
        if conn is not None:
            return conn
        binding = self._bound.get()
        if binding is None:
            raise PublishError("no connection to publish on; pass conn=…, or bind one: with outbox.using(conn)")
        if binding.ended:
            raise PublishError("the block of outbox.using(conn) in which this task started has ended; pass conn=…")
        return binding.connection

    def _intercepted(self, events: Sequence[OutboxEvent], rows: Sequence[Row]) -> AbstractContextManager[Sequence[Row]]:
        """The rows as plugins want them, inside what they put around them."""
        if self._interception is None or not self._interception.wanted:
            return nullcontext(rows)
        return self._interception.publish(events, rows)

    def _prepare_all(
        self, events: Iterable[OutboxEvent | tuple[str, Any]]
    ) -> tuple[Sequence[OutboxEvent], Sequence[Row]]:
        given: list[OutboxEvent] = []
        rows: list[Row] = []
        try:
            for each in events:
                event = _outbox_event(each)
                rows.append(prepare(event, max_bytes=self._max_bytes))
                given.append(event)
        except PublishError as error:
            error.add_note(f"It is number {len(rows)} of the events, counted from 0; none was published.")
            raise
        return given, rows

    def _one(self, row: Row) -> Sequence[Statement]:
        event_id, topic, key, payload, headers, priority, due = row
        if due is not None:
            return self._many([row])
        return (Statement(self._statements.publish, (event_id.hex, topic, key, payload, headers, priority)),)

    def _cancel(self, event_id: UUID) -> Statement:
        return Statement(self._statements.cancel, (checked_event_id(event_id).hex,))

    def _many(self, rows: Sequence[Row]) -> Sequence[Statement]:
        now = [row for row in rows if row.due is None]
        later = [row for row in rows if row.due is not None]
        return [
            *(Statement(self._statements.publish_many, _columns(batch)) for batch in _batches(now)),
            *(Statement(self._statements.schedule_many, _columns(batch) + _dues(batch)) for batch in _batches(later)),
        ]


class _Binding:
    """A connection bound by ``using``, until the block ends."""

    __slots__ = ("connection", "ended")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.ended = False


def _outbox_event(given: object) -> OutboxEvent:
    if isinstance(given, OutboxEvent):
        return given
    if isinstance(given, tuple) and len(given) == 2:
        return OutboxEvent(*given)
    raise PublishError(f"an event is an OutboxEvent or a tuple (topic, payload), not {type(given).__name__}")


def _batches(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Runs of rows that fit one statement; a single large row has one of its own."""
    start = characters = 0
    for end, row in enumerate(rows):
        if end > start and (end - start == _BATCH_EVENTS or characters + len(row.payload) > _BATCH_CHARACTERS):
            yield rows[start:end]
            start, characters = end, 0
        characters += len(row.payload)
    if rows:
        yield rows[start:]


def _columns(rows: Sequence[Row]) -> list[str]:
    return [
        _array(row.event_id.hex for row in rows),
        _array(row.topic for row in rows),
        _array(row.key for row in rows),
        f"[{','.join(row.payload for row in rows)}]",
        _array(row.headers for row in rows),
        _array(row.priority for row in rows),
    ]


def _dues(rows: Sequence[Row]) -> list[str]:
    dues = [row.due for row in rows if row.due is not None]
    return [_array(due.delay for due in dues), _array(due.at for due in dues)]


def _array(values: Iterable[str | None]) -> str:
    """A PostgreSQL array literal: every element quoted, so that a topic named null stays text."""
    return f"{{{','.join('NULL' if value is None else _quoted(value) for value in values)}}}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _not_in_transaction(verb: str) -> str:
    return (
        f"the connection is in autocommit mode and no transaction is open; open one around your changes and the {verb} "
        f"(with conn.transaction():), or say autocommit=True to {verb} at once, on its own"
    )
