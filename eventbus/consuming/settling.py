"""Tells the engine what became of deliveries: whole leases as they finish, single deliveries of those that last."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping

from eventbus.consuming.detaching import Detachment
from eventbus.consuming.holdings import Holdings
from eventbus.consuming.outcomes import Part, part_of, size
from eventbus.consuming.queues import QueueState
from eventbus.errors import Unavailable
from eventbus.transport import ConsumerEngine, Lease

log = logging.getLogger("eventbus")

_ORDERED_INTERVAL = 0.001
"""Longest time in seconds for which finished leases of ordered lanes wait for others to settle with."""
_PROGRESS_AFTER = 1.0
"""Seconds after which a claim that is still open has its finished deliveries recorded."""


class Settler:
    """The settling loop. ``interval`` in seconds: how long finished leases wait for others to settle with."""

    def __init__(
        self, engine: ConsumerEngine, queues: Mapping[int, QueueState], holdings: Holdings, interval: float
    ) -> None:
        self._engine = engine
        self._queues = queues
        self._holdings = holdings
        self._interval = interval
        self._detachments: dict[Lease, Detachment] = {}
        """Those that were told to the engine, and of which is not known whether they happened."""

    async def run(self) -> None:
        """Settle until the holdings close and nothing is left or under way."""
        holdings = self._holdings
        while not holdings.closing or holdings.leases or holdings.asking:
            await self._wait()
            try:
                await self._settle_finished()
                await self._record_progress()
            except Unavailable:
                holdings.settleable.set()
                for queue in self._queues.values():
                    queue.forget_completions()
                await self._engine.recover_settling()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(_PROGRESS_AFTER):
                await self._holdings.settleable.wait()
        except TimeoutError:
            return
        if not self._holdings.closing:
            await asyncio.sleep(self._patience())

    def _patience(self) -> float:
        """Seconds for which finished leases wait for others. The lane of an ordered one stands still meanwhile."""
        if any(lease.ordered for lease in self._holdings.finished):
            return min(self._interval, _ORDERED_INTERVAL)
        return self._interval

    async def _settle_finished(self) -> None:
        holdings = self._holdings
        holdings.settleable.clear()
        while holdings.finished:
            leases = list(holdings.finished)
            lost = await self._engine.settle(leases)
            for lease in lost:
                self._lose(lease)
                lease.executed.clear()
            settled = set(leases)
            holdings.finished = [lease for lease in holdings.finished if lease not in settled]
            now = time.monotonic()
            for lease in leases:
                holdings.forget(lease)
                queue = self._queues[lease.queue_id]
                queue.settled(lease, now)
                if lease.probe and lease.done and lease not in lost:
                    queue.probed(lease.token)
            holdings.news.set()
            holdings.settled.set()
            self._report(leases, lost)

    def _report(self, leases: Iterable[Lease], lost: Collection[Lease]) -> None:
        """Tell of what was stored, queue by queue."""
        stored: dict[int, list[Part]] = {}
        for lease in leases:
            if lease not in lost and (part := part_of(lease)) is not None:
                stored.setdefault(lease.queue_id, []).append(part)
        for queue_id, parts in stored.items():
            self._queues[queue_id].reporter.stored(parts)

    def _lose(self, lease: Lease) -> None:
        if not lease.dropped:
            log.warning("lost a lease while its events ran; they run again elsewhere", extra={"lease": repr(lease)})
            self._queues[lease.queue_id].reporter.lost(size(lease))

    async def _record_progress(self) -> None:
        now = time.monotonic()
        for gone in self._detachments.keys() - self._holdings.leases:
            del self._detachments[gone]
        for lease in list(self._holdings.leases):
            if not (self._holdings.closing or now - lease.opened_at > _PROGRESS_AFTER):
                continue
            if lease.ordered and lease.claim_id and lease.unfinished:
                await self._detach(lease)
                continue
            if not lease.unfinished or not (lease.done or lease.verdicts):
                continue
            verdicts = lease.verdicts
            part = part_of(lease)
            if await self._engine.record_progress(lease):
                queue = self._queues[lease.queue_id]
                queue.expect_retries(verdicts, time.monotonic())
                self._holdings.news.set()
                queue.reporter.stored([part] if part is not None else ())
            else:
                self._lose(lease)
                lease.dropped = True
                self._holdings.forget(lease)

    async def _detach(self, lease: Lease) -> None:
        """Let the lane of an ordered claim go on while some of it still runs."""
        queue = self._queues[lease.queue_id]
        part = self._detachments.setdefault(lease, Detachment(lease, queue, self._holdings))
        kept = await part.write(self._engine)
        del self._detachments[lease]
        if kept:
            queue.settled(lease, time.monotonic())
            queue.reporter.stored(part.stored)
        else:
            self._lose(lease)
            lease.dropped = True
        self._holdings.news.set()
