"""One transaction around each call of a transactional handler, which also says that its deliveries are done.

Before it: ``execution`` has a call to make. After it: what the handler wrote and published, and that it is done, is
committed together or not at all; ``execution`` judges what came of the call, and the consumer settles that as always.
The rules of the database's side are in the migration 0012. What an error means is decided in ``tries``; here it is
acted upon, once for threads and once for tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from eventbus.consuming.boundary import Results
from eventbus.postgres.breaker import Breaker
from eventbus.postgres.connecting import SESSION, connect, connect_blocking, conninfo
from eventbus.postgres.opening import Opening
from eventbus.postgres.sessions import Sessions, end, refresh
from eventbus.postgres.statements import Statements
from eventbus.postgres.tries import (
    Losses,
    Patience,
    Tries,
    Unit,
    committable,
    is_held,
    link_of,
    require_released,
    require_unharmed,
)
from eventbus.transport import Delivery

Bind = Callable[[Any], AbstractContextManager[None]]
"""Makes a connection the one to publish on, for a block."""


class Transactions:
    """Implements :class:`eventbus.consuming.boundary.Boundary` for one queue, on connections of its own."""

    def __init__(self, dsn: str, statements: Statements, bind: Bind, patience: Patience, breaker: Breaker) -> None:
        self._target = conninfo(dsn, "handler")
        self._statements = statements
        self._clean = (statements.text("clean") % {"session": SESSION.decode()}).encode()
        self._bind = bind
        self._patience = patience
        self._breaker = breaker
        self._losses = Losses()
        self._plain: Sessions[psycopg.Connection[Any]] = Sessions()
        self._async: Sessions[psycopg.AsyncConnection[Any]] = Sessions()

    def run_blocking(self, deliveries: Sequence[Delivery], attempt: Callable[[Any], Results]) -> Results:
        """Call a plain handler in this thread; see :class:`~eventbus.consuming.boundary.Boundary`."""
        tries = self._tries(deliveries)
        while True:
            session = self._open()
            unit = tries.next()
            try:
                return self._within(session, unit, attempt)
            except Exception as error:
                answer = tries.failed(unit, session, error)
                if answer is None:
                    raise
            finally:
                self._plain.give(session)
            if not isinstance(answer, float):
                return answer
            time.sleep(answer)

    async def run(self, deliveries: Sequence[Delivery], attempt: Callable[[Any], Awaitable[Results]]) -> Results:
        """Call an async handler in this task; see :class:`~eventbus.consuming.boundary.Boundary`."""
        tries = self._tries(deliveries)
        while True:
            session = await self._open_async()
            unit = tries.next()
            try:
                return await self._within_async(session, unit, attempt)
            except Exception as error:
                answer = tries.failed(unit, session, error)
                if answer is None:
                    raise
            finally:
                self._async.give(session)
            if not isinstance(answer, float):
                return answer
            await asyncio.sleep(answer)

    def trim(self) -> None:
        """Close connections that were not needed for a while."""
        self._plain.trim()
        self._async.trim()

    def close(self) -> None:
        """Close all connections, those of handlers that still run when they end."""
        self._plain.close()
        self._async.close()
        self._breaker.outage.ended(link_of(self._patience))

    def _tries(self, deliveries: Sequence[Delivery]) -> Tries:
        return Tries(deliveries, self._statements, self._patience, self._breaker, self._losses)

    def _within(self, session: psycopg.Connection[Any], unit: Unit, attempt: Callable[[Any], Results]) -> Results:
        with session.transaction() as transaction:
            _execute(session, unit.begin())
            unit.require_held()
            unit.step = "handler"
            try:
                with self._bind(session):
                    results = attempt(session)
                require_released(session)
            except BaseException:
                if is_held(session):  # the end of the block would wait for it for ever
                    session.close()
                raise
            if not committable(results):
                raise psycopg.Rollback(transaction)
            require_unharmed(session)
            _execute(session, unit.complete())
            unit.step = "commit"
        return results

    async def _within_async(
        self, session: psycopg.AsyncConnection[Any], unit: Unit, attempt: Callable[[Any], Awaitable[Results]]
    ) -> Results:
        async with session.transaction() as transaction:
            await _execute_async(session, unit.begin())
            unit.require_held()
            unit.step = "handler"
            try:
                with self._bind(session):
                    results = await attempt(session)
                require_released(session)
            except BaseException:
                if is_held(session):
                    await session.close()
                raise
            if not committable(results):
                raise psycopg.Rollback(transaction)
            require_unharmed(session)
            await _execute_async(session, unit.complete())
            unit.step = "commit"
        return results

    def _open(self) -> psycopg.Connection[Any]:
        """A clean session; raises :class:`Postponed` when none can be had for a while."""
        opening = Opening(self._patience, self._breaker)
        while True:
            session = self._plain.take()
            fresh = session is None
            try:
                if session is None:
                    turn = self._breaker.turn_blocking(opening.left())
                    session = connect_blocking(turn, self._target)
                _execute(session, self._clean)
            except BaseException as error:
                if session is not None:
                    end(session)
                pause = opening.failed(error, session, fresh=fresh)
                if pause is None:
                    raise
            else:
                refresh(session)
                opening.worked()
                return session
            time.sleep(pause)

    async def _open_async(self) -> psycopg.AsyncConnection[Any]:
        """The same for tasks."""
        opening = Opening(self._patience, self._breaker)
        while True:
            session = self._async.take()
            fresh = session is None
            try:
                if session is None:
                    session = await connect(await self._breaker.turn(opening.left()), self._target)
                await _execute_async(session, self._clean)
            except BaseException as error:
                if session is not None:
                    end(session)
                pause = opening.failed(error, session, fresh=fresh)
                if pause is None:
                    raise
            else:
                refresh(session)
                opening.worked()
                return session
            await asyncio.sleep(pause)


def _execute(session: psycopg.Connection[Any], statements: bytes) -> None:
    """On a cursor of its own, so that no cursor factory or row factory of the handler takes part."""
    psycopg.Cursor(session, row_factory=tuple_row).execute(statements, prepare=False)


async def _execute_async(session: psycopg.AsyncConnection[Any], statements: bytes) -> None:
    await psycopg.AsyncCursor(session, row_factory=tuple_row).execute(statements, prepare=False)
