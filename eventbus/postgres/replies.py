"""What the engine's ``claim`` and ``claim_due`` have answered, row by row, as the values of the seam.

Before it: the rows; the migration ``0006_claim`` says what they mean. After it: the consumer runs the deliveries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from eventbus.event import Event
from eventbus.postgres.chains import Chains
from eventbus.postgres.link import Row
from eventbus.transport import Claimed, ClaimedDue, Delivery, Due, Lease, Pause


def read_claims(rows: Iterable[Row], token: UUID, names: Mapping[int, str], now: float) -> Claimed:
    """The reply of ``claim``; ``names``: the queues' by number; ``now`` in monotonic seconds."""
    deliveries: dict[int, list[Delivery]] = {}
    more, busy, held = set[int](), set[int](), set[int]()
    pauses = Pauses()
    lease = Lease(0, token, now)
    mine, name = list[Delivery](), ""
    chains: Chains | None = None
    for (
        claim_id, queue_id, _, seq, size, event_id, topic, key, payload, headers, published_at, replay_id, ordered,
        twin,
    ) in rows:  # fmt: skip
        if claim_id is None:
            if topic is not None:
                pauses.add(queue_id, topic, None if size is None else size / 1000, waiting=seq > 0)
            else:
                (busy if seq is None else more if seq else held).add(queue_id)
            continue
        if claim_id != lease.claim_id:
            lease = Lease(queue_id, token, now, claim_id=claim_id, lo=seq, started=seq - 1, ordered=ordered)
            mine, name = deliveries.setdefault(queue_id, []), names[queue_id]
            chains = Chains() if ordered else None
        event = None
        if event_id is not None:
            event = Event(
                event_id=event_id, topic=topic, payload=payload, headers=headers, key=key,
                published_at=published_at, queue=name, replay_id=replay_id,
            )  # fmt: skip
            lease.size += size
        lease.hi = seq
        lease.unfinished += 1
        delivery = Delivery(event, lease, seq, twin)
        if chains is None or chains.begins(key, delivery):
            mine.append(delivery)
    pauses.mark(deliveries)
    return Claimed(
        deliveries, frozenset(more | busy), frozenset(busy), frozenset(held - more - busy), pauses.paused,
        frozenset(pauses.probing),
    )  # fmt: skip


def read_due(rows: Iterable[Row], token: UUID, names: Mapping[int, str], now: float) -> ClaimedDue:
    """The reply of ``claim_due``."""
    deliveries: dict[int, list[Delivery]] = {}
    upcoming: dict[int, Due] = {}
    pauses = Pauses()
    chains = Chains()
    for row in rows:
        exception_id, queue_id, due_in, crashed_in, attempts, crashes, _, size, event_id, topic, *rest = row
        if exception_id is None:
            if topic is not None:
                pauses.add(queue_id, topic, due_in, waiting=size != 0)
            if topic not in ("paused", "probe"):
                upcoming[queue_id] = Due(due_in, crashed_in)
            continue
        key, payload, headers, published_at, replay_id, redriven, ordered, twin = rest
        lease = Lease(
            queue_id, token, now, exception_id=exception_id, crashes=crashes, ordered=ordered, size=size or 0,
            unfinished=1,
        )  # fmt: skip
        event = None
        if event_id is not None:
            event = Event(
                event_id=event_id, topic=topic, payload=payload, headers=headers, key=key,
                published_at=published_at, queue=names[queue_id], attempt=attempts + 1, replay_id=replay_id,
                redriven=redriven,
            )  # fmt: skip
        delivery = Delivery(event, lease, 0, twin)
        if not ordered or chains.begins((queue_id, key), delivery):
            deliveries.setdefault(queue_id, []).append(delivery)
    pauses.mark(deliveries)
    return ClaimedDue(deliveries, upcoming, pauses.paused, frozenset(pauses.probing))


class Pauses:
    """What one reply says of pauses."""

    def __init__(self) -> None:
        self.paused: dict[int, Pause] = {}
        self.probing: set[int] = set()
        self._probes: set[int] = set()

    def add(self, queue_id: int, state: str, seconds: float | None, *, waiting: bool) -> None:
        """One row of a queue that is paused."""
        if state == "probing":
            self.probing.add(queue_id)
            return
        self.paused[queue_id] = Pause(seconds, waiting)
        if state == "probe":
            self._probes.add(queue_id)

    def mark(self, deliveries: Mapping[int, Sequence[Delivery]]) -> None:
        """Tell the leases of probes that they are."""
        for queue_id in self._probes:
            for delivery in deliveries[queue_id]:
                delivery.lease.probe = True
