"""Claims deliveries of every queue of this process, has them handled, and settles what came of them.

Before it: the relay has numbered deliveries into queues. After it: nothing; the line ends here. Three loops share
one state on one event loop: fetching (claims), settling (whole leases as they finish, partial ones when they last),
and the runners in between. A crash at any point leaves leases that other workers take over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from eventbus.consuming.pace import Pace
from eventbus.consuming.runners import Runner
from eventbus.errors import BusPaused, Unavailable
from eventbus.transport import RELEASED, ConsumerEngine, Delivery, Due, Lease, LeaseLost, Verdict

log = logging.getLogger("eventbus")

_BUSY_PAUSE = 0.003
"""Seconds after which a queue is tried again that another worker was claiming from."""
_PROGRESS_AFTER = 1.0
"""Seconds after which a claim that is still open has its finished deliveries recorded."""
_PAUSED_POLL = 2.0
_CANCEL_PATIENCE = 0.5
"""Seconds that cancelled handlers get to clean up."""
_NEVER = float("inf")

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and times of one consumer; the fields are those of :class:`eventbus.settings.Settings`."""

    batch: int
    prefetch_bytes: int
    settle_interval: float


@dataclass(slots=True, eq=False)
class QueueState:
    """One queue in this process."""

    name: str
    runner: Runner
    pace: Pace
    dry: bool = False
    """The last claim found less than it asked for, and nothing was announced since."""
    due_at: float = 0.0
    """Monotonic time at which to look for exceptions; at first, at once."""
    crashed_at: float = _NEVER
    """Monotonic time at which one that must run alone is due."""


class Consumer:
    """The consuming half of one worker. ``poll_interval`` is asked anew for each wait: it depends on LISTEN."""

    def __init__(self, engine: ConsumerEngine, limits: Limits) -> None:
        self.queues: dict[int, QueueState] = {}
        self.leases: set[Lease] = set()
        self.handled = 0
        self.poll_interval = 0.5
        self._engine = engine
        self._limits = limits
        self._bytes = 0
        self._finished: list[Lease] = []
        self._news = asyncio.Event()
        self._settleable = asyncio.Event()
        self._settled = asyncio.Event()
        self._stopping = False
        self._asking = False
        """A claim is under way; what it brings must be settled too."""
        self._orphaned = False
        self._doubt: Literal["none", "routine", "strong"] = "none"
        self._polled_at = 0.0

    def add(self, queue_id: int, queue: QueueState) -> None:
        """Consume this queue too; before ``fetch`` starts."""
        self.queues[queue_id] = queue

    # What the world tells us

    def wake(self, queue_ids: Iterable[int] | None = None) -> None:
        """Something was fed into these queues (``None``: any). Safe to call for queues that are not ours."""
        if queue_ids is None:
            for queue in self.queues.values():
                queue.dry = False
                queue.due_at = 0.0
            self._news.set()
            return
        for queue_id in queue_ids:
            if queue_id in self.queues:
                self.queues[queue_id].dry = False
                self._news.set()

    def orphan(self) -> None:
        """Other workers took this one over: forget everything and register anew. What still runs has no effect."""
        self._forget_all()
        self._orphaned = True

    def _forget_all(self) -> None:
        log.error("this worker lost its lease; its events went to other workers", extra={"leases": len(self.leases)})
        for lease in self.leases:
            lease.dropped = True
        for queue in self.queues.values():
            queue.runner.withdraw()
            queue.due_at, queue.crashed_at, queue.dry = 0.0, _NEVER, False
        self.leases.clear()
        self._finished.clear()
        self._bytes = 0
        self._news.set()
        self._settled.set()

    @property
    def quiet(self) -> bool:
        """Nothing is held, and every queue was found empty, retries that wait included."""
        return not self.leases and all(
            queue.dry and queue.due_at == queue.crashed_at == _NEVER for queue in self.queues.values()
        )

    # Fetching

    async def fetch(self) -> None:
        """Claim until ``drain``."""
        while not self._stopping:
            try:
                if self._orphaned:
                    await self._engine.register()
                    self._orphaned = False
                pause = await self._fetch_once()
            except LeaseLost:
                self.orphan()
                continue
            except BusPaused:
                pause = _PAUSED_POLL
            except Unavailable:
                self._doubt = "strong"
                await self._engine.recover()
                continue
            if pause > 0:
                await self._wait(pause)

    async def _fetch_once(self) -> float:
        """One look at everything that may have work; returns the seconds to wait for news."""
        if self._doubt != "none":
            released = await self._engine.release_unknown(self.leases, thorough=self._doubt == "strong")
            self._doubt = "none"
            if released:
                log.warning("gave back %d deliveries of a claim whose reply was lost", released)
                self.wake()
        now = time.monotonic()
        if now - self._polled_at >= self.poll_interval:
            self._polled_at = now
            self.wake()
        self._news.clear()
        if any(queue.crashed_at <= now for queue in self.queues.values()):
            return await self._fetch_alone()
        rooms = {
            queue_id: min(room, self._limits.batch)
            for queue_id, queue in self.queues.items()
            if (room := queue.pace.room(queue.runner.waiting, queue.runner.running, now)) > 0
        }
        budget = self._limits.prefetch_bytes - self._bytes
        if budget <= 0 or self._stopping:
            return self.poll_interval
        due = {queue_id: room for queue_id, room in rooms.items() if self.queues[queue_id].due_at <= now}
        if due:
            await self._fetch_due(due, budget)
            budget = self._limits.prefetch_bytes - self._bytes
        fresh = {queue_id: room for queue_id, room in rooms.items() if not self.queues[queue_id].dry}
        if fresh and budget > 0 and not self._stopping:
            await self._fetch_fresh(fresh, budget)
        return self._until_next(time.monotonic())

    async def _fetch_fresh(self, rooms: Mapping[int, int], budget: int) -> None:
        for queue_id in rooms:
            self.queues[queue_id].dry = True  # news that arrive while we ask undo it
        try:
            claimed = await self._ask(self._engine.claim(rooms, budget))
        except BaseException:
            for queue_id in rooms:
                self.queues[queue_id].dry = False
            raise
        for queue_id in claimed.more:
            self.queues[queue_id].dry = False
        for queue_id, deliveries in claimed.deliveries.items():
            self._take(queue_id, deliveries)
        if claimed.busy and not claimed.deliveries:
            await asyncio.sleep(_BUSY_PAUSE)

    async def _fetch_due(self, rooms: Mapping[int, int], budget: int, *, alone: bool = False) -> int:
        for queue_id in rooms:
            self.queues[queue_id].due_at = _NEVER  # what is announced while we ask makes it earlier
        try:
            claimed = await self._ask(self._engine.claim_due(rooms, budget, alone=alone))
        except BaseException:
            for queue_id in rooms:
                self.queues[queue_id].due_at = 0.0
            raise
        now = time.monotonic()
        for queue_id, due in claimed.next.items():
            self._expect(self.queues[queue_id], due, now)
        for queue_id, deliveries in claimed.deliveries.items():
            if alone:  # there may be more of them
                self.queues[queue_id].due_at = 0.0
            self._take(queue_id, deliveries)
        return sum(map(len, claimed.deliveries.values()))

    async def _ask(self, claim: Awaitable[Answer]) -> Answer:
        self._asking = True
        try:
            return await claim
        finally:
            self._asking = False
            if self._stopping:
                self._settleable.set()

    def _expect(self, queue: QueueState, due: Due, now: float) -> None:
        if due.due_in is not None:
            queue.due_at = min(queue.due_at, now + due.due_in)
        queue.crashed_at = _NEVER if due.crashed_in is None else now + due.crashed_in

    async def _fetch_alone(self) -> float:
        """Run one delivery that was running when a worker died, with nothing else in this process."""
        if self.leases:
            return 0.05  # what runs now finishes first; each finished lease is news
        now = time.monotonic()
        rooms = {queue_id: 1 for queue_id, queue in self.queues.items() if queue.crashed_at <= now}
        if not await self._fetch_due(rooms, self._limits.prefetch_bytes, alone=True):
            for queue_id in rooms:
                queue = self.queues[queue_id]
                if queue.crashed_at <= time.monotonic():  # another worker is at it
                    queue.crashed_at = time.monotonic() + 0.2
            return 0.0
        while self.leases and not self._stopping:
            self._settled.clear()
            await self._settled.wait()
        return 0.0

    def _take(self, queue_id: int, deliveries: Iterable[Delivery]) -> None:
        for lease in {delivery.lease for delivery in deliveries}:
            self.leases.add(lease)
            self._bytes += lease.size
        queue = self.queues[queue_id]
        if self._stopping:
            self._release(queue, deliveries)
        else:
            queue.runner.offer(deliveries)

    def _until_next(self, now: float) -> float:
        """Seconds until there is something to do without news; 0 when it is already there."""
        earliest = self._polled_at + self.poll_interval
        for queue in self.queues.values():
            room = queue.pace.room(queue.runner.waiting, queue.runner.running, now)
            if room > 0:
                earliest = min(earliest, queue.due_at, queue.crashed_at)
                if not queue.dry and self._bytes < self._limits.prefetch_bytes:
                    return 0.0
        return max(0.0, earliest - now)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    # Finishing and settling

    def finish(self, delivery: Delivery, verdict: Verdict, queue: QueueState) -> None:
        """A handler ended; called by the runners on the event loop."""
        queue.pace.finished()
        self.handled += 1
        lease = delivery.lease
        if lease.dropped:
            return
        if verdict.outcome == "done":
            lease.done.append(delivery.seq)
        else:
            lease.verdicts.append((delivery.seq, verdict))
        lease.unfinished -= 1
        if lease.unfinished == 0:
            self._finished.append(lease)
            self._settleable.set()
        if not queue.dry and queue.runner.waiting <= queue.pace.refill:
            self._news.set()

    async def settle(self) -> None:
        """Settle leases as they finish, until ``drain`` and nothing is left or under way."""
        while not self._stopping or self.leases or self._asking:
            try:
                async with asyncio.timeout(_PROGRESS_AFTER):
                    await self._settleable.wait()
                if not self._stopping:
                    await asyncio.sleep(self._limits.settle_interval)
            except TimeoutError:
                pass
            try:
                await self._settle_finished()
                await self._record_progress()
            except Unavailable:
                self._settleable.set()
                await self._engine.recover_settling()

    async def _settle_finished(self) -> None:
        self._settleable.clear()
        while self._finished:
            leases = list(self._finished)
            lost = await self._engine.settle(leases)
            for lease in lost:
                if not lease.dropped:
                    log.warning(
                        "lost a lease while its events ran; they run again elsewhere", extra={"lease": repr(lease)}
                    )
            settled = set(leases)
            self._finished = [lease for lease in self._finished if lease not in settled]
            for lease in leases:
                self._forget(lease)
                self._expect_retries(lease, lease.verdicts)
            self._news.set()
            self._settled.set()

    async def _record_progress(self) -> None:
        now = time.monotonic()
        for lease in list(self.leases):
            news = lease.unfinished and (lease.done or lease.verdicts)
            long_open = self._stopping or now - lease.opened_at > _PROGRESS_AFTER
            verdicts = lease.verdicts
            if news and long_open and not await self._engine.record_progress(lease):
                log.warning("lost a lease while its events ran; they run again elsewhere", extra={"lease": repr(lease)})
                lease.dropped = True
                self._forget(lease)
            elif news and long_open:
                self._expect_retries(lease, verdicts)

    def _expect_retries(self, lease: Lease, verdicts: Iterable[tuple[int, Verdict]]) -> None:
        """The engine has stored these: earlier, a look for them would have been in vain."""
        now = time.monotonic()
        for _, verdict in verdicts:
            if verdict.outcome == "retry":
                queue = self.queues[lease.queue_id]
                queue.due_at = min(queue.due_at, now + verdict.delay)
                self._news.set()

    def _forget(self, lease: Lease) -> None:
        if lease in self.leases:
            self.leases.discard(lease)
            self._bytes -= lease.size

    def doubt(self) -> None:
        """Compare what we hold with the database at the next fetch, as a routine."""
        if self._doubt == "none":
            self._doubt = "routine"

    # Stopping

    async def drain(self, seconds: float) -> None:
        """Claim nothing more, let running handlers finish for that long, give back the rest."""
        self._stopping = True
        self._news.set()
        self._settled.set()
        for queue in self.queues.values():
            self._release(queue, queue.runner.withdraw())
        self._settleable.set()  # what has not started is free for others while the rest runs on
        await self._until_quiet(seconds)
        for queue in self.queues.values():
            self._release(queue, queue.runner.withdraw())
            queue.runner.abort()
        await self._until_quiet(_CANCEL_PATIENCE)
        self._abandon()

    async def _until_quiet(self, seconds: float) -> None:
        """Wait until no handler runs, that long at most."""
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:  # noqa: ASYNC110 - threads end without telling
            await asyncio.sleep(0.01)

    def _running(self) -> int:
        return sum(queue.runner.running for queue in self.queues.values())

    def _release(self, queue: QueueState, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self.finish(delivery, RELEASED, queue)

    def _abandon(self) -> None:
        """Handlers that cannot be stopped (threads, swallowed cancellations) lose their deliveries."""
        for lease in self.leases:
            if lease.unfinished:
                known = {*lease.recorded, *lease.done, *(seq for seq, _ in lease.verdicts)}
                log.warning("a handler did not stop in time; its event is released", extra={"lease": repr(lease)})
                lease.unfinished = 0
                self._finished.append(lease)
                lease.verdicts.extend((seq, RELEASED) for seq in _open_seqs(lease) if seq not in known)
        self._settleable.set()


def _open_seqs(lease: Lease) -> Iterable[int]:
    return (lease.lo,) if lease.exception_id else range(lease.lo, lease.hi + 1)
