"""Everything that writes what became of a delivery, at once and in any order: no deadlock, and each settled once."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from uuid import UUID

import psycopg

from tests.postgres.engine.driver import Claim, Engine, Held
from tests.postgres.engine.sessions import NewSession

SECONDS = float(os.environ.get("TEST_HAMMER_SECONDS", "4"))
OUTCOMES = ("done", "done", "retry", "released", "dead")


class Arena:
    """What all threads share: who the workers are, and which events are settled for good."""

    def __init__(self) -> None:
        self.workers: list[UUID] = []
        self.done: Counter[str | None] = Counter()
        self.kinds: Counter[str] = Counter()
        self.lock = threading.Lock()

    def finished(self, kind: str, events: list[str | None]) -> None:
        with self.lock:
            self.kinds[kind] += 1
            self.done.update(events)


class Hand:
    """One thread with a session of its own, acting for whichever worker it likes: zombies do that, too."""

    def __init__(self, engine: Engine, arena: Arena, seed: int) -> None:
        self._engine = engine
        self._arena = arena
        self._random = random.Random(seed)
        self._recorded: dict[int, set[object]] = {}
        """Deliveries of the claim that were recorded, or that somebody else has now."""

    def feed(self) -> None:
        self._engine.publish_many(self._random.randrange(1, 60))
        self._engine.relay(100)

    def consume(self) -> None:
        """Claim a few ranges, record parts of them, settle them together in any order."""
        worker, claims = self._worker(), list[Claim]()
        outcomes: dict[int, list[dict[str, object]]] = {}
        for _ in range(3):
            if (claim := self._engine.claim(worker, 1, self._random.randrange(1, 12))) is None:
                continue
            claims.append(claim)
            recorded = self._record(claim)
            left = [seq for seq in claim.seqs if seq not in recorded]
            outcomes[claim.id] = [self._outcome(seq) for seq in left if self._random.random() < 0.4]
        self._random.shuffle(claims)
        settled = self._engine.settle(*claims, outcomes=outcomes)
        for claim in claims:
            said = {outcome["seq"] for outcome in outcomes[claim.id]} | self._recorded.pop(claim.id)
            if claim.id in settled:
                self._finish("settle", claim, [seq for seq in claim.seqs if seq not in said])

    def _record(self, claim: Claim) -> set[int]:
        seqs = [seq for seq in claim.seqs if self._random.random() < 0.3]
        done, rest = seqs[::2], seqs[1::2]
        if self._engine.record(claim, done=done, outcomes=[self._outcome(seq) for seq in rest]):
            self._finish("record", claim, done)
        self._recorded[claim.id] = set(seqs)
        return set(seqs)

    def _finish(self, kind: str, claim: Claim, seqs: list[int]) -> None:
        self._arena.finished(kind, [claim.event_ids[seq - claim.lo] for seq in seqs])

    def _outcome(self, seq: int) -> dict[str, object]:
        kind = self._random.choice(OUTCOMES[2:])
        return {"seq": seq, "outcome": kind, "delay": 0, "reason": "x"} | ({"hi": seq} if kind == "released" else {})

    def retry(self) -> None:
        self._settle_due(self._engine.claim_due(self._worker(), 1, self._random.randrange(1, 30)))
        self._settle_due(self._engine.claim_due(self._worker(), 1, alone=True))

    def _settle_due(self, held: list[Held]) -> None:
        self._random.shuffle(held)
        for outcome in OUTCOMES:
            some, held = held[: len(held) // 2 + 1], held[len(held) // 2 + 1 :]
            settled = self._engine.settle_due(some, outcome, delay=0, reason="x")
            if outcome == "done":
                self._arena.finished("retry", [one.event_id for one in some if one.id in settled])

    def take_over(self) -> None:
        self._engine.fall_silent(*self._random.sample(self._arena.workers, k=min(2, len(self._arena.workers))))
        workers, _ = self._engine.take_over(newcomer := self._engine.register(), max_crashes=1000)
        self._arena.workers.append(newcomer)
        if workers:
            self._arena.finished("take-over", [])

    def release(self) -> None:
        worker = self._worker()
        held = self._engine.rows("SELECT kind, id FROM {bus}.held(%s, 0)", worker)
        ids = [[number for kind, number in held if kind == wanted] for wanted in ("claim", "exception")]
        if self._engine.value("SELECT {bus}.release_unknown(%s, %s::bigint[], %s::bigint[])", worker, *ids):
            self._arena.finished("release", [])

    def _worker(self) -> UUID:
        return self._random.choice(self._arena.workers[-6:])


def hammer(call: Callable[[], None], stop: threading.Event, failures: list[BaseException]) -> None:
    while not stop.is_set():
        try:
            call()
        except psycopg.Error as error:
            if error.sqlstate != "EB001":  # it was taken over, which is what we do all the time
                failures.append(error)
                return


def test_settling_never_deadlocks_and_no_delivery_is_lost_or_settled_twice(bus: Engine, session: NewSession) -> None:
    arena, stop, failures = Arena(), threading.Event(), list[BaseException]()
    bus.resolve(["orders.created"])
    arena.workers += [bus.register() for _ in range(4)]
    hands = [Hand(session(), arena, seed) for seed in range(9)]
    roles = [Hand.feed, *[Hand.consume] * 3, *[Hand.retry] * 2, *[Hand.take_over] * 2, Hand.release]
    threads = [
        threading.Thread(target=hammer, args=(partial(role, hand), stop, failures))
        for hand, role in zip(hands, roles, strict=True)
    ]
    for thread in threads:
        thread.start()
    stop.wait(SECONDS)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert set(arena.kinds) == {"settle", "record", "retry", "take-over", "release"}
    settle_the_rest(bus, arena)
    dead = Counter(bus.column("SELECT event_id::text FROM {bus}.dead_letters"))
    assert arena.done + dead == Counter(bus.delivered(1))


def settle_the_rest(bus: Engine, arena: Arena) -> None:
    bus.relay()
    bus.fall_silent(*arena.workers)
    worker = bus.register()
    while bus.take_over(worker, max_crashes=1000)[0]:
        pass
    while claim := bus.claim(worker, 1):
        assert bus.settle(claim)
        arena.done.update(claim.event_ids)
    for alone in (False, True):
        while held := bus.claim_due(worker, 1, alone=alone):
            assert len(bus.settle_due(held, "done")) == len(held)
            arena.done.update(one.event_id for one in held)
