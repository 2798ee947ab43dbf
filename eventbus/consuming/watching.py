"""Keeps of a claim what somebody wants to know when its outcomes are stored: every delivery, or a sample of them.

Before it: deliveries were claimed. After it: ``outcomes``. A delivery that nobody keeps is freed as soon as it is
handled, while its memory is still in the processor's cache: keeping all of a large claim costs more than all that is
done with them afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from eventbus.consuming.holdings import chain
from eventbus.transport import Delivery, Lease

SAMPLE: Final = 20
"""Of a claim that has at least twice as many deliveries, about so many are kept for all that are fast."""


def observe(deliveries: Sequence[Delivery]) -> None:
    """Keep all deliveries of these leases until their outcomes are stored."""
    if lease := _only_lease(deliveries):
        lease.observed = {delivery.seq: delivery for delivery in deliveries}
        return
    for delivery in deliveries:
        for each in chain(delivery):
            each.lease.observed[each.seq] = each


def sample(deliveries: Sequence[Delivery]) -> None:
    """Keep some of them, from which the times of all follow; how many ended how is counted anyway."""
    if lease := _only_lease(deliveries):
        lease.every = max(1, len(deliveries) // SAMPLE)
        lease.sample = deliveries[:: lease.every]
        return
    for delivery in deliveries:
        for each in chain(delivery):
            each.lease.every = 1
            each.lease.sample = (*each.lease.sample, each)


def follow(old: Lease, delivery: Delivery) -> None:
    """A delivery of a lease that is watched has a lease of its own now."""
    if old.observed:
        delivery.lease.observed[delivery.seq] = delivery
    if old.every:
        delivery.lease.every, delivery.lease.sample = 1, (delivery,)


def watched(lease: Lease) -> bool:
    """Whether anybody wants to know what comes of it."""
    return bool(lease.every or lease.observed)


def _only_lease(deliveries: Sequence[Delivery]) -> Lease | None:
    """The lease of a claim that is about exactly these deliveries."""
    lease = deliveries[0].lease
    return lease if lease.claim_id and not lease.ordered and lease is deliveries[-1].lease else None
