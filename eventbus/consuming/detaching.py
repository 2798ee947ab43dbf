"""Settles an ordered claim before all of it is done, so that the other keys of its lane go on.

Before it: a claim is open for longer than a moment, because a handler is slow. After it: what runs is held event by
event, what has not started is back in the engine, and the lane can be claimed from again.
"""

from __future__ import annotations

from eventbus.consuming.holdings import Holdings
from eventbus.consuming.idempotency import execution_of
from eventbus.consuming.queues import QueueState
from eventbus.transport import DONE, ConsumerEngine, Delivery, Lease


class Detachment:
    """One claim that is taken apart. To make it again after a failure that says nothing of the outcome is safe."""

    def __init__(self, lease: Lease, queue: QueueState, holdings: Holdings) -> None:
        self._lease = lease
        self._queue = queue
        self._holdings = holdings

    async def write(self, engine: ConsumerEngine) -> bool:
        """Tell the engine; false when the lease was lost. Raises what the engine raises, then nothing has changed."""
        lease = self._lease
        self._withdraw()
        running = dict(lease.offered)
        executed, lease.executed = lease.executed, []
        lease.unfinished += 1  # what ends meanwhile must not make it look finished
        try:
            numbers = await engine.detach(lease, list(running))
        except BaseException:
            lease.executed += executed
            raise
        finally:
            lease.unfinished -= 1
        late, lease.executed = lease.executed, executed  # what ended meanwhile is not settled yet
        if numbers is None:
            self._holdings.forget(lease)
            return False
        verdicts = dict(lease.verdicts)
        moved = [self._move(delivery, numbers.get(seq, 0)) for seq, delivery in running.items()]
        for delivery in moved:
            if delivery.event is not None and (execution := execution_of(delivery.event)) in late:
                delivery.lease.executed.append(execution)
        self._holdings.exchange(lease, (delivery.lease for delivery in moved if not delivery.lease.dropped))
        for delivery in moved:
            if delivery.seq in lease.done:
                self._holdings.finish(delivery, DONE)
            elif (verdict := verdicts.get(delivery.seq)) is not None:
                self._holdings.finish(delivery, verdict)
        return True

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
            dropped=exception_id == 0 or old.dropped,
        )  # fmt: skip
        return delivery
