"""Claims deliveries of every queue of this process, has them handled, and settles what came of them.

Before it: the relay has numbered deliveries into queues. After it: nothing; the line ends here. Three loops share
one state on one event loop: fetching, settling, and the runners in between. A crash at any point leaves leases that
other workers take over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass

from eventbus.consuming.fetching import Fetcher
from eventbus.consuming.holdings import Holdings
from eventbus.consuming.idempotency import execution_of
from eventbus.consuming.queues import QueueState
from eventbus.consuming.settling import Settler
from eventbus.transport import DONE, PARKED, RELEASED, ConsumerEngine, Delivery, Lease, Verdict

_CANCEL_PATIENCE = 0.5
"""Seconds that cancelled handlers get to clean up."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and times of one consumer; the fields are those of :class:`eventbus.settings.Settings`."""

    batch: int
    prefetch_bytes: int
    settle_interval: float


class Consumer:
    """The consuming half of one worker."""

    def __init__(self, engine: ConsumerEngine, limits: Limits) -> None:
        self.queues: dict[int, QueueState] = {}
        self.handled = 0
        self._holdings = Holdings()
        self._fetcher = Fetcher(
            engine, self.queues, self._holdings, batch=limits.batch, prefetch_bytes=limits.prefetch_bytes
        )
        self._settler = Settler(engine, self.queues, self._holdings, limits.settle_interval)
        self.fetch = self._fetcher.run
        self.settle = self._settler.run
        self.wake = self._fetcher.wake
        self.orphan = self._fetcher.orphan
        self.doubt = self._fetcher.doubt

    def add(self, queue_id: int, queue: QueueState) -> None:
        """Consume this queue too; before ``fetch`` starts."""
        self.queues[queue_id] = queue
        queue.runner.made_room = self._holdings.news.set
        queue.release = lambda probes: self._release(queue, probes=probes)

    def poll_every(self, seconds: float) -> None:
        """The floor of the wake-ups from now on; it depends on whether notifications can be heard."""
        self._fetcher.poll_interval = seconds

    def forget_completions(self) -> None:
        """A connection was lost: the next server may have lost the newest commits."""
        for queue in self.queues.values():
            queue.forget_completions()

    @property
    def leases(self) -> Collection[Lease]:
        """What this worker holds. A copy of it may be taken in any thread."""
        return self._holdings.leases

    @property
    def quiet(self) -> bool:
        """Nothing is held, and every queue was found empty, retries that wait included."""
        return not self._holdings.leases and all(queue.quiet for queue in self.queues.values())

    @property
    def halted(self) -> Collection[str]:
        """Queues whose work waits for somebody to resume them, if nothing else is left to do."""
        queues = self.queues.values()
        if self._holdings.leases or not all(queue.quiet or queue.halted for queue in queues):
            return ()
        return [queue.name for queue in queues if queue.halted]

    def finish(self, delivery: Delivery, verdict: Verdict, queue: QueueState) -> None:
        """A handler ended; called by the runners on the event loop."""
        queue.pace.finished()
        queue.finished += 1
        self.handled += 1
        if verdict is not DONE:
            verdict = queue.reporter.judged(delivery, verdict)
        if delivery.lease.ordered:
            self._advance(delivery, verdict, queue)
        if queue.completions is not None and verdict.outcome == "done" and delivery.event is not None:
            delivery.lease.executed.append(execution_of(delivery.event))
        self._holdings.finish(delivery, verdict)
        if queue.hungry:
            self._holdings.news.set()
        if (queue.suspended or queue.on_hold_until) and queue.waiting and queue.stands(time.monotonic()):
            self._release(queue, probes=False)  # what a batch has left to run again one by one

    def _advance(self, delivery: Delivery, verdict: Verdict, queue: QueueState) -> None:
        """Let the next event of the key start, or park all that follow."""
        delivery.lease.offered.pop(delivery.seq, None)
        following = delivery.following
        if following is None or delivery.lease.dropped:
            return
        passed = verdict.outcome == "done" or (verdict.outcome == "dead" and queue.skips)
        stopped = self._holdings.closing or queue.stands(time.monotonic())
        if passed and not stopped and not following.lease.dropped:
            delivery.following = None
            queue.follow(following)
            return
        for each in queue.cut(delivery):
            self._holdings.finish(each, PARKED)

    async def drain(self, seconds: float) -> None:
        """Claim nothing more, let running handlers finish for that long, give back the rest."""
        holdings = self._holdings
        holdings.closing = True
        holdings.news.set()
        holdings.settled.set()
        for queue in self.queues.values():
            self._release(queue, probes=True)
        holdings.settleable.set()  # what has not started is free for others while the rest runs on
        await self._until_quiet(seconds)
        for queue in self.queues.values():
            self._release(queue, probes=True)
            queue.runner.abort()
        await self._until_quiet(_CANCEL_PATIENCE)
        holdings.abandon()

    def _release(self, queue: QueueState, *, probes: bool) -> bool:
        """Give back what has not started, or all of it but probes; whether there was anything."""
        withdrawn = queue.runner.withdraw()
        kept = [delivery for delivery in withdrawn if delivery.lease.probe and not probes]
        for delivery in withdrawn:
            if delivery in kept:
                continue
            delivery.lease.offered.pop(delivery.seq, None)
            for each in (delivery, *queue.cut(delivery)):
                self._holdings.finish(each, RELEASED)
        queue.runner.offer(kept)
        self._holdings.news.set()
        return len(kept) < len(withdrawn)

    async def _until_quiet(self, seconds: float) -> None:
        """Wait until no handler runs, that long at most."""
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:  # noqa: ASYNC110 - threads end without telling
            await asyncio.sleep(0.01)

    def _running(self) -> int:
        return sum(queue.runner.running for queue in self.queues.values())
