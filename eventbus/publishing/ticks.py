"""The seam between the relay and the storage engine: the values that cross it, and what an engine must do.

Before it: publishing has committed events. After it: the relay has moved them into queues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Tick:
    """What one step of the relay did; the fields are those of the engine's ``tick`` function."""

    state: Literal["busy", "paused", "foreign", "idle", "unknown", "ticked"]
    more: bool
    events: int
    deliveries: int
    fed: Sequence[int]
    unknown: Sequence[str]
    due_in: float | None
    counts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Fill:
    """What one step of filling a new queue did; the fields are those of the engine's ``fill`` function."""

    state: Literal["busy", "paused", "unknown", "more", "filled", "active"]
    events: int
    deliveries: int
    unknown: Sequence[str]


class RelayEngine(Protocol):
    """What the relay needs. Every call raises :class:`eventbus.errors.Unavailable` when the database is away."""

    async def tick(self, limit: int) -> Tick:
        """Relay at most ``limit`` deliveries (at least one event). Atomic; a crash loses nothing."""

    async def bindings(self) -> tuple[int, Sequence[tuple[int, str]]]:
        """The version of the bindings, and (queue number, pattern) of each."""

    async def resolve(self, version: int, routes: Mapping[str, Sequence[int]]) -> bool:
        """Store where topics go; false, and nothing stored, when the bindings are newer than ``version``."""

    async def filling(self) -> Mapping[int, str]:
        """The queues that are filled with what was relayed before they began: number and name."""

    async def fill(self, queue_id: int, limit: int) -> Fill:
        """The next step of such a queue: looks at ``limit`` events at most. Atomic; a crash loses nothing."""

    async def fall_asleep(self, seconds: float) -> bool:
        """Ask publishers to wake us for that long; true when one is in the middle of a transaction and may not."""

    async def fire_due(self, limit: int) -> int:
        """Move due scheduled events to the outbox; returns how many."""

    async def attach(self) -> str:
        """After a restore: take a new position. ``attached``, ``resumed`` or ``paused``."""

    async def recover(self) -> None:
        """Wait, with back-off, until the database can be reached again."""
