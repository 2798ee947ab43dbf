"""What one worker holds: leases, the bytes of their payloads, and which of them are finished."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Final

from eventbus.transport import DONE, RELEASED, Delivery, Lease, Verdict

log = logging.getLogger("eventbus")

SLOW: Final = 0.001
"""Seconds. Where a sample of the calls is kept, each that took longer is too, which costs little of what it took."""


class Holdings:
    """The state that fetching, running and settling share; used on one event loop."""

    def __init__(self) -> None:
        self.leases: set[Lease] = set()
        self.finished: list[Lease] = []
        """Leases whose deliveries all have a verdict and that are to be settled."""
        self.bytes = 0
        self.closing = False
        """Nothing more is claimed; what still arrives is given back."""
        self.asking = False
        """A claim is under way; what it brings must be settled too."""
        self.news = asyncio.Event()
        """There may be something to claim."""
        self.settleable = asyncio.Event()
        self.settled = asyncio.Event()

    def take(self, deliveries: Iterable[Delivery]) -> None:
        """Remember the leases of these deliveries, and of those that follow them."""
        leases = {delivery.lease for delivery in deliveries}
        for delivery in deliveries:
            if delivery.following is not None and delivery.lease.exception_id:
                leases.update(each.lease for each in chain(delivery))
        self._add(leases)

    def finish(self, delivery: Delivery, verdict: Verdict) -> None:
        """One delivery has a verdict; the last one of a lease makes it settleable."""
        lease = delivery.lease
        if lease.dropped:
            return
        if verdict is DONE:
            lease.done.append(delivery.seq)
            if delivery.spent > SLOW and lease.every > 1:
                lease.kept.append(delivery)
        else:
            _note(delivery, verdict)
        lease.unfinished -= 1
        if lease.unfinished == 0:
            self.finished.append(lease)
            self.settleable.set()

    def exchange(self, old: Lease, new: Iterable[Lease]) -> None:
        """A lease was settled, and what still runs of it is held under others."""
        self.forget(old)
        self._add(new)

    def _add(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self.leases.add(lease)
            self.bytes += lease.size

    def forget(self, lease: Lease) -> None:
        """The lease is settled or lost."""
        if lease in self.leases:
            self.leases.discard(lease)
            self.bytes -= lease.size

    def drop(self) -> None:
        """All leases are lost: what their handlers return from now on is discarded."""
        for lease in self.leases:
            lease.dropped = True
        self.leases.clear()
        self.finished.clear()
        self.bytes = 0
        self.news.set()
        self.settled.set()

    def abandon(self) -> None:
        """Give back what handlers hold that cannot be stopped: threads, swallowed cancellations."""
        for lease in self.leases:
            if lease.unfinished:
                known = {*lease.recorded, *lease.done, *(seq for seq, _ in lease.verdicts)}
                log.warning("a handler did not stop in time; its event is released", extra={"lease": repr(lease)})
                lease.unfinished = 0
                lease.verdicts.extend((seq, RELEASED) for seq in _seqs(lease) if seq not in known)
                self.finished.append(lease)
        self.settleable.set()


def _note(delivery: Delivery, verdict: Verdict) -> None:
    """Write down a verdict that is not simply done."""
    lease = delivery.lease
    if verdict.outcome == "done":
        lease.done.append(delivery.seq)
        lease.kinds[delivery.seq] = verdict
    else:
        lease.verdicts.append((delivery.seq, verdict))
    if lease.every > 1:
        lease.kept.append(delivery)


def chain(delivery: Delivery) -> Iterator[Delivery]:
    """A delivery and those that follow it in its key."""
    following: Delivery | None = delivery
    while following is not None:
        yield following
        following = following.following


def _seqs(lease: Lease) -> Iterable[int]:
    return (lease.lo,) if lease.exception_id else range(lease.lo, lease.hi + 1)
