"""The caller's connection, whatever library it comes from: can we use it, is a transaction open, run this.

The outbox never opens a connection and never commits: an event exists if and only if the caller's transaction does.
An adapter knows one kind of connection. psycopg's two are here; others register with :meth:`Connections.register`
and get the same statements: numbered placeholders ``$1``, and every parameter text or null.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import psycopg
from psycopg import errors
from psycopg.adapt import AdaptersMap
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from psycopg.types.string import StrDumperUnknown

from eventbus.errors import PublishError


class Statement(NamedTuple):
    """One statement and its parameters, each of them text or null."""

    sql: str
    parameters: Sequence[str | None]


class Adapter(Protocol):
    """Publishes on one kind of connection, without changing anything about it."""

    def handles(self, connection: object) -> bool:
        """True if ``connection`` is of this kind."""

    def in_transaction(self, connection: Any) -> bool:
        """True if a statement run now is committed or rolled back by the caller, later.

        Also true where the question has no answer, a closed connection for instance: ``execute`` then raises what
        the connection's own library raises.
        """

    def execute(self, connection: Any, statements: Sequence[Statement]) -> None:
        """Run all of them or none. Opens a transaction of its own only if there are several and none is open."""

    def fetch(self, connection: Any, statement: Statement) -> Any:
        """Run one statement; the only value of its only row, which is text or null."""


class AsyncAdapter(Protocol):
    """The same for connections that are awaited."""

    def handles(self, connection: object) -> bool:
        """As in :class:`Adapter`."""

    async def in_transaction(self, connection: Any) -> bool:
        """As in :class:`Adapter`."""

    async def execute(self, connection: Any, statements: Sequence[Statement]) -> None:
        """As in :class:`Adapter`."""

    async def fetch(self, connection: Any, statement: Statement) -> Any:
        """As in :class:`Adapter`."""


class PsycopgAdapter:
    """``psycopg.Connection``."""

    def __init__(self) -> None:
        self._adapters = _text_as_it_is()

    def handles(self, connection: object) -> bool:
        """True for psycopg connections and subclasses, those of a pool too."""
        return isinstance(connection, psycopg.Connection)

    def in_transaction(self, connection: psycopg.Connection[Any]) -> bool:
        """Without autocommit always: psycopg begins a transaction by itself."""
        if not connection.autocommit:
            return True
        if _is_unsure(connection):
            with connection.pipeline():  # a nested pipeline waits until what is queued has run, BEGIN for instance
                pass
        return not _is_idle(connection)

    def execute(self, connection: psycopg.Connection[Any], statements: Sequence[Statement]) -> None:
        """On a cursor of its own, so that no row factory, cursor factory or dumper of the caller takes part."""
        if len(statements) > 1 and _is_idle(connection):
            with connection.transaction():
                self._run(connection, statements)
        else:
            self._run(connection, statements)

    def fetch(self, connection: psycopg.Connection[Any], statement: Statement) -> Any:
        """On a cursor of its own, too."""
        with _missing_schema_noted():
            cursor = _Cursor(connection, self._adapters).execute(statement.sql.encode(), statement.parameters)
            [(value,)] = cursor.fetchall()
        return value

    def _run(self, connection: psycopg.Connection[Any], statements: Sequence[Statement]) -> None:
        with _missing_schema_noted():
            for sql, parameters in statements:
                _Cursor(connection, self._adapters).execute(sql.encode(), parameters)


class AsyncPsycopgAdapter:
    """``psycopg.AsyncConnection``."""

    def __init__(self) -> None:
        self._adapters = _text_as_it_is()

    def handles(self, connection: object) -> bool:
        """True for psycopg's async connections and subclasses, those of a pool too."""
        return isinstance(connection, psycopg.AsyncConnection)

    async def in_transaction(self, connection: psycopg.AsyncConnection[Any]) -> bool:
        """As in :class:`PsycopgAdapter`."""
        if not connection.autocommit:
            return True
        if _is_unsure(connection):
            async with connection.pipeline():
                pass
        return not _is_idle(connection)

    async def execute(self, connection: psycopg.AsyncConnection[Any], statements: Sequence[Statement]) -> None:
        """As in :class:`PsycopgAdapter`."""
        if len(statements) > 1 and _is_idle(connection):
            async with connection.transaction():
                await self._run(connection, statements)
        else:
            await self._run(connection, statements)

    async def fetch(self, connection: psycopg.AsyncConnection[Any], statement: Statement) -> Any:
        """As in :class:`PsycopgAdapter`."""
        with _missing_schema_noted():
            cursor = await _AsyncCursor(connection, self._adapters).execute(
                statement.sql.encode(), statement.parameters
            )
            [(value,)] = await cursor.fetchall()
        return value

    async def _run(self, connection: psycopg.AsyncConnection[Any], statements: Sequence[Statement]) -> None:
        with _missing_schema_noted():
            for sql, parameters in statements:
                await _AsyncCursor(connection, self._adapters).execute(sql.encode(), parameters)


class _Cursor(psycopg.RawCursor[Any]):
    """A cursor whose adapters are ours, made once; registering them for each statement would cost as much again."""

    def __init__(self, connection: psycopg.Connection[Any], adapters: AdaptersMap) -> None:
        super().__init__(connection, row_factory=tuple_row)
        self._adapters = adapters


class _AsyncCursor(psycopg.AsyncRawCursor[Any]):
    """The same for async connections."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], adapters: AdaptersMap) -> None:
        super().__init__(connection, row_factory=tuple_row)
        self._adapters = adapters


@contextmanager
def _missing_schema_noted() -> Iterator[None]:
    try:
        yield
    except (errors.UndefinedTable, errors.UndefinedFunction, errors.InvalidSchemaName) as error:
        error.add_note(_NO_SCHEMA)
        raise


def _text_as_it_is() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    adapters.register_dumper(str, StrDumperUnknown)
    return adapters


def _is_idle(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return connection.autocommit and connection.pgconn.transaction_status == TransactionStatus.IDLE


def _is_unsure(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """True if commands of a pipeline have not been answered yet: a BEGIN or a COMMIT may be among them."""
    return (
        connection.pgconn.pipeline_status != PipelineStatus.OFF
        and connection.pgconn.transaction_status == TransactionStatus.ACTIVE
    )


class Connections:
    """The adapters of one outbox; the one that was registered last is asked first."""

    def __init__(self) -> None:
        self._adapters: list[Adapter] = [PsycopgAdapter()]
        self._async_adapters: list[AsyncAdapter] = [AsyncPsycopgAdapter()]

    def register(self, adapter: Adapter) -> None:
        """Use ``adapter`` for the connections that it handles."""
        self._adapters.insert(0, adapter)

    def register_async(self, adapter: AsyncAdapter) -> None:
        """Use ``adapter`` for the awaited connections that it handles."""
        self._async_adapters.insert(0, adapter)

    def find(self, connection: object) -> Adapter:
        """The adapter of a connection; raises :class:`~eventbus.errors.PublishError` if there is none."""
        for adapter in self._adapters:
            if adapter.handles(connection):
                return adapter
        if any(adapter.handles(connection) for adapter in self._async_adapters):
            raise PublishError(
                f"{_name(connection)} is an async connection; use the awaited methods: await outbox.apublish_event(…)"
            )
        raise PublishError(_advice(connection))

    def find_async(self, connection: object) -> AsyncAdapter:
        """The adapter of an awaited connection; raises as :meth:`find` does."""
        for adapter in self._async_adapters:
            if adapter.handles(connection):
                return adapter
        if any(adapter.handles(connection) for adapter in self._adapters):
            raise PublishError(
                f"{_name(connection)} is no async connection; call outbox.publish_event(…), without await"
            )
        raise PublishError(_advice(connection))

    def check(self, connection: object) -> None:
        """Raises :class:`~eventbus.errors.PublishError` if no adapter handles the connection."""
        adapters: list[Adapter | AsyncAdapter] = [*self._adapters, *self._async_adapters]
        if not any(adapter.handles(connection) for adapter in adapters):
            raise PublishError(_advice(connection))


def _advice(connection: object) -> str:
    name = _name(connection)
    if hasattr(connection, "getconn"):
        return f"{name} is a pool; take a connection: with pool.connection() as conn, and publish with conn"
    if isinstance(connection, psycopg.Cursor | psycopg.AsyncCursor):
        return f"{name} is a cursor; publish with conn=cursor.connection"
    return f"cannot publish on {name}; pass the psycopg connection that your transaction runs on"


def _name(connection: object) -> str:
    kind = type(connection)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


_NO_SCHEMA = "The bus's tables are not in this database: run `eventbus migrate`, or check the setting `schema`."
