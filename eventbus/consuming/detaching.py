"""Settles an ordered claim before all of it is done, so that the other keys of its lane go on.

Before it: a claim is open for longer than a moment, because a handler is slow. After it: what runs is held event by
event, what has not started is back in the engine, and the lane can be claimed from again.
"""

from __future__ import annotations

from collections.abc import Sequence

from eventbus.consuming.holdings import Holdings
from eventbus.consuming.idempotency import execution_of
from eventbus.consuming.outcomes import Part, part_of
from eventbus.consuming.queues import QueueState
from eventbus.consuming.watching import follow
from eventbus.transport import DONE, ConsumerEngine, Delivery, Lease


class Detachment:
    """One claim that is taken apart. After a failure it must be written again by the same object."""

    def __init__(self, lease: Lease, queue: QueueState, holdings: Holdings) -> None:
        self._lease = lease
        self._queue = queue
        self._holdings = holdings
        self._running: dict[int, Delivery] | None = None
        self.stored: Sequence[Part] = ()
        """What came of those deliveries that were not running, and of those that had committed by themselves."""

    async def write(self, engine: ConsumerEngine) -> bool:
        """Tell the engine; false when the lease was lost. After what the engine raises it may have happened or not."""
        lease, running = self._lease, self._begin()
        done, verdicts, part = list(lease.done), list(lease.verdicts), part_of(lease)
        numbers = await engine.detach(lease, list(running))
        lease.unfinished -= 1
        if numbers is None:
            self._holdings.forget(lease)
            return False
        outcomes = dict(verdicts + lease.verdicts) | dict.fromkeys(done + lease.done, DONE)
        moved = [self._move(delivery, numbers.get(seq, 0)) for seq, delivery in running.items()]
        if part is not None:
            self.stored = [part.without({delivery.seq for delivery in moved if not delivery.lease.dropped})]
        self._holdings.exchange(lease, (delivery.lease for delivery in moved if not delivery.lease.dropped))
        for delivery in moved:
            if delivery.seq in outcomes:
                self._holdings.finish(delivery, outcomes[delivery.seq])
        return True

    def _begin(self) -> dict[int, Delivery]:
        """What runs when this is told for the first time."""
        if self._running is None:
            self._withdraw()
            self._running = dict(self._lease.offered)
            self._lease.unfinished += 1  # what ends before this is known must not make it look finished
        return self._running

    def _withdraw(self) -> None:
        """Take back what has not started; what follows what runs does not start here either."""
        others = []
        for delivery in self._queue.runner.withdraw():
            if delivery.lease is self._lease:
                self._lease.offered.pop(delivery.seq, None)
                self._queue.cut(delivery)
            else:
                others.append(delivery)
        self._queue.runner.offer(others)
        for delivery in self._lease.offered.values():
            self._queue.cut(delivery)

    def _move(self, delivery: Delivery, exception_id: int) -> Delivery:
        old = self._lease
        delivery.lease = Lease(
            old.queue_id, old.token, old.opened_at, exception_id=exception_id, ordered=True, unfinished=1,
            probe=old.probe, dropped=exception_id == 0 or old.dropped,
        )  # fmt: skip
        follow(old, delivery)
        if exception_id and delivery.event is not None:
            execution = execution_of(delivery.event)
            if execution in old.executed:  # it ended meanwhile and is not settled yet
                old.executed.remove(execution)
                delivery.lease.executed.append(execution)
        return delivery
