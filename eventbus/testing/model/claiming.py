"""Claims: the next range of each lane, to one worker at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from eventbus.testing.model.state import rank_in_turn
from eventbus.testing.model.values import MEBIBYTE, Claim, Delivery, Range, Told
from eventbus.testing.model.workers import Workers


@dataclass(slots=True)
class Answer:
    """What a claim brought; ``more`` and ``told`` by queue. See ``claim`` in the engine."""

    worker: UUID
    token: UUID
    left: int
    ranges: list[Range] = field(default_factory=list)
    more: dict[int, int | None] = field(default_factory=dict)
    told: dict[int, Told] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane that has something; ``share``: how much of the limit it may take, ``most`` being the limit."""

    queue_id: int
    lane: int
    share: int


class Claiming(Workers):
    """Claim ranges."""

    def claim(
        self, worker: UUID, queue_id: int, limit: int = 100, max_bytes: int = 8 * MEBIBYTE, *, now: float
    ) -> Claim | None:
        """Claim the next range of one queue; of one with many lanes, the first that is given."""
        claims, _ = self.claim_any(worker, {queue_id: limit}, max_bytes, now=now)
        return claims[0] if claims else None

    def claim_any(
        self, worker: UUID, limits: Mapping[int, int], max_bytes: int = 8 * MEBIBYTE, turn: int = 0, *, now: float
    ) -> tuple[list[Claim], dict[int, int | None]]:
        """Claim from several queues, in this order; also what is said of queues that have more.

        That is the newest seq, or 0 when the rest waits for an open claim. The database may also say none, when another
        one is claiming at the same moment, and then give less than the model does. Raises :class:`LeaseLost`.
        """
        answer = self.claim_and_hear(worker, limits, max_bytes, turn, now=now)
        claims = [self._shown(claim) for claim in answer.ranges]
        return sorted(claims, key=lambda claim: self._late(claim.queue_id, claim)), answer.more

    def claim_and_hear(
        self, worker: UUID, limits: Mapping[int, int], max_bytes: int = 8 * MEBIBYTE, turn: int = 0, *, now: float
    ) -> Answer:
        """The same with what is told of pauses."""
        answer = Answer(worker, self.token("token"), max_bytes)
        rooms = dict(limits)
        for queue_id in limits:
            match told := self.heed_pauses(queue_id, now):
                case Told("paused"):
                    answer.told[queue_id] = told
                    answer.more[queue_id] = int(self.is_waiting(queue_id))
                    rooms[queue_id] = 0
                case Told("probe"):
                    answer.told[queue_id] = Told("probing")
                    rooms[queue_id] = min(rooms[queue_id], 1)
                case _:
                    pass
        lanes = [lane for queue_id in limits if rooms[queue_id] > 0 for lane in self._lanes(queue_id, rooms, turn)]
        for place, lane in enumerate(lanes):
            if answer.left <= 0 or rooms[lane.queue_id] <= 0 or place >= 64:
                answer.more[lane.queue_id] = len(self.line(lane.queue_id, lane.lane))
            else:
                rooms[lane.queue_id] -= self._claim_lane(answer, lane, min(lane.share, rooms[lane.queue_id]), now)
        for queue_id in [queue_id for queue_id, told in answer.told.items() if told.state == "probing"]:
            answer.more[queue_id] = 1
            if any(claim.queue_id == queue_id for claim in answer.ranges):
                answer.told[queue_id] = self.take_probe(queue_id, worker, answer.token, now)
        for claim in answer.ranges:
            self.begin_executions(claim.queue_id, [one.event for one in self._to_handle(claim)])
        return answer

    def is_waiting(self, queue_id: int) -> bool:
        """Whether anything waits in a queue, retries that are not due yet included."""
        if any(one.queue_id == queue_id and one.state == "waiting" for one in self.exceptions.values()):
            return True
        return any(self._has_line(queue_id, lane) for lane in range(self.queues[queue_id].lanes))

    def _lanes(self, queue_id: int, rooms: Mapping[int, int], turn: int) -> list[Lane]:
        """The lanes of a queue that have something, in the order of this turn."""
        queue = self.queues[queue_id]
        found = [lane for lane in range(queue.lanes) if self._has_line(queue_id, lane)]
        shares = min(len(found), (queue.lanes + 1) // 2)
        most = rooms[queue_id]
        share = (most - 1) // shares + 1 if queue.ordered and found else most
        return [Lane(queue_id, lane, share) for lane in sorted(found, key=lambda lane: rank_in_turn(queue, lane, turn))]

    def _has_line(self, queue_id: int, lane: int) -> bool:
        position = self.newest_claim(queue_id, lane)
        return len(self.line(queue_id, lane)) > (position.hi if position else 0)

    def _claim_lane(self, answer: Answer, lane: Lane, most: int, now: float) -> int:
        """Claim the next range of one lane; how much of the queue's room it takes."""
        self.require_live(answer.worker)
        queue = self.queues[lane.queue_id]
        line = self.line(lane.queue_id, lane.lane)
        position = self.newest_claim(lane.queue_id, lane.lane)
        if queue.ordered and position is not None and position.settled is None:
            answer.more[lane.queue_id] = 0
            return 0
        lo = position.hi + 1 if position else 1
        count, size = self._fitting(line[lo - 1 : lo - 1 + most], answer.left, first=not answer.ranges)
        if not count:
            answer.more[lane.queue_id] = len(line)
            return 0
        number = self.next("claim")
        claim = Range(number, answer.token, answer.worker, lane.queue_id, lane.lane, lo, lo + count - 1)
        self.claims[number] = self.positions[lane.queue_id, lane.lane] = claim
        if queue.ordered:
            self.park_blocked(claim, now)
        if len(claim.progress) == count:
            claim.settled = "settled"
            answer.more[lane.queue_id] = len(line)
            return 0
        answer.ranges.append(claim)
        answer.left -= size
        if claim.hi < len(line):
            answer.more[lane.queue_id] = len(line)
        return count - len(claim.progress)

    def park_blocked(self, claim: Range, now: float) -> None:
        """Park the deliveries of a new claim whose key waits behind an earlier event."""
        for one in self.deliveries(claim):
            key = one.event.key
            place = (claim.queue_id, claim.lane)
            if key is not None and (self.of_key(*place, key) or self.blocking(*place, key)):
                claim.progress[one.seq] = "parked"
                self.add_exception(one, now).state = "parked"

    @staticmethod
    def _fitting(line: Sequence[Delivery], left: int, *, first: bool) -> tuple[int, int]:
        """How many of these fit into so many bytes, and their bytes. The first of an answer always fits."""
        size = 0
        for count, one in enumerate(line):
            if size + one.event.size > left and not (first and count == 0):
                return count, size
            size += one.event.size
        return len(line), size

    def _to_handle(self, claim: Range) -> list[Delivery]:
        return [one for one in self.deliveries(claim) if one.seq not in claim.progress]

    def _late(self, queue_id: int, claim: Claim) -> bool:
        """Claims that were sifted are told after those that went straight."""
        whole = self.claims[claim.id]
        return self.queues[queue_id].tracking != "none" or bool(whole.progress)

    def _shown(self, claim: Range) -> Claim:
        handled = self._to_handle(claim)
        events = [one.event for one in handled]
        return Claim(
            claim.id, claim.token, claim.queue_id, [one.seq for one in handled], [event.event_id for event in events],
            claim.lane, [json.loads(event.payload) for event in events], [event.key for event in events],
            [self.twin(claim.queue_id, event) for event in events],
        )  # fmt: skip
