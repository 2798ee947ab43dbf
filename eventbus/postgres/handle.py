"""The worker as its plugins see it: :class:`eventbus.plugins.WorkerHandle` on PostgreSQL.

Before it: a station has built a worker. After it: what plugins do with the worker, the database and the queues.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import psycopg

from eventbus.consuming.queues import QueueState
from eventbus.errors import Unavailable
from eventbus.plugins.values import QueueFacts
from eventbus.postgres.breaker import Breaker
from eventbus.postgres.claiming import PostgresConsumer
from eventbus.postgres.connecting import connect, conninfo
from eventbus.postgres.link import broken, describe, unreachable
from eventbus.postgres.statements import render
from eventbus.settings import Settings

log = logging.getLogger("eventbus")

Action = Callable[[], Awaitable[None]]

_PATIENCE: Final = 0.5
"""Seconds for which a plugin's statement waits for its turn to connect."""


class PluginConnection:
    """The connection that the plugins of one worker share. What fails on it is theirs, and no outage of the bus."""

    def __init__(self, settings: Settings, breaker: Breaker) -> None:
        assert settings.dsn is not None
        self.settings = settings
        self._schema = settings.schema_name
        self._target = conninfo(settings.dsn, "plugins")
        self._breaker = breaker
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._turn = asyncio.Lock()

    async def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """See :meth:`eventbus.plugins.WorkerHandle.rows`."""
        async with self._turn:
            try:
                if self._connection is None:
                    self._connection = await connect(await self._breaker.turn(_PATIENCE), self._target)
                cursor = await self._connection.execute(render(sql, self._schema).encode(), parameters or None)
                return await cursor.fetchall() if cursor.description else []
            except psycopg.Error as error:
                if unreachable(error) or broken(error) or self._connection is None:
                    await self._drop()
                    raise Unavailable(describe(error, sql)) from error
                raise
            except asyncio.CancelledError:
                await self._drop()  # an answer may be on its way
                raise

    async def names(self) -> dict[int, str]:
        """The names of all queues by their numbers."""
        return dict(await self.rows("SELECT q.id, q.name FROM {schema}.queues q"))

    async def close(self) -> None:
        """Disconnect."""
        await self._drop()

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class Handle:
    """``begin`` runs an action in the background, again and again with that many seconds in between or once."""

    def __init__(
        self,
        facts: Mapping[str, QueueFacts],
        engine: PostgresConsumer,
        states: Mapping[int, QueueState],
        connection: PluginConnection,
        begin: Callable[[float | None, Action, str], None],
    ) -> None:
        self.settings = connection.settings
        self.queues = facts
        self.rows = connection.rows
        self._begin = begin
        self._engine = engine
        self._states = states

    @property
    def worker_id(self) -> UUID:
        """The incarnation."""
        return self._engine.worker_id

    def every(self, seconds: float, action: Action, name: str) -> None:
        """Again and again."""
        if not 0.01 <= seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"every {seconds!r} seconds is too often or no time; at least 0.01")
        self._begin(seconds, action, name)

    def soon(self, action: Action, name: str) -> None:
        """Once, in the background."""
        self._begin(None, action, name)

    def wake(self, queue: str) -> None:
        """Look again."""
        state = self._state(queue)
        state.announce()
        state.runner.made_room()

    def hold(self, queue: str, seconds: float) -> None:
        """Nothing starts here."""
        self._state(queue).hold(seconds)

    async def pause(
        self, queue: str, source: str, reason: str, seconds: float | None, probe_seconds: float | None = None
    ) -> None:
        """For all workers."""
        await self._engine.pause(self._number(queue), source, reason, seconds, probe_seconds)

    async def resume(self, queue: str, source: str) -> bool:
        """For all workers."""
        return await self._engine.resume(self._number(queue), source)

    async def free_probe(self, queue: str, source: str) -> None:
        """Let another event try."""
        number = self._number(queue)
        if (token := self._states[number].probe) is not None:
            await self._engine.free_probe(number, source, token)

    def finished(self, queue: str) -> int:
        """Handled so far, failures included."""
        return self._state(queue).finished

    @property
    def pools(self) -> Mapping[str, tuple[int, int]]:
        """Running and slots."""
        facts = self.queues
        return {
            state.name: (state.runner.running, facts[state.name].concurrency * (facts[state.name].batch or 1))
            for state in list(self._states.values())
        }

    def _number(self, queue: str) -> int:
        for number, name in self._engine.names.items():
            if name == queue:
                return number
        raise ValueError(
            f"this worker has no queue {queue}; it has {', '.join(self._engine.names.values()) or 'none yet'}"
        )

    def _state(self, queue: str) -> QueueState:
        return self._states[self._number(queue)]
