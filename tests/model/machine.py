"""Everything that may happen to a bus, in any order, on the model; what must hold after each step and at the end.

The machine keeps its own books: what was committed, what was rolled back, what each handler has run to its end. It
learns nothing from the inside of the model but what is asked for in the invariants.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eventbus.testing.model import Model
from eventbus.testing.model.values import AlreadyCompleted, Claim, Held, LeaseLost

KEYS = st.sampled_from([None, "a", "b"])
OUTCOMES = st.sampled_from(["done", "done", "retry", "dead", "released", "deferred", "parked"])
DELAYS = st.sampled_from([0.0, 5.0])
INDEX = st.integers(0, 9)
LEASE = 30.0


@dataclass(slots=True)
class Work:
    """What one worker believes to hold. A zombie believes longer than is true."""

    claims: list[Claim] = field(default_factory=list)
    held: list[tuple[int, Held]] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """The model under random use. A subclass may use a broken one."""

    model: ClassVar[type[Model]] = Model

    def __init__(self) -> None:
        super().__init__()
        self.bus = self.model()
        self.now = 1000.0
        self.queues: dict[str, int] = {}
        self.open: dict[int, list[str]] = {}
        self.marks: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.workers: dict[UUID, Work] = {}
        self.labels = 0
        self.committed: list[str] = []
        self.never: set[str] = set()
        self.keys: dict[str, str | None] = {}
        self.events: dict[str, str] = {}
        self.done: dict[int, list[str]] = defaultdict(list)
        self.died: set[tuple[int, str]] = set()

    @initialize()
    def declare(self) -> None:
        for name, options in {
            "plain": {},
            "ordered": {"kind": "ordered", "lanes": 2},
            "skipping": {"kind": "ordered", "lanes": 1, "when_exhausted": "skip"},
            "urgent": {"kind": "prioritized", "lanes": 3},
            "once": {"tracking": "idempotent"},
            "books": {"kind": "ordered", "lanes": 2, "tracking": "transactional"},
        }.items():
            self.queues[name] = self.bus.declare_queue(name, "orders.#", **options)  # type: ignore[arg-type]

    # Publishers

    @rule(key=KEYS, priority=st.integers(0, 9), tx=st.none() | INDEX, delayed=st.booleans())
    def publish(self, key: str | None, priority: int, tx: int | None, delayed: bool) -> None:
        self.labels += 1
        label = f"e{self.labels}"
        self.keys[label] = None if delayed else key
        chosen = sorted(self.open)[tx % len(self.open)] if self.open and tx is not None else None
        delay = 3.0 if delayed else None
        self.events[label] = self.bus.publish(
            "orders.made", json.dumps(label), key, now=self.now, priority=priority, tx=chosen, delay=delay
        )
        if chosen is None:
            self.committed.append(label)
        else:
            self.open[chosen].append(label)

    @rule(pick=INDEX)
    @precondition(lambda self: self.committed)
    def publish_again(self, pick: int) -> None:
        """The same event id a second time: a twin, whose label is its own."""
        twin = self.committed[pick % len(self.committed)]
        self.labels += 1
        label = f"e{self.labels}"
        self.keys[label] = self.keys[twin]
        self.events[label] = self.events[twin]
        self.bus.publish("orders.made", json.dumps(label), self.keys[twin], now=self.now, event_id=self.events[twin])
        self.committed.append(label)

    @rule()
    @precondition(lambda self: len(self.open) < 3)
    def begin(self) -> None:
        self.open[self.bus.begin()] = []

    @rule(pick=INDEX, commits=st.booleans())
    @precondition(lambda self: self.open)
    def end(self, pick: int, commits: bool) -> None:
        tx = sorted(self.open)[pick % len(self.open)]
        labels = self.open.pop(tx)
        self.marks.pop(tx, None)
        if commits:
            self.bus.commit(tx)
            self.committed += labels
        else:
            self.bus.rollback(tx)
            self.never |= set(labels)

    @rule(pick=INDEX)
    @precondition(lambda self: self.open)
    def savepoint(self, pick: int) -> None:
        tx = sorted(self.open)[pick % len(self.open)]
        self.marks[tx].append((self.bus.savepoint(tx), len(self.open[tx])))

    @rule(pick=INDEX)
    @precondition(lambda self: any(self.marks.values()))
    def rollback_to(self, pick: int) -> None:
        marked = sorted(tx for tx, marks in self.marks.items() if marks)
        tx = marked[pick % len(marked)]
        savepoint, length = self.marks[tx][-1]
        self.bus.rollback_to(tx, savepoint)
        self.never |= set(self.open[tx][length:])
        del self.open[tx][length:]

    @rule(limit=st.sampled_from([1, 3, 100]))
    def tick(self, limit: int) -> None:
        tick = self.bus.tick(limit, now=self.now)
        if tick.state == "unknown":
            self.bus.resolve(tick.unknown)

    @rule(seconds=st.sampled_from([0.5, 4.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.bus.fire_due(now=self.now)

    # Workers

    @rule()
    @precondition(lambda self: len(self.workers) < 4)
    def register(self) -> None:
        self.workers[self.bus.register(now=self.now)] = Work()

    @rule(pick=INDEX, queue=INDEX, limit=st.integers(1, 4), turn=INDEX)
    @precondition(lambda self: self.workers)
    def claim(self, pick: int, queue: int, limit: int, turn: int) -> None:
        worker, work = self._worker(pick)
        number = self._queue(queue)
        try:
            claims, _ = self.bus.claim_any(worker, {number: limit}, turn=turn, now=self.now)
        except LeaseLost:
            del self.workers[worker]
            return
        for claim in claims:
            self._check_order(number, [str(label) for label in claim.payloads])
        work.claims += claims

    @rule(pick=INDEX, queue=INDEX, limit=st.integers(1, 4), alone=st.booleans())
    @precondition(lambda self: self.workers)
    def claim_due(self, pick: int, queue: int, limit: int, alone: bool) -> None:
        worker, work = self._worker(pick)
        number = self._queue(queue)
        try:
            held = self.bus.claim_due(worker, number, limit, alone=alone, now=self.now)
        except LeaseLost:
            del self.workers[worker]
            return
        assert not alone or len(held) <= 1
        self._check_order(number, [str(one.payload) for one in held])
        work.held += [(number, one) for one in held]

    @rule(pick=INDEX, outcomes=st.lists(OUTCOMES, min_size=1, max_size=4), delay=DELAYS)
    @precondition(lambda self: any(work.claims for work in self.workers.values()))
    def settle(self, pick: int, outcomes: list[str], delay: float) -> None:
        """Handle a claim and settle it: outcomes repeat. After a failure of its key, what follows is parked."""
        work = self._having(pick, "claims")
        claim = work.claims.pop(0)
        said = self._outcomes(claim, outcomes, delay)
        if self._transactional(claim.queue_id):
            for seq in [fields["seq"] for fields in said if fields["outcome"] == "done"]:
                self._commit(claim, seq)
        written = [fields for fields in said if fields["outcome"] != "done"]
        before = set(self._told(claim))
        settled = self.bus.settle(claim, outcomes={claim.id: written}, now=self.now)
        if settled:
            self._count(claim.queue_id, claim, {f["seq"]: f["outcome"] for f in said if f["seq"] not in before})

    @rule(pick=INDEX, outcome=OUTCOMES)
    @precondition(lambda self: any(work.claims for work in self.workers.values()))
    def record(self, pick: int, outcome: str) -> None:
        """Record the first delivery of a claim that is not recorded."""
        claim = self._having(pick, "claims").claims[0]
        left = [seq for seq in claim.seqs if seq not in self._told(claim)]
        if not left or self._transactional(claim.queue_id):
            return
        seq = left[0]
        outcome = self._allowed(claim.twins[list(claim.seqs).index(seq)], outcome)
        done = [seq] if outcome == "done" else []
        said = [] if done else [{"seq": seq, "outcome": outcome, "reason": "x"}]
        if self.bus.record(claim, done, said, now=self.now):
            self._told(claim).append(seq)
            self._count(claim.queue_id, claim, {seq: outcome})

    @rule(pick=INDEX)
    @precondition(lambda self: any(work.claims for work in self.workers.values()))
    def detach(self, pick: int) -> None:
        """The first delivery that is not recorded runs on; those behind it were not started."""
        work = self._having(pick, "claims")
        claim = work.claims[0]
        left = [seq for seq in claim.seqs if seq not in self._told(claim)]
        if not self.bus.queues[claim.queue_id].ordered or not left:
            return
        work.claims.pop(0)
        answer = self.bus.detach(claim, left[:1], now=self.now)
        work.held += [
            (claim.queue_id, Held(one.id, one.token, payload=claim.payloads[list(claim.seqs).index(seq)],
                                  twin=claim.twins[list(claim.seqs).index(seq)]))
            for seq, one in (answer or {}).items() if one is not None
        ]  # fmt: skip

    @rule(pick=INDEX, outcome=OUTCOMES, delay=DELAYS)
    @precondition(lambda self: any(work.held for work in self.workers.values()))
    def settle_due(self, pick: int, outcome: str, delay: float) -> None:
        """Handle the first held exception; those of its key behind it are parked when it fails."""
        work = self._having(pick, "held")
        queue_id, one = work.held.pop(0)
        outcome = self._allowed(one.twin, outcome)
        if outcome == "done" and self._transactional(queue_id):
            self._commit_held(queue_id, one)
        if self.bus.settle_each([(one, outcome)], now=self.now, delay=delay, reason="x"):
            self._count_one(queue_id, str(one.payload), outcome, one.twin)
        if outcome != "done":
            key = self.keys[str(one.payload)]
            behind = [
                (number, other) for number, other in work.held
                if number == queue_id and key is not None and self.keys[str(other.payload)] == key
            ]  # fmt: skip
            self.bus.settle_each([(other, "parked") for _, other in behind], now=self.now)
            work.held = [pair for pair in work.held if pair not in behind]

    @rule(pick=INDEX, commits=st.booleans())
    @precondition(lambda self: any(work.claims for work in self.workers.values()))
    def run_transaction(self, pick: int, commits: bool) -> None:
        """A transactional handler publishes and completes the first delivery of a claim."""
        claim = self._having(pick, "claims").claims[0]
        left = [seq for seq in claim.seqs if seq not in self._told(claim)]
        if not self._transactional(claim.queue_id) or not left:
            return
        self.labels += 1
        label = f"e{self.labels}"
        self.keys[label] = None
        tx = self.bus.begin()
        self.events[label] = self.bus.publish("orders.follow", json.dumps(label), now=self.now, tx=tx)
        if commits and self._commit(claim, left[0], tx):
            self.committed.append(label)
        else:
            self.bus.rollback(tx)
            self.never.add(label)

    @rule(pick=INDEX, started=st.none() | st.integers(0, 4))
    @precondition(lambda self: self.workers)
    def beat(self, pick: int, started: int | None) -> None:
        worker, work = self._worker(pick)
        told = {} if started is None else {claim.id: claim.lo + started - 1 for claim in work.claims}
        self.bus.beat(worker, told, now=self.now)

    @rule(pick=INDEX, forgets=st.booleans(), max_crashes=st.sampled_from([2, 3, 9]))
    @precondition(lambda self: self.workers)
    def fall_silent(self, pick: int, forgets: bool, max_crashes: int) -> None:
        """A worker is taken over. It is gone, or it goes on as if nothing had happened."""
        worker, _ = self._worker(pick)
        before = set(self.bus.dead_letters)
        self.bus.fall_silent(worker)
        self.bus.take_over(self.bus.register(now=self.now), max_crashes, LEASE, now=self.now)
        self._bury(before)
        if forgets:
            del self.workers[worker]

    @rule(pick=INDEX)
    @precondition(lambda self: self.bus.dead_letters)
    def redrive(self, pick: int) -> None:
        letters = sorted(self.bus.dead_letters)
        self._raise_the_dead([letters[pick % len(letters)]])

    @rule(queue=INDEX, seconds=st.sampled_from([None, 2.0]), probe=st.booleans())
    def pause(self, queue: int, seconds: float | None, probe: bool) -> None:
        self.bus.pause(self._queue(queue), "test", seconds, 1.0 if probe and seconds else None, now=self.now)

    @rule(queue=INDEX)
    def resume(self, queue: int) -> None:
        self.bus.resume(self._queue(queue), "test")

    # What must hold

    @invariant()
    def nothing_rolled_back_is_there(self) -> None:
        delivered = {json.loads(one.event.payload) for line in self.bus.lines.values() for one in line}
        assert not delivered & self.never, "an event of a transaction that rolled back was delivered"
        assert not delivered - set(self.committed), "an event was delivered before its commit"

    @invariant()
    def no_delivery_is_in_two_places(self) -> None:
        places: Counter[tuple[int, int, int]] = Counter()
        for claim in self.bus.claims.values():
            if claim.settled is None:
                places.update(
                    (claim.queue_id, claim.lane, seq)
                    for seq in range(claim.lo, claim.hi + 1)
                    if seq not in claim.progress
                )
        for one in self.bus.exceptions.values():
            places.update((one.queue_id, one.lane, seq) for seq in range(one.seq, (one.range_hi or one.seq) + 1))
        places.update((one.queue_id, one.lane, one.seq) for one in self.bus.dead_letters.values())
        assert all(count == 1 for count in places.values()), "a delivery is in two places"

    @invariant()
    def a_key_has_one_holder(self) -> None:
        holders = defaultdict(set)
        for claim in self.bus.claims.values():
            if claim.settled is None and self.bus.queues[claim.queue_id].ordered:
                for one in self.bus.deliveries(claim):
                    if one.event.key is not None and one.seq not in claim.progress:
                        holders[claim.queue_id, one.event.key].add(claim.token)
        for row in self.bus.exceptions.values():
            if row.key is not None and row.token is not None:
                holders[row.queue_id, row.key].add(row.token)
        assert all(len(tokens) == 1 for tokens in holders.values()), "a key runs twice at once"

    @invariant()
    def nothing_waits_behind_nothing(self) -> None:
        rows = [one for one in self.bus.exceptions.values() if one.key is not None]
        for parked in [one for one in rows if one.state == "parked"]:
            assert parked.key is not None
            place = (parked.queue_id, parked.lane, parked.key)
            moving = any((one.queue_id, one.lane, one.key) == place and one.state != "parked" for one in rows)
            dead = any(seq < parked.seq for seq in self.bus.blocking(*place))
            assert moving or dead, "an exception is parked behind nothing"

    def teardown(self) -> None:
        """Let everything succeed; then each committed event was done once in every queue."""
        if not self.queues:
            return
        for tx in list(self.open):
            self.bus.rollback(tx)
        for number in self.queues.values():
            self.bus.resume(number, "test")
        self.now += 100
        self.bus.fire_due(now=self.now)
        self.bus.fall_silent(*self.workers)
        worker = self.bus.register(now=self.now)
        before = set(self.bus.dead_letters)
        self.bus.take_over(worker, 9, LEASE, now=self.now)
        self._bury(before)
        self._raise_the_dead(list(self.bus.dead_letters))
        self.workers = {worker: Work()}
        for _ in range(20 * len(self.committed) + 20):
            if not self._step(worker):
                break
        assert not self.bus.exceptions, "something is stuck"
        assert not self.bus.dead_letters, "something died of success"
        for name, number in self.queues.items():
            self._check_end(name, number)

    def _step(self, worker: UUID) -> bool:
        """Relay and handle what there is; whether there was something."""
        found = bool(self.bus.relay(now=self.now))
        self.now += 10
        self.bus.beat(worker, now=self.now)
        work = self.workers[worker]
        for number in self.queues.values():
            claims, _ = self.bus.claim_any(worker, {number: 100}, now=self.now)
            held = [
                (number, one)
                for alone in (True, False)
                for one in self.bus.claim_due(worker, number, 100, now=self.now, alone=alone)
            ]
            found = found or bool(claims or held)
            work.claims, work.held = list(claims), held
            while work.claims:
                self.settle(0, ["done"], 0.0)
            while work.held:
                self.settle_due(0, "done", 0.0)
        return found

    def _check_end(self, name: str, number: int) -> None:
        tracked = self.bus.queues[number].tracking != "none"
        runs = Counter(self.events[label] for label in self.done[number]) if tracked else Counter(self.done[number])
        wanted = {self.events[label] for label in self.committed} if tracked else set(self.committed)
        assert set(runs) == wanted, f"{name}: not everything was done, or something else"
        assert set(runs.values()) <= {1}, f"{name}: something was done twice"

    # Books

    def _worker(self, pick: int) -> tuple[UUID, Work]:
        return list(self.workers.items())[pick % len(self.workers)]

    def _having(self, pick: int, what: str) -> Work:
        having = [work for work in self.workers.values() if getattr(work, what)]
        return having[pick % len(having)]

    def _queue(self, pick: int) -> int:
        return list(self.queues.values())[pick % len(self.queues)]

    def _told(self, claim: Claim) -> list[int]:
        """Deliveries of a claim that were recorded one by one."""
        return self._recorded.setdefault((claim.id, claim.token), [])

    @property
    def _recorded(self) -> dict[tuple[int, UUID], list[int]]:
        books: dict[tuple[int, UUID], list[int]] = self.__dict__.setdefault("recorded", {})
        return books

    @staticmethod
    def _allowed(twin: str | None, outcome: str) -> str:
        """A twin does not run: it is done where the other one is, and else put off."""
        return {None: outcome, "completed": "done", "pending": "deferred"}[twin]

    def _outcomes(self, claim: Claim, outcomes: list[str], delay: float) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        failed: set[str | None] = set()
        ordered = self.bus.queues[claim.queue_id].ordered
        for place, (seq, key, twin) in enumerate(zip(claim.seqs, claim.keys, claim.twins, strict=True)):
            outcome = self._allowed(twin, outcomes[place % len(outcomes)])
            if ordered and key is not None and key in failed:
                outcome = "parked"
            if outcome != "done":
                failed.add(key)
            said.append({"seq": seq, "outcome": outcome, "delay": delay, "reason": "x"})
        return said

    def _transactional(self, queue_id: int) -> bool:
        return self.bus.queues[queue_id].tracking == "transactional"

    def _commit(self, claim: Claim, seq: int, tx: int | None = None) -> bool:
        """The transaction of the handler of one delivery; false when it must roll back."""
        place = list(claim.seqs).index(seq)
        event_ids = [claim.event_ids[place]]
        try:
            self.bus.complete(claim.queue_id, [(claim, seq)], event_ids=event_ids, now=self.now, tx=tx)
        except (LeaseLost, AlreadyCompleted):
            return False
        self._told(claim).append(seq)
        self._note_done(claim.queue_id, str(claim.payloads[place]))
        return True

    def _commit_held(self, queue_id: int, one: Held) -> None:
        with suppress(LeaseLost, AlreadyCompleted):
            self.bus.complete(queue_id, held=[one], event_ids=[self.events[str(one.payload)]], now=self.now)
            self._note_done(queue_id, str(one.payload))

    def _note_done(self, queue_id: int, label: str) -> None:
        self._check_turn(queue_id, label)
        self.done[queue_id].append(label)

    def _count(self, queue_id: int, claim: Claim, outcomes: dict[int, object]) -> None:
        for seq, label, twin in zip(claim.seqs, claim.payloads, claim.twins, strict=True):
            if seq in outcomes:
                self._count_one(queue_id, str(label), str(outcomes[seq]), twin)

    def _count_one(self, queue_id: int, label: str, outcome: str, twin: str | None) -> None:
        if outcome == "dead":
            self.died.add((queue_id, label))
        if outcome == "done" and twin != "completed" and not self._transactional(queue_id):
            self._note_done(queue_id, label)

    def _check_turn(self, queue_id: int, label: str) -> None:
        """What is done now comes after all of its key that were delivered before, but those that died."""
        if not self.bus.queues[queue_id].ordered or self.keys[label] is None:
            return
        for line in (line for (number, _), line in self.bus.lines.items() if number == queue_id):
            labels = [json.loads(one.event.payload) for one in line]
            if label in labels:
                earlier = [other for other in labels[: labels.index(label)] if self.keys[other] == self.keys[label]]
                done = {self.events[other] for other in self.done[queue_id]}
                late = [o for o in earlier if self.events[o] not in done and (queue_id, o) not in self.died]
                assert not late, "a later event of a key was done before an earlier one"

    def _check_order(self, queue_id: int, labels: list[str]) -> None:
        """What is handed out was committed, and never rolled back."""
        assert set(labels) <= set(self.committed), "a worker got what was not committed"

    def _bury(self, before: set[int]) -> None:
        for number in set(self.bus.dead_letters) - before:
            letter = self.bus.dead_letters[number]
            self.died.add((letter.queue_id, json.loads(letter.event.payload)))

    def _raise_the_dead(self, letters: list[int]) -> None:
        self.bus.redrive(letters, now=self.now)
