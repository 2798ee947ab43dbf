"""The bus's own connections on the event loop: each comes back by itself, in its turn.

Before it: the engine's statements. After it: their rows, or what kind of failure it was. What fails although the
connection stands has a back-off of its own; when a connection can be made is up to the ``breaker``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from psycopg import errors

from eventbus.errors import BusPaused, Unavailable
from eventbus.postgres.breaker import LONGEST_PAUSE, Backoff, Breaker
from eventbus.postgres.connecting import connect, conninfo
from eventbus.transport import LeaseLost, StatementCancelled

_FORGIVEN_AFTER = 2 * LONGEST_PAUSE
"""Seconds after which a statement that failed is not expected to come again."""
CONNECTIONS_PER_WORKER: Final = 6
"""The bus's own five, and the one that plugins share; transactional handlers have others."""
_FULL = ("too many connections", "too many clients", "remaining connection slots")
"""How servers say SQLSTATE 53300 while a connection is made: the client library passes on their text only."""

_TURNED_AWAY: Final = (
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "is not permitted to log in",
    "permission denied for database",
)

Row = tuple[Any, ...]


class Link:
    """One connection with a name. Not for use by two tasks at once."""

    def __init__(self, dsn: str, name: str, breaker: Breaker) -> None:
        self.name = name
        self._target = conninfo(dsn, name)
        self._breaker = breaker
        self._connection: psycopg.AsyncConnection[Row] | None = None
        self._proven_at = 0.0
        """When the connection worked last."""
        self._backoff = Backoff()
        """Of what failed on connections that stood."""
        self._troubled = False
        self._failing: bytes | None = None
        """The statement that failed although the server answered: only its own success ends the trouble."""
        self._failed_at = 0.0

    @property
    def backend_pid(self) -> int | None:
        """The server's process behind this link, while it is connected."""
        return None if self._connection is None else self._connection.info.backend_pid

    async def rows(self, statement: bytes, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run one statement and fetch everything; connects first where that is allowed now.

        Raises :class:`Unavailable` for all that may pass by itself (the outcome of the statement is then unknown),
        :class:`LeaseLost` and :class:`BusPaused` when the engine says so.
        """
        try:
            connection = self._connection or await self._connect(patience=0.0)
            cursor = await connection.execute(statement, parameters)
            rows = await cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise await self._translate(error, statement) from error
        self._worked(statement)
        return rows

    async def transaction(self, isolation: psycopg.IsolationLevel, first: bytes, last: bytes, parameters: Row) -> Row:
        """Run two statements in one transaction; the first row of the last one."""
        try:
            connection = self._connection or await self._connect(patience=0.0)
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
        self._proven_at = time.monotonic()
        if not self._troubled:
            return
        if self._failing in (None, statement) or self._proven_at - self._failed_at > _FORGIVEN_AFTER:
            self._troubled = False
            self._backoff.failures = 0
            self._failing = None
            self._breaker.outage.ended(self.name)

    async def recover(self) -> None:
        """Wait as long as the back-off says, then until a connection stands; back-off doubles from 0.1 s to 5 s."""
        await asyncio.sleep(self._backoff.pause())
        while self._connection is None:
            try:
                await self._connect()
            except psycopg.Error as error:
                await self._translate(error, b"connect")

    async def close(self) -> None:
        """Close the connection; an outage of this link is over with it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        self._breaker.outage.ended(self.name)

    async def _connect(self, patience: float = math.inf) -> psycopg.AsyncConnection[Row]:
        self._connection = connection = await connect(await self._breaker.turn(patience), self._target)
        self._proven_at = time.monotonic()
        return connection

    async def _translate(self, error: psycopg.Error, statement: bytes) -> Exception:
        if error.sqlstate == "EB001":
            return LeaseLost(str(error))
        if error.sqlstate == "EB002":
            return BusPaused(str(error))
        self._troubled = True
        self._failed_at = time.monotonic()
        problem = describe(error, statement.decode())
        proven_at = None if self._connection is None else self._proven_at
        if self._connection is not None:
            await self._failed(self._connection, error, statement)
        self._breaker.outage.began(self.name, problem, proven_at)
        if isinstance(error, errors.QueryCanceled):
            return StatementCancelled(problem)
        return Unavailable(problem)

    async def _failed(self, connection: psycopg.AsyncConnection[Row], error: psycopg.Error, statement: bytes) -> None:
        """Something failed on a connection; what fails while one is made is the breaker's."""
        self._backoff.failures += 1
        lost = unreachable(error) or connection.broken
        if lost:
            self._breaker.broke(self._proven_at)
        self._failing = None if lost else statement
        if lost or broken(error):
            self._connection = None
            await connection.close()


def unreachable(error: psycopg.Error) -> bool:
    """Whether the server or the way to it has failed, so that no connection can be expected to work."""
    return error.sqlstate is None or (
        error.sqlstate[:2] in ("08", "57") and not isinstance(error, errors.QueryCanceled)
    )


def broken(error: psycopg.Error) -> bool:
    """Whether a connection is of no more use after this error; a read-only server counts (it was demoted)."""
    return (
        unreachable(error)
        or isinstance(error, psycopg.InterfaceError | errors.ReadOnlySqlTransaction)
        or error.sqlstate in ("53300", "25P03", "25P02")
    )


def describe(error: psycopg.Error, statement: str) -> str:
    """One line for the log: what failed, and what to do where we know it."""
    text = " ".join((error.diag.message_primary or str(error)).split())
    statement = " ".join(statement.split())
    if isinstance(error, errors.QueryCanceled):
        return f"{text} while running: {statement} (raise statement_timeout for the bus's role)"
    if error.sqlstate == "53300" or any(full in text for full in _FULL):
        return f"{text} (one worker needs {CONNECTIONS_PER_WORKER} connections)"
    if error.sqlstate is None or error.sqlstate[:2] in ("08", "57", "28", "3D"):
        return text
    return f"{text} (SQLSTATE {error.sqlstate}) while running: {statement}"


def turned_away(problem: str) -> bool:
    """Whether a server answered and will not let us in, so that waiting for it is in vain. ``problem``: its words.

    The driver passes on only the text of a refused connection, so this knows the English ones; others are waited for.
    """
    return "FATAL" in problem and any(part in problem for part in _TURNED_AWAY)
