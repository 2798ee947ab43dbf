"""A storage engine for tests of the consumer: it does what the test says, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID, uuid4

from eventbus.event import Event
from eventbus.transport import Claimed, ClaimedDue, Delivery, Due, Lease, Pause, Twin, Verdict

NEVER = float("inf")


@dataclass
class Waiting:
    """An exception: due at a time of the event loop's clock."""

    payload: str
    due_at: float = 0.0
    attempts: int = 0
    crashes: int = 0


class ScriptedEngine:
    """Implements ``ConsumerEngine`` over lists.

    ``fresh[queue]`` and ``exceptions[queue]`` are what can be claimed. ``failures[call]`` are raised by the next calls.
    ``hold(call)`` makes calls wait until the returned event is set. In the queues of ``ordered``, the key of an event
    is the first letter of its payload.
    """

    def __init__(self) -> None:
        self.fresh: dict[int, deque[str]] = defaultdict(deque)
        self.exceptions: dict[int, list[Waiting]] = defaultdict(list)
        self.failures: dict[str, deque[BaseException]] = defaultdict(deque)
        self.lost: list[Lease] = []
        """What ``settle`` is going to call lost."""
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self.settled: list[tuple[str, str]] = []
        """Payload and outcome of every delivery that was settled or recorded, in order."""
        self.rooms: list[Mapping[int, int]] = []
        self.budgets: list[int] = []
        self.batches: list[int] = []
        """How many leases each settle call had."""
        self.busy: deque[bool] = deque()
        self.known: list[set[Lease]] = []
        self.ordered: set[int] = set()
        self.held: deque[bool] = deque()
        """Whether the next claims find that all of it waits for the claims of others."""
        self.twins: dict[str, Twin] = {}
        """The twin of a delivery by its payload."""
        self.pauses: dict[int, float] = {}
        """Until when queues are paused, by the event loop's clock."""
        self.probes: dict[int, float] = {}
        """Of those, the ones that end by a probe: for how long it keeps others waiting."""
        self.events: dict[str, UUID] = {}
        """The event id of a delivery by its payload; others get one of their own."""
        self.detached: list[set[str]] = []
        """What still ran at each detachment, by payload."""
        self.lost_replies: dict[str, deque[BaseException]] = defaultdict(deque)
        """What the next calls of ``detach`` raise after they have had their effect."""
        self.returned: list[str] = []
        """What a detachment gave back as never started."""
        self._payloads: dict[tuple[int, int], str] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._held: dict[Lease, dict[int, int]] = {}
        self._numbers = iter(range(1, 1_000_000))

    def hold(self, call: str) -> asyncio.Event:
        """Let these calls wait."""
        self._gates[call] = asyncio.Event()
        return self._gates[call]

    def hold_reply(self, call: str) -> asyncio.Event:
        """Let the answers of these calls wait, after they have had their effect; ``claim`` only."""
        return self.hold(f"{call} reply")

    async def called(self, call: str, times: int = 1) -> None:
        """Wait until this was called so often."""
        await self.until(lambda: self.calls[call] >= times)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"never came true; the calls were {self.order[-20:]}"
            await asyncio.sleep(0.001)

    async def register(self) -> None:
        await self._enter("register")

    async def unregister(self) -> None:
        await self._enter("unregister")

    async def claim(self, rooms: Mapping[int, int], max_bytes: int) -> Claimed:
        self.rooms.append(dict(rooms))
        self.budgets.append(max_bytes)
        await self._enter("claim")
        if self.busy and self.busy.popleft():
            return Claimed({}, frozenset(rooms), frozenset(rooms))
        if self.held and self.held.popleft():
            return Claimed({}, held=frozenset(rooms))
        probing = self._probing(rooms)
        probed = {queue_id for queue_id in probing if self.fresh[queue_id] and rooms[queue_id]}
        claimed = {
            queue_id: self._claim(queue_id, 1 if queue_id in probing else room)
            for queue_id, room in rooms.items()
            if self.fresh[queue_id] and room and (queue_id not in self.pauses or queue_id in probing)
        }
        paused = self._told_of_pauses(rooms, claimed, probed)
        more = frozenset(queue_id for queue_id, room in rooms.items() if self.fresh[queue_id] and room)
        if "claim reply" in self._gates:
            await self._gates["claim reply"].wait()
        return Claimed(claimed, more - paused.keys(), paused=paused, probing=frozenset(probing - probed))

    def _probing(self, rooms: Mapping[int, int]) -> set[int]:
        """Of these queues, those that give out a probe."""
        now = asyncio.get_running_loop().time()
        return {queue_id for queue_id in rooms if queue_id in self.probes and self.pauses.get(queue_id, now) <= now}

    def _told_of_pauses(
        self, rooms: Mapping[int, int], claimed: Mapping[int, Sequence[Delivery]], probed: set[int]
    ) -> dict[int, Pause]:
        """Marks the probes that were claimed, and pauses their queues for so long."""
        now = asyncio.get_running_loop().time()
        for queue_id in probed:
            claimed[queue_id][0].lease.probe = True
            self.pauses[queue_id] = now + self.probes[queue_id]
        return {
            queue_id: Pause(
                None if self.pauses[queue_id] == NEVER else self.pauses[queue_id] - now, self._waits(queue_id)
            )
            for queue_id in rooms
            if self.pauses.get(queue_id, 0.0) > now
        }

    def _waits(self, queue_id: int) -> bool:
        return bool(self.fresh[queue_id] or self.exceptions[queue_id])

    def _claim(self, queue_id: int, room: int) -> list[Delivery]:
        number = next(self._numbers)
        now, ordered = asyncio.get_running_loop().time(), queue_id in self.ordered
        lease = Lease(queue_id, uuid4(), now, claim_id=number, lo=1, started=0, ordered=ordered)
        deliveries: list[Delivery] = []
        while self.fresh[queue_id] and len(deliveries) < room:
            payload = self.fresh[queue_id].popleft()
            lease.hi = len(deliveries) + 1
            lease.size += len(payload)
            self._payloads[number, lease.hi] = payload
            deliveries.append(self._delivery(payload, 1, lease, lease.hi))
        lease.unfinished = len(deliveries)
        return _chained(deliveries)

    def _delivery(self, payload: str, attempt: int, lease: Lease, seq: int) -> Delivery:
        event = Event(
            event_id=str(self.events.get(payload) or uuid4()), topic="a", payload=f'"{payload}"', headers=None,
            key=payload[0] if lease.ordered else None, published_at=datetime.now(UTC), queue="tests", attempt=attempt,
        )  # fmt: skip
        return Delivery(event, lease, seq, self.twins.get(payload))

    async def claim_due(self, rooms: Mapping[int, int], max_bytes: int, *, alone: bool) -> ClaimedDue:
        await self._enter("claim_alone" if alone else "claim_due")
        now = asyncio.get_running_loop().time()
        deliveries: dict[int, list[Delivery]] = {}
        probing = self._probing(rooms)
        for queue_id, most in rooms.items():
            if queue_id in self.pauses and queue_id not in probing:
                continue
            room = 1 if queue_id in probing else most
            wanted = [one for one in self.exceptions[queue_id] if one.due_at <= now and bool(one.crashes) == alone]
            for one in wanted[:room]:
                self.exceptions[queue_id].remove(one)
                deliveries.setdefault(queue_id, []).append(self._claim_exception(queue_id, one))
        chained = {queue_id: _chained(of_queue) for queue_id, of_queue in deliveries.items()}
        paused = self._told_of_pauses(rooms, chained, probing & chained.keys())
        upcoming = {queue_id: self._next(queue_id, now) for queue_id in rooms if queue_id not in paused}
        return ClaimedDue(chained, upcoming, paused, frozenset(probing - chained.keys()))

    def _claim_exception(self, queue_id: int, one: Waiting) -> Delivery:
        number = next(self._numbers)
        now, ordered = asyncio.get_running_loop().time(), queue_id in self.ordered
        lease = Lease(
            queue_id, uuid4(), now, exception_id=number, crashes=one.crashes, unfinished=1, ordered=ordered
        )  # fmt: skip
        self._payloads[number, 0] = one.payload
        return self._delivery(one.payload, one.attempts + 1, lease, 0)

    def _next(self, queue_id: int, now: float) -> Due:
        plain = [one.due_at - now for one in self.exceptions[queue_id] if not one.crashes]
        crashed = [one.due_at - now for one in self.exceptions[queue_id] if one.crashes]
        return Due(min(plain, default=None), min(crashed, default=None))

    async def settle(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        self.batches.append(len(leases))
        await self._enter("settle")
        lost = [lease for lease in leases if lease in self.lost]
        for lease in leases:
            if lease not in lost:
                self._record(lease)
        return lost

    async def record_progress(self, lease: Lease) -> bool:
        await self._enter("record_progress")
        if lease in self.lost:
            return False
        self._record(lease)
        lease.recorded.update(lease.done, (seq for seq, _ in lease.verdicts))
        lease.done, lease.verdicts = [], []
        return True

    async def detach(self, lease: Lease, seqs: Sequence[int]) -> Mapping[int, int] | None:
        """A second call for the same lease has the same answer, and no other effect."""
        done, verdicts = lease.done, lease.verdicts
        lease.done, lease.verdicts = [], []
        try:
            await self._enter("detach")
            if lease in self.lost:
                return None
            if lease not in self._held:
                self._held[lease] = self._take_apart(lease, seqs, done, verdicts)
            self._reply("detach")
        except BaseException:
            lease.done, lease.verdicts = done + lease.done, verdicts + lease.verdicts
            raise
        return {seq: self._held[lease].get(seq, 0) for seq in seqs}

    def _take_apart(
        self, lease: Lease, seqs: Sequence[int], done: list[int], verdicts: list[tuple[int, Verdict]]
    ) -> dict[int, int]:
        meanwhile = (lease.done, lease.verdicts)
        lease.done, lease.verdicts = done, verdicts
        self._record(lease)
        lease.done, lease.verdicts = meanwhile
        told = {*done, *(seq for seq, _ in verdicts)}
        running = {seq: self._payloads[lease.claim_id, seq] for seq in seqs if seq not in told}
        self.detached.append(set(running.values()))
        rest = [seq for seq in range(lease.lo, lease.hi + 1) if seq not in told and seq not in running]
        self.returned += [self._payloads[lease.claim_id, seq] for seq in rest]
        numbers = {}
        for seq, payload in running.items():
            numbers[seq] = next(self._numbers)
            self._payloads[numbers[seq], seq] = payload
        return numbers

    def _record(self, lease: Lease) -> None:
        number = lease.claim_id or lease.exception_id
        outcomes = [(seq, "done", 0.0) for seq in lease.done]
        outcomes += [(seq, verdict.outcome, verdict.delay) for seq, verdict in lease.verdicts]
        for seq, outcome, delay in sorted(outcomes):
            payload = self._payloads[number, seq]
            self.settled.append((payload, outcome))
            if outcome == "retry":
                due_at = asyncio.get_running_loop().time() + delay
                self.exceptions[lease.queue_id].append(Waiting(payload, due_at, attempts=1))

    async def release_unknown(self, known: Collection[Lease], *, thorough: bool) -> int:
        self.known.append(set(known))
        await self._enter("look at everything" if thorough else "look")
        return 0

    async def pause(
        self, queue_id: int, source: str, reason: str, seconds: float | None, probe_seconds: float | None
    ) -> bool:
        await self._enter("pause")
        self.pauses[queue_id] = NEVER if seconds is None else asyncio.get_running_loop().time() + seconds
        if probe_seconds is not None:
            self.probes[queue_id] = probe_seconds
        return True

    async def resume(self, queue_id: int, source: str) -> bool:
        await self._enter("resume")
        self.probes.pop(queue_id, None)
        return self.pauses.pop(queue_id, None) is not None

    async def free_probe(self, queue_id: int, source: str, token: UUID) -> bool:
        await self._enter("free_probe")
        self.pauses[queue_id] = 0.0
        return True

    async def recover(self) -> None:
        await self._enter("recover")

    async def recover_settling(self) -> None:
        await self._enter("recover_settling")

    def _reply(self, call: str) -> None:
        if self.lost_replies[call]:
            raise self.lost_replies[call].popleft()

    async def _enter(self, call: str) -> None:
        self.calls[call] += 1
        self.order.append(call)
        if call in self._gates:
            await self._gates[call].wait()
        await asyncio.sleep(0)
        if self.failures[call]:
            raise self.failures[call].popleft()


def _chained(deliveries: list[Delivery]) -> list[Delivery]:
    """The first of each key, each with those that follow it."""
    firsts: list[Delivery] = []
    last: dict[str, Delivery] = {}
    for delivery in deliveries:
        assert delivery.event is not None
        key = delivery.event.key
        if key is None or key not in last:
            firsts.append(delivery)
        else:
            last[key].following = delivery
        if key is not None:
            last[key] = delivery
    return firsts
