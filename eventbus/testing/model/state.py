"""The tables of the model and what finds something in them. Every operation is built on this."""

from __future__ import annotations

import hashlib
from collections import Counter
from uuid import UUID

from eventbus.testing.model.values import (
    Delivery,
    Event,
    Exceptional,
    Execution,
    Letter,
    Pause,
    Queue,
    Range,
    Scheduled,
    Transaction,
    Worker,
)


class State:
    """Everything that a bus knows, as plain values."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.transactions: dict[int, Transaction] = {}
        self.outbox: dict[int, Event] = {}
        self.scheduled: dict[int, Scheduled] = {}
        self.queues: dict[int, Queue] = {}
        self.pauses: dict[int, dict[str, Pause]] = {}
        self.routes: dict[str, tuple[int, list[int]]] = {}
        self.unrouted: Counter[str] = Counter()
        self.bindings_version = 1
        self.lines: dict[tuple[int, int], list[Delivery]] = {}
        self.workers: dict[UUID, Worker] = {}
        self.claims: dict[int, Range] = {}
        self.positions: dict[tuple[int, int], Range] = {}
        self.exceptions: dict[int, Exceptional] = {}
        self.dead_letters: dict[int, Letter] = {}
        self.executions: dict[tuple[int, str], Execution] = {}
        self.paused = False

    def next(self, what: str) -> int:
        """The next number of a kind, from 1. Like a sequence: a rollback gives none back."""
        self.numbers[what] += 1
        return self.numbers[what]

    def token(self, what: str) -> UUID:
        """A number of a kind, as programs see tokens and workers."""
        return UUID(int=self.next(what))

    def deliveries(self, claim: Range) -> list[Delivery]:
        """Everything in the range of a claim, in order."""
        return self.line(claim.queue_id, claim.lane)[claim.lo - 1 : claim.hi]

    def line(self, queue_id: int, lane: int) -> list[Delivery]:
        """All that a lane ever got; the seq of each is its place, from 1."""
        return self.lines.setdefault((queue_id, lane), [])

    def newest_claim(self, queue_id: int, lane: int) -> Range | None:
        """The claim that is the position of a lane."""
        return self.positions.get((queue_id, lane))

    def of_key(self, queue_id: int, lane: int, key: str) -> list[Exceptional]:
        """The exceptions of a key, in its order."""
        found = [one for one in self.exceptions.values() if (one.queue_id, one.lane, one.key) == (queue_id, lane, key)]
        return sorted(found, key=lambda one: (one.seq, one.id))

    def blocking(self, queue_id: int, lane: int, key: str) -> list[int]:
        """Seqs of the dead letters of a key that let nothing later of it run."""
        letters = self.dead_letters.values()
        return [
            letter.seq
            for letter in letters
            if letter.blocks and (letter.queue_id, letter.lane, letter.event.key) == (queue_id, lane, key)
        ]

    def key_in(self, queue_id: int, event: Event) -> str | None:
        """The key that orders an event in this queue; none in a queue without an order."""
        return event.key if self.queues[queue_id].ordered else None

    def add_exception(self, delivery: Delivery, now: float) -> Exceptional:
        """A new exception of one delivery: it waits, and is due now."""
        one = Exceptional(
            self.next("exception"), delivery.queue_id, delivery.lane, delivery.seq, now, delivery.event,
            key=self.key_in(delivery.queue_id, delivery.event),
        )  # fmt: skip
        self.exceptions[one.id] = one
        return one

    def add_ranges(self, claim: Range, seqs: list[int], now: float) -> None:
        """What never started comes back in ranges: one exception for each piece without a gap."""
        pieces: list[list[int]] = []
        for seq in sorted(seqs):
            if pieces and pieces[-1][-1] == seq - 1:
                pieces[-1].append(seq)
            else:
                pieces.append([seq])
        for piece in pieces:
            number = self.next("exception")
            self.exceptions[number] = Exceptional(number, claim.queue_id, claim.lane, piece[0], now, range_hi=piece[-1])


def lane_of(queue: Queue, event: Event) -> int:
    """The lane of an event: by its key, by its priority, or the only one."""
    match queue.kind:
        case "plain":
            return 0
        case "prioritized":
            return queue.lanes - 1 - event.priority * queue.lanes // 10
        case _ if event.key is None:
            return event.id % queue.lanes
        case _:
            digest = hashlib.md5(event.key.encode(), usedforsecurity=False).hexdigest()
            return int(digest[:8], 16) % queue.lanes


def rank_in_turn(queue: Queue, lane: int, turn: int) -> int:
    """The place of a lane in the order of a claim: lanes take turns, and urgent ones come first in nine of ten."""
    if queue.lanes == 1:
        first = 0
    elif queue.kind == "ordered":
        first = turn % queue.lanes
    else:
        first = 1 + turn // 10 % (queue.lanes - 1) if turn % 10 == 9 else 0
    return (lane + queue.lanes - first) % queue.lanes
