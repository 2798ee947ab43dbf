"""The relay's side of the storage engine on PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from psycopg import IsolationLevel

from eventbus.postgres.link import Link
from eventbus.postgres.statements import Statements
from eventbus.publishing.ticks import Fill, Tick

_EVERYTHING: Final = datetime(1, 1, 1, tzinfo=UTC)
_SWEEP_SECONDS = 5.0


class PostgresRelay:
    """Implements :class:`eventbus.publishing.ticks.RelayEngine` over one link.

    Scheduled events are looked for from the last one that fired on, because the low end of the table is where the
    deleted rows are, and from the very beginning every five seconds, for those that were committed late.
    """

    def __init__(self, link: Link, calls: Statements, *, resume_after_restore: bool) -> None:
        self._link = link
        self._calls = calls
        self._resume = resume_after_restore
        self._due_from = _EVERYTHING
        self._swept_at = 0.0

    async def tick(self, limit: int) -> Tick:
        now = time.monotonic()
        if now - self._swept_at > _SWEEP_SECONDS:
            self._swept_at, self._due_from = now, _EVERYTHING
        [row] = await self._link.rows(self._calls["tick"], (limit, self._due_from))
        return Tick(*row)

    async def bindings(self) -> tuple[int, Sequence[tuple[int, str]]]:
        rows = await self._link.rows(self._calls["bindings"])
        return rows[0][0], [(queue_id, pattern) for _, queue_id, pattern in rows if queue_id is not None]

    async def resolve(self, version: int, routes: Mapping[str, Sequence[int]]) -> bool:
        [row] = await self._link.rows(self._calls["resolve"], (version, orjson.dumps(routes).decode()))
        return bool(row[0])

    async def filling(self) -> Mapping[int, str]:
        return dict(await self._link.rows(self._calls["filling"]))

    async def fill(self, queue_id: int, limit: int) -> Fill:
        [row] = await self._link.rows(self._calls["fill"], (queue_id, limit))
        return Fill(*row)

    async def fall_asleep(self, seconds: float) -> bool:
        [row] = await self._link.rows(self._calls["fall_asleep"], (seconds,))
        return bool(row[0])

    async def fire_due(self, limit: int) -> int:
        [(fired, upto)] = await self._link.rows(self._calls["fire_due"], (limit, self._due_from))
        if upto is not None:
            self._due_from = upto
        return int(fired)

    async def attach(self) -> str:
        row = await self._link.transaction(
            IsolationLevel.REPEATABLE_READ, self._calls["lock_for_attach"], self._calls["attach"], (self._resume,)
        )
        return str(row[0])

    async def is_foreign(self) -> bool:
        """Whether ``attach`` has something to do."""
        [row] = await self._link.rows(self._calls["is_foreign"])
        return bool(row[0])

    async def declare(self, queues: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Create or change queues; returns the number of each, by name. The last declaration of a name wins.

        The fields of each are those of the engine's ``declare_queues``.
        """
        rows = await self._link.rows(self._calls["declare"], (orjson.dumps(queues).decode(),))
        return {name: number for name, number in rows}  # noqa: C416 - rows are tuples of any length to a type checker

    async def recover(self) -> None:
        await self._link.recover()
