"""The rare statements of a worker, on a connection that is made for the first of them.

Pauses are asked for while a claim is under way on its own connection, so they need another one; one statement at a
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from eventbus.postgres.link import Link
from eventbus.postgres.statements import Statements

MANUAL: Final = "manual"
"""The source of the operator's pauses."""


class Watching:
    """Pauses and resumes queues, and looks whether anybody is in the middle of something. For any number of tasks."""

    def __init__(self, link: Link, calls: Statements) -> None:
        self._link = link
        self._calls = calls
        self._turn = asyncio.Lock()

    async def undone(self, queue_ids: Sequence[int]) -> bool:
        """Whether other workers or publishers are in the middle of something in these queues."""
        return await self._answer("undone", list(queue_ids), list(queue_ids), list(queue_ids))

    async def pause(
        self, queue_id: int, source: str, reason: str, seconds: float | None, probe_seconds: float | None
    ) -> bool:
        """See :meth:`eventbus.transport.ConsumerEngine.pause`."""
        _require_own(source)
        return await self._answer("pause_queue", queue_id, source, reason, seconds, probe_seconds)

    async def resume(self, queue_id: int, source: str) -> bool:
        """See :meth:`eventbus.transport.ConsumerEngine.resume`."""
        _require_own(source)
        return await self._answer("resume_queue", queue_id, source)

    async def free_probe(self, queue_id: int, source: str, token: UUID) -> bool:
        """See :meth:`eventbus.transport.ConsumerEngine.free_probe`."""
        return await self._answer("free_probe", queue_id, source, token)

    async def end_probe(self, queue_id: int, token: UUID) -> bool:
        """The probe was handled well, and whoever paused the queue has not said what follows: end that pause."""
        return await self._answer("end_probe", queue_id, token)

    async def _answer(self, call: str, *parameters: Any) -> bool:
        async with self._turn:
            [row] = await self._link.rows(self._calls[call], parameters)
        return bool(row[0])


def _require_own(source: str) -> None:
    if source == MANUAL:
        raise ValueError(f"the source '{MANUAL}' is the operator's (eventbus queues pause); name your own")
