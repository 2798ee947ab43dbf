"""Claims deliveries for every queue that has room, and gives them to the runners.

Before it: the relay has numbered deliveries into queues. After it: the handlers run. A claim whose reply is lost
is found again by comparing what the database says we hold with what we know.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from eventbus.consuming.holdings import Holdings, chain
from eventbus.consuming.outcomes import size
from eventbus.consuming.queues import NEVER, QueueState
from eventbus.consuming.solitude import Solitude
from eventbus.errors import BusPaused, Unavailable
from eventbus.transport import RELEASED, Claimed, ClaimedDue, ConsumerEngine, Delivery, LeaseLost

log = logging.getLogger("eventbus")

_BUSY_PAUSE = 0.003
"""Seconds after which a queue is tried again that another worker was claiming from."""
_HELD_PAUSE = 0.1
"""Seconds after which an ordered queue is tried again all of whose lanes with events have an open claim."""
_ALONE_PAUSE = 0.2
"""Seconds after which to look again for one that must run alone and that another worker has."""
_PAUSED_POLL = 2.0

Answer = TypeVar("Answer", Claimed, ClaimedDue)


class Fetcher:
    """The claiming loop. ``poll_interval`` is read anew for each wait: it depends on LISTEN."""

    def __init__(
        self,
        engine: ConsumerEngine,
        queues: Mapping[int, QueueState],
        holdings: Holdings,
        *,
        batch: int,
        prefetch_bytes: int,
    ) -> None:
        self.poll_interval = 0.5
        self._engine = engine
        self._queues = queues
        self._holdings = holdings
        self._batch = batch
        self._prefetch_bytes = prefetch_bytes
        self._orphaned = False
        self._losses = 0
        """How often this worker was taken over."""
        self._doubt: Literal["none", "routine", "strong"] = "none"
        self._polled_at = 0.0
        self._solitude = Solitude()

    def wake(self, queue_ids: Iterable[int] | None = None) -> None:
        """Something was fed into these queues (``None``: any). Safe to call for queues that are not ours."""
        if queue_ids is None:
            for queue in self._queues.values():
                queue.announce()
            self._holdings.news.set()
            return
        for queue_id in queue_ids:
            if queue_id in self._queues:
                self._queues[queue_id].feed()
                self._holdings.news.set()

    def orphan(self) -> None:
        """Other workers took this one over: forget everything and register anew. What still runs has no effect."""
        log.error(
            "this worker lost its lease; its events went to other workers",
            extra={"leases": len(self._holdings.leases)},
        )
        for lease in self._holdings.leases:
            self._queues[lease.queue_id].reporter.lost(size(lease))
        for queue in self._queues.values():
            queue.forget()
        self._orphaned = True
        self._losses += 1
        self._holdings.drop()

    def doubt(self) -> None:
        """Compare what we hold with the database at the next look, as a routine."""
        if self._doubt == "none":
            self._doubt = "routine"

    async def run(self) -> None:
        """Claim until the holdings close."""
        while not self._holdings.closing:
            try:
                if self._orphaned:
                    await self._engine.register()
                    self._orphaned = False
                pause = await self._look()
            except LeaseLost:
                self.orphan()
                continue
            except BusPaused:
                pause = _PAUSED_POLL
            except Unavailable:
                self._doubt = "strong"
                for queue in self._queues.values():
                    queue.forget_completions()
                await self._engine.recover()
                continue
            if pause > 0:
                await self._wait(pause)

    async def _look(self) -> float:
        """One look at everything that may have work; returns the seconds to wait for news."""
        if self._doubt != "none":
            await self._reconcile()
        now = time.monotonic()
        if now - self._polled_at >= self.poll_interval:
            self._polled_at = now
            self.wake()
        self._holdings.news.clear()
        await self._heed_pauses()
        if self._solitude.not_before <= now and any(queue.crashed_at <= now for queue in self._queues.values()):
            return await self._fetch_alone()
        rooms = {
            queue_id: min(room, self._batch)
            for queue_id, queue in self._queues.items()
            if (room := queue.room(now)) > 0
        }
        if self._budget() <= 0:
            return self.poll_interval
        due = {queue_id: room for queue_id, room in rooms.items() if self._queues[queue_id].retriable(now)}
        if due:
            await self._fetch_due(due)
        fresh = {
            queue_id: left
            for queue_id, room in rooms.items()
            if (queue := self._queues[queue_id]).claimable(now) and (left := queue.left(room, now)) > 0
        }
        if fresh and self._budget() > 0 and not self._holdings.closing:
            await self._fetch_fresh(fresh)
        return self._until_next(time.monotonic())

    async def _heed_pauses(self) -> None:
        """Ask of queues that have enough here whether they are paused: what has not started must not start then."""
        unsure = {queue_id: 0 for queue_id, queue in self._queues.items() if queue.unsure and queue.waiting}
        if unsure:
            await self._ask(unsure, self._engine.claim(unsure, 0))

    async def _reconcile(self) -> None:
        released = await self._engine.release_unknown(self._holdings.leases, thorough=self._doubt == "strong")
        self._doubt = "none"
        if released:
            log.warning("gave back %d deliveries of a claim whose reply was lost", released)
            self.wake()

    def _budget(self) -> int:
        """How many more bytes of payload may be held."""
        return self._prefetch_bytes - self._holdings.bytes

    async def _fetch_fresh(self, rooms: Mapping[int, int]) -> None:
        for queue_id in rooms:
            self._queues[queue_id].dry = True  # news that arrive while we ask undo it
            self._queues[queue_id].held_until = NEVER
        try:
            claimed = await self._ask(rooms, self._engine.claim(rooms, self._budget()))
        except BaseException:
            for queue_id in rooms:
                self._queues[queue_id].dry = False
            raise
        for queue_id in claimed.more:
            self._queues[queue_id].dry = False
        for queue_id in claimed.held:
            self._queues[queue_id].held_until = time.monotonic() + _HELD_PAUSE
        for queue_id, deliveries in claimed.deliveries.items():
            self._take(queue_id, deliveries)
        if claimed.busy and not claimed.deliveries:
            await asyncio.sleep(_BUSY_PAUSE)
        now, probing = time.monotonic(), claimed.probing - claimed.more
        if due := {queue_id: 1 for queue_id in probing if self._queues[queue_id].due_at <= now}:
            await self._fetch_due(due)

    async def _fetch_due(self, rooms: Mapping[int, int], *, alone: bool = False) -> int:
        for queue_id in rooms:
            self._queues[queue_id].due_at = NEVER  # what is announced while we ask makes it earlier
        budget = self._prefetch_bytes if alone else self._budget()
        try:
            claimed = await self._ask(rooms, self._engine.claim_due(rooms, budget, alone=alone))
        except BaseException:
            for queue_id in rooms:
                self._queues[queue_id].due_at = 0.0
            raise
        now = time.monotonic()
        for queue_id, due in claimed.next.items():
            self._queues[queue_id].expect(due, now)
        for queue_id, deliveries in claimed.deliveries.items():
            if alone:  # there may be more of them
                self._queues[queue_id].due_at = 0.0
            self._take(queue_id, deliveries)
        return sum(map(len, claimed.deliveries.values()))

    async def _ask(self, queue_ids: Iterable[int], claim: Awaitable[Answer]) -> Answer:
        self._holdings.asking = True
        losses = self._losses
        for queue_id in queue_ids:
            self._queues[queue_id].unsure = self._queues[queue_id].fed = False  # what is announced meanwhile undoes it
        try:
            claimed = await claim
            if losses != self._losses:  # it went to others while the reply was on its way
                _drop(claimed)
            self._learn(queue_ids, claimed)
            return claimed
        except BaseException:
            for queue_id in queue_ids:
                self._queues[queue_id].unsure = True
            raise
        finally:
            self._holdings.asking = False
            if self._holdings.closing:
                self._holdings.settleable.set()

    def _learn(self, queue_ids: Iterable[int], claimed: Claimed | ClaimedDue) -> None:
        """Which of the queues that were asked for are paused."""
        now = time.monotonic()
        for queue_id in queue_ids:
            queue = self._queues[queue_id]
            if queue_id in claimed.paused:
                if not queue.suspended:
                    queue.reporter.paused(claimed.paused[queue_id].seconds)
                queue.pause(claimed.paused[queue_id], now)
            elif queue_id in claimed.probing:
                queue.await_probe()
            elif queue.suspended:
                queue.resume()

    async def _fetch_alone(self) -> float:
        """Run one delivery that was running when a worker died, with nothing else in this process."""
        holdings, now = self._holdings, time.monotonic()
        if holdings.leases:  # what runs now finishes first; each finished lease is news
            return 0.05 if self._solitude.worth_waiting(now) else 0.0
        self._solitude.reached()
        rooms = {queue_id: 1 for queue_id, queue in self._queues.items() if queue.crashed_at <= now}
        if not await self._fetch_due(rooms, alone=True):
            for queue_id in rooms:
                queue = self._queues[queue_id]
                if queue.crashed_at <= time.monotonic():  # another worker is at it
                    queue.crashed_at = time.monotonic() + _ALONE_PAUSE
            return 0.0
        while holdings.leases and not holdings.closing:
            holdings.settled.clear()
            await holdings.settled.wait()
        return 0.0

    def _take(self, queue_id: int, deliveries: Sequence[Delivery]) -> None:
        if not deliveries or deliveries[0].lease.dropped:
            return
        queue = self._queues[queue_id]
        queue.reporter.claimed(deliveries)
        queue.probe = deliveries[0].lease.token if deliveries[0].lease.probe else queue.probe
        self._holdings.take(deliveries)
        if not self._holdings.closing and queue.admits(deliveries[0], time.monotonic()):
            queue.offer(deliveries)
            return
        for delivery in deliveries:
            for each in chain(delivery):
                self._holdings.finish(each, RELEASED)

    def _until_next(self, now: float) -> float:
        """Seconds until there is something to do without news; 0 when it is already there."""
        earliest = self._polled_at + self.poll_interval
        for queue in self._queues.values():
            if queue.limited_until > now:
                earliest = min(earliest, queue.limited_until)
            elif queue.stands(now):
                earliest = min(earliest, max(queue.on_hold_until, queue.paused_until))
            elif queue.room(now) > 0:
                alone_at = max(queue.crashed_at, self._solitude.not_before)
                earliest = min(earliest, queue.due_at, queue.held_until, alone_at)
                if not queue.dry and self._budget() > 0:
                    return 0.0
        return max(0.0, earliest - now)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._holdings.news.wait()
        except TimeoutError:
            pass


def _drop(claimed: Claimed | ClaimedDue) -> None:
    """None of these is ours any more."""
    for deliveries in claimed.deliveries.values():
        for delivery in deliveries:
            for each in chain(delivery):
                each.lease.dropped = True
