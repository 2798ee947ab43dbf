"""The breakers in the database, where every process sees them: statements, and what they answer.

Each call is one transaction. After :class:`~eventbus.errors.Unavailable` it may have happened or not, and may simply be
repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from typing import Any, Final, Literal

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from eventbus.plugins import Migration, WorkerHandle
from eventbus_circuit_breaker.options import Options
from eventbus_circuit_breaker.sql import CLOSE, LOOK, OPEN, STATES

SOURCE: Final = "circuit_breaker"
"""Under this name the breakers pause queues."""

_RIGHTS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "0001_circuits": {"circuit_breakers": ("SELECT", "INSERT", "UPDATE"), "circuit_breaker_states": ("SELECT",)}
}
"""What a role that consumes may do with the tables of each step."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What came of opening a breaker; the states are those of the SQL function ``circuit_breaker_open``."""

    state: Literal["opened", "open", "closed", "unknown"]
    seconds: float
    trips: int


@dataclass(frozen=True, slots=True)
class Closing:
    """A breaker was closed that had been open for so many seconds."""

    seconds: float
    trips: int


@dataclass(frozen=True, slots=True)
class Breaker:
    """One breaker as people see it; the states are those of the view ``circuit_breaker_states``."""

    queue: str
    state: Literal["closed", "open", "probing", "ready"]
    seconds: float
    """How long that lasts at most; 0 if it is closed or ready."""
    trips: int
    began_at: datetime | None
    opened_at: datetime | None
    closed_at: datetime | None
    reason: str | None
    error: str | None


class Records:
    """The breakers as a worker reads and writes them."""

    def __init__(self, worker: WorkerHandle, options: Options) -> None:
        self._worker = worker
        self._options = options

    async def open(self, queue: str, reason: str, error: str, probe_age: float | None) -> Opening:
        """Open it, unless somebody has. ``probe_age``: for how many seconds the failed probe ran, if there was one."""
        options = self._options
        numbers = (options.first_pause, options.factor, options.longest_pause, options.probe_timeout)
        [row] = await self._worker.rows(OPEN, (queue, probe_age, reason, error, *numbers))
        return Opening(*row)

    async def close(self, queue: str, probe_age: float) -> Closing | None:
        """Close it after a probe that took so many seconds; None if it is closed or was opened again meanwhile."""
        [row] = await self._worker.rows(CLOSE, (queue, probe_age))
        return None if row[0] is None else Closing(*row)

    async def look(self, queue: str) -> tuple[float, int] | None:
        """For how many seconds it stays open, 0 while it is tried, and its trips; None if it is closed."""
        rows: list[tuple[Any, ...]] = await self._worker.rows(LOOK, (queue,))
        return (float(rows[0][0]), int(rows[0][1])) if rows else None


def breakers(connection: psycopg.Connection, schema: str) -> list[Breaker]:
    """Every breaker that was ever opened, by queue."""
    with connection.cursor(row_factory=class_row(Breaker)) as cursor:
        return cursor.execute(sql.SQL(STATES).format(schema=sql.Identifier(schema))).fetchall()


def close_by_hand(connection: psycopg.Connection, schema: str, queue: str) -> Closing | None:
    """Close it, whatever its probes say; None if it is not open."""
    row = connection.execute(sql.SQL(CLOSE).format(schema=sql.Identifier(schema)), (queue, None)).fetchone()
    return None if row is None or row[0] is None else Closing(*row)


def migrations() -> list[Migration]:
    """The steps of the breakers' table and functions, in order."""
    folder = resources.files("eventbus_circuit_breaker") / "migrations"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    steps = {file.name.removesuffix(".sql"): file.read_text(encoding="utf-8") for file in files}
    return [Migration(name, text, _RIGHTS.get(name, {})) for name, text in steps.items()]
