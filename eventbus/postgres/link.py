"""The bus's own connections: each comes back by itself, and an outage is two log lines, not thousands."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from eventbus.errors import BusPaused, Unavailable
from eventbus.transport import LeaseLost, StatementCancelled

log = logging.getLogger("eventbus")

_DEFAULTS = {
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_SESSION = b"SET default_transaction_isolation = 'read committed'"
_LONGEST_BACKOFF = 5.0
_CONNECTIONS_PER_WORKER = 5

Row = tuple[Any, ...]


def conninfo(dsn: str, name: str) -> str:
    """``dsn`` with our name, and with time-outs that notice a dead peer unless it sets its own."""
    return make_conninfo(dsn, **{**_DEFAULTS, **conninfo_to_dict(dsn), "application_name": f"eventbus {name}"})


class Outage:
    """Whether one process can work with the database. Shared by all its links, so that it speaks once."""

    def __init__(self) -> None:
        self._down: dict[str, str] = {}
        self._since = 0.0

    def began(self, link: str, problem: str) -> None:
        """Report that ``link`` cannot work; logged when it is the first one."""
        if not self._down:
            self._since = time.monotonic()
            log.warning("database trouble: %s; retrying until it is back", problem, extra={"link": link})
        self._down[link] = problem

    def ended(self, link: str) -> None:
        """Report that ``link`` works; logged when it was the last one."""
        if self._down.pop(link, None) is not None and not self._down:
            seconds = time.monotonic() - self._since
            log.info("the database is back after %.1f s", seconds, extra={"link": link, "outage_seconds": seconds})


class Link:
    """One connection with a name. Not for use by two tasks at once."""

    def __init__(self, dsn: str, name: str, outage: Outage) -> None:
        self.name = name
        self._dsn = dsn
        self._outage = outage
        self._connection: psycopg.AsyncConnection[Row] | None = None
        self._failures = 0

    @property
    def backend_pid(self) -> int | None:
        """The server's process behind this link, while it is connected."""
        return None if self._connection is None else self._connection.info.backend_pid

    async def rows(self, statement: bytes, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run one statement and fetch everything.

        Raises :class:`Unavailable` for all that may pass by itself (the outcome of the statement is then unknown),
        :class:`LeaseLost` and :class:`BusPaused` when the engine says so.
        """
        try:
            connection = self._connection or await self._connect()
            cursor = await connection.execute(statement, parameters)
            rows = await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise await self._translate(error, statement) from error
        if self._failures:
            self._failures = 0
            self._outage.ended(self.name)
        return rows

    async def transaction(self, isolation: psycopg.IsolationLevel, first: bytes, last: bytes, parameters: Row) -> Row:
        """Run two statements in one transaction; the first row of the last one."""
        try:
            connection = self._connection or await self._connect()
            await connection.set_isolation_level(isolation)
            try:
                async with connection.transaction():
                    await connection.execute(first)
                    cursor = await connection.execute(last, parameters)
                    row = await cursor.fetchone()
            finally:
                if not connection.closed:
                    await connection.set_isolation_level(None)
        except psycopg.Error as error:
            raise await self._translate(error, last) from error
        assert row is not None
        return row

    async def recover(self) -> None:
        """Wait as long as the back-off says, then until a connection stands; back-off doubles from 0.1 s to 5 s."""
        while True:
            await asyncio.sleep(self._backoff())
            if self._connection is not None:
                return
            try:
                await self._connect()
                return
            except psycopg.Error as error:
                await self._translate(error, b"connect")

    async def close(self) -> None:
        """Close the connection; an outage of this link is over with it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        self._outage.ended(self.name)

    async def _connect(self) -> psycopg.AsyncConnection[Row]:
        connection = await psycopg.AsyncConnection.connect(conninfo(self._dsn, self.name), autocommit=True)
        try:
            await connection.execute(_SESSION)
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        return connection

    def _backoff(self) -> float:
        ceiling = min(_LONGEST_BACKOFF, 0.1 * 2.0 ** min(self._failures, 10))
        return ceiling * (0.5 + random.random() / 2)  # noqa: S311 - spreads reconnects, keeps no secret

    async def _translate(self, error: psycopg.Error, statement: bytes) -> Exception:
        if error.sqlstate == "EB001":
            return LeaseLost(str(error))
        if error.sqlstate == "EB002":
            return BusPaused(str(error))
        self._failures += 1
        problem = describe(error, statement.decode())
        if broken(error) or self._connection is None or self._connection.broken:
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.close()
        self._outage.began(self.name, problem)
        if isinstance(error, errors.QueryCanceled):
            return StatementCancelled(problem)
        return Unavailable(problem)


def broken(error: psycopg.Error) -> bool:
    """Whether a connection is of no more use after this error; a read-only server counts (it was demoted)."""
    return (
        error.sqlstate is None
        or isinstance(error, psycopg.InterfaceError | errors.ReadOnlySqlTransaction)
        or (error.sqlstate[:2] in ("08", "57") and not isinstance(error, errors.QueryCanceled))
        or error.sqlstate in ("53300", "25P03", "25P02")
    )


def describe(error: psycopg.Error, statement: str) -> str:
    """One line for the log: what failed, and what to do where we know it."""
    text = " ".join(str(error).split())
    if isinstance(error, errors.QueryCanceled):
        return f"{text} while running: {statement} (raise statement_timeout for the bus's role)"
    if error.sqlstate == "53300":
        return f"{text} (one worker needs {_CONNECTIONS_PER_WORKER} connections)"
    if error.sqlstate is None or error.sqlstate[:2] in ("08", "57", "28", "3D"):
        return text
    return f"{text} (SQLSTATE {error.sqlstate}) while running: {statement}"
