"""The bus's own connections: each comes back by itself, and an outage is two log lines, not thousands."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from eventbus.errors import BusPaused, Unavailable
from eventbus.transport import LeaseLost, StatementCancelled

log = logging.getLogger("eventbus")

_DEFAULTS: Final[Mapping[str, int]] = {
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
SESSION = b"SET default_transaction_isolation = 'read committed'"
"""What every connection of the bus says first, whatever the role's default is."""
_LONGEST_BACKOFF = 5.0
_FORGIVEN_AFTER = 2 * _LONGEST_BACKOFF
"""Seconds after which a statement that failed is not expected to come again."""
_CONNECTIONS_PER_WORKER = 5
_FULL = ("too many connections", "too many clients", "remaining connection slots")
"""How servers say SQLSTATE 53300 while a connection is made: the client library passes on their text only."""

Row = tuple[Any, ...]


def conninfo(dsn: str, name: str) -> str:
    """``dsn`` with our name, and with time-outs that notice a dead peer unless it sets its own."""
    return make_conninfo(dsn, **{**_DEFAULTS, **conninfo_to_dict(dsn), "application_name": f"eventbus {name}"})


_TURNED_AWAY: Final = (
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "is not permitted to log in",
    "permission denied for database",
)


class Outage:
    """Whether one process can work with the database. Shared by all its links, so that it speaks once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._down: dict[str, str] = {}
        self._began_at = 0.0
        self._ended_at = 0.0

    def began(self, link: str, problem: str, connected_at: float | None = None) -> None:
        """Report that ``link`` cannot work; logged when it is the first one.

        ``connected_at``: when the connection was made that is lost now (monotonic seconds). If it is older than the
        end of the last outage, then it was that outage that cut it, and only now somebody wanted to use it.
        """
        with self._lock:
            if not self._down:
                if connected_at is not None and connected_at < self._ended_at:
                    return
                self._began_at = time.monotonic()
                log.warning("database trouble: %s; retrying until it is back", problem, extra={"link": link})
            self._down[link] = problem

    def ended(self, link: str) -> None:
        """Report that ``link`` works; logged when it was the last one."""
        with self._lock:
            if self._down.pop(link, None) is not None and not self._down:
                self._ended_at = time.monotonic()
                seconds = self._ended_at - self._began_at
                log.info("the database is back after %.1f s", seconds, extra={"link": link, "outage_seconds": seconds})


class Link:
    """One connection with a name. Not for use by two tasks at once."""

    def __init__(self, dsn: str, name: str, outage: Outage) -> None:
        self.name = name
        self._dsn = dsn
        self._outage = outage
        self._connection: psycopg.AsyncConnection[Row] | None = None
        self._connected_at = 0.0
        self._failures = 0
        self._failing: bytes | None = None
        """The statement that failed although the connection was fine: only its own success ends the trouble."""
        self._failed_at = 0.0

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
        self._worked(statement)
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
        self._worked(last)
        return row

    def _worked(self, statement: bytes) -> None:
        if not self._failures:
            return
        if self._failing in (None, statement) or time.monotonic() - self._failed_at > _FORGIVEN_AFTER:
            self._failures = 0
            self._failing = None
            self._outage.ended(self.name)

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
            await connection.execute(SESSION)
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        self._connected_at = time.monotonic()
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
        self._failed_at = time.monotonic()
        problem = describe(error, statement.decode())
        connection, connected_at = self._connection, None
        if connection is not None:
            connected_at = self._connected_at
        if broken(error) or connection is None or connection.broken:
            self._connection = self._failing = None
            if connection is not None:
                await connection.close()
        else:
            self._failing = statement
        self._outage.began(self.name, problem, connected_at)
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
    text = " ".join((error.diag.message_primary or str(error)).split())
    statement = " ".join(statement.split())
    if isinstance(error, errors.QueryCanceled):
        return f"{text} while running: {statement} (raise statement_timeout for the bus's role)"
    if error.sqlstate == "53300" or any(full in text for full in _FULL):
        return f"{text} (one worker needs {_CONNECTIONS_PER_WORKER} connections)"
    if error.sqlstate is None or error.sqlstate[:2] in ("08", "57", "28", "3D"):
        return text
    return f"{text} (SQLSTATE {error.sqlstate}) while running: {statement}"


def turned_away(problem: str) -> bool:
    """Whether a server answered and will not let us in, so that waiting for it is in vain. ``problem``: its words.

    The driver passes on only the text of a refused connection, so this knows the English ones; others are waited for.
    """
    return "FATAL" in problem and any(part in problem for part in _TURNED_AWAY)
