"""The same events published again and again while many claim, fail, die and are taken over: each is executed once."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from functools import partial
from uuid import uuid4

from tests.postgres.engine.driver import Claim, Engine, Held
from tests.postgres.engine.sessions import NewSession

SECONDS = float(os.environ.get("TEST_HAMMER_SECONDS", "4"))
POOL = 40
"""Event ids that are in circulation at a time."""

Pair = tuple[str | None, str | None]
"""An event id and its twin."""


class Truth:
    """What really happened, as those who ran the events saw it."""

    def __init__(self) -> None:
        self.published: list[str] = []
        self.completed: set[str] = set()
        self.running: set[str] = set()
        self.problems: list[str] = []
        self.deferred = 0
        self.skipped = 0
        self.lock = threading.Lock()

    def began(self, pairs: list[Pair], before: frozenset[str]) -> list[bool]:
        """Which of these run. ``before``: what was completed before they were claimed."""
        with self.lock:
            return [self._began(str(event_id), twin, before) for event_id, twin in pairs]

    def _began(self, event_id: str, twin: str | None, before: frozenset[str]) -> bool:
        if twin == "pending":
            self.deferred += 1
        if twin == "completed":
            self.skipped += 1
        if twin is not None:
            return False
        if event_id in before:
            self.problems.append(f"{event_id} ran although it had been completed")
        if event_id in self.running:
            self.problems.append(f"{event_id} ran twice at a time")
        self.running.add(event_id)
        return True

    def ended(self, events: list[str | None]) -> None:
        """They run no more; what is told to the engine after this must not matter to anybody else."""
        with self.lock:
            self.running.difference_update(str(event) for event in events)

    def done(self, events: list[str | None]) -> None:
        with self.lock:
            for event in map(str, events):
                if event in self.completed:
                    self.problems.append(f"{event} was completed twice")
                self.completed.add(event)

    def snapshot(self) -> frozenset[str]:
        with self.lock:
            return frozenset(self.completed)


class Hand:
    """A worker of its own, which dies now and then and begins anew."""

    def __init__(self, engine: Engine, truth: Truth, queue: int, seed: int) -> None:
        self._engine = engine
        self._truth = truth
        self._queue = queue
        self._random = random.Random(seed)
        self._worker = engine.register()

    def feed(self) -> None:
        """Publish some of the pool again, in any order, under any priority; the pool moves on."""
        with self._truth.lock:
            self._truth.published += [str(uuid4()) for _ in range(self._random.randrange(4))]
            pool = self._truth.published[-POOL:]
        for event_id in self._random.sample(pool, k=min(len(pool), 10)):
            self._engine.publish(event_id=event_id, priority=self._random.randrange(10))
        self._engine.relay(100)

    def claim(self) -> None:
        before = self._truth.snapshot()
        claims, _ = self._engine.claim_any(
            self._worker, {self._queue: self._random.randrange(1, 30)}, turn=self._random.randrange(100)
        )
        for claim in claims:
            pairs = list(zip(claim.event_ids, claim.twins, strict=True))
            outcomes = self._run(pairs, before)
            if outcomes is None:
                return
            self._settle(claim, outcomes)

    def _settle(self, claim: Claim, outcomes: list[str]) -> None:
        said = [
            {"seq": seq, "outcome": outcome, "delay": 0, "reason": "x"}
            for seq, outcome in zip(claim.seqs, outcomes, strict=True)
            if outcome not in ("done", "known")
        ]
        settled = self._engine.settle(claim, outcomes={claim.id: said})
        assert settled == {claim.id}
        done = [event for event, outcome in zip(claim.event_ids, outcomes, strict=True) if outcome == "done"]
        self._truth.done(done)

    def again(self) -> None:
        before = self._truth.snapshot()
        held = self._engine.claim_due(self._worker, self._queue, self._random.randrange(1, 30))
        held = held or self._engine.claim_due(self._worker, self._queue, alone=True)
        outcomes = self._run([(one.event_id, one.twin) for one in held], before)
        if outcomes is not None:
            self._settle_due(held, outcomes)

    def _settle_due(self, held: list[Held], outcomes: list[str]) -> None:
        told = [(one, "done" if outcome == "known" else outcome) for one, outcome in zip(held, outcomes, strict=True)]
        assert self._engine.settle_each(told, delay=0, reason="x") == {one.id for one in held}
        self._truth.done([one.event_id for one, outcome in zip(held, outcomes, strict=True) if outcome == "done"])

    def _run(self, pairs: list[Pair], before: frozenset[str]) -> list[str] | None:
        """The outcome of each; nothing at all when the worker dies with them."""
        runs = self._truth.began(pairs, before)
        mine = [event for (event, _), ran in zip(pairs, runs, strict=True) if ran]
        self._truth.ended(mine)
        if self._random.random() < 0.1:
            self._engine.fall_silent(self._worker)
            self._worker = self._engine.register()
            return None
        return [
            self._random.choice(("done", "done", "done", "retry", "released", "dead"))
            if ran
            else {"completed": "known", "pending": "deferred"}[str(twin)]
            for (_, twin), ran in zip(pairs, runs, strict=True)
        ]

    def take_over(self) -> None:
        self._engine.take_over(self._worker, max_crashes=1000)


def hammer(call: Callable[[], None], stop: threading.Event, failures: list[BaseException]) -> None:
    while not stop.is_set():
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)
            return


def deadlocks(bus: Engine) -> int:
    return int(bus.value("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"))


def test_events_that_are_published_many_times_are_executed_once_and_nobody_deadlocks(
    bus: Engine, session: NewSession
) -> None:
    queue = bus.declare_queue("once", tracking="idempotent", kind="prioritized", lanes=5)
    before, truth, stop, failures = deadlocks(bus), Truth(), threading.Event(), list[BaseException]()
    roles = [Hand.feed, *[Hand.claim] * 4, *[Hand.again] * 3, Hand.take_over]
    hands = [Hand(session(), truth, queue, seed) for seed in range(len(roles))]
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
    assert truth.problems == []
    assert truth.deferred
    assert truth.skipped
    finish(bus, queue, truth)
    assert truth.problems == []
    once = {event for (event,) in bus.rows("SELECT DISTINCT event_id::text FROM {bus}.outbox")}
    assert truth.completed == once
    assert bus.rows("SELECT owner FROM {bus}.processed_events WHERE completed_at IS NULL") == []
    assert bus.value("SELECT count(*) FROM {bus}.processed_events") == len(once)
    assert deadlocks(bus) == before


def finish(bus: Engine, queue: int, truth: Truth) -> None:
    """Let everything that is left succeed, dead letters included."""
    bus.relay()
    bus.fall_silent(*bus.column("SELECT id FROM {bus}.workers WHERE state = 'live'"))
    worker = bus.register()
    while bus.take_over(worker, max_crashes=1000)[0]:
        pass
    bus.rows("SELECT {bus}.redrive(ARRAY(SELECT id FROM {bus}.dead_letters))")
    while claims := bus.claim_any(worker, {queue: 1000})[0]:
        for claim in claims:
            twins = list(zip(claim.seqs, claim.event_ids, claim.twins, strict=True))
            said = [{"seq": seq, "outcome": "deferred", "delay": 0} for seq, _, twin in twins if twin == "pending"]
            bus.settle(claim, outcomes={claim.id: said})
            truth.done([event for _, event, twin in twins if twin is None])
    while bus.value("SELECT count(*) FROM {bus}.exceptions WHERE queue_id = %s", queue):
        held = bus.claim_due(worker, queue) or bus.claim_due(worker, queue, alone=True)
        known = [one for one in held if one.twin is not None]
        held = [one for one in held if one.twin is None] or bus.claim_due(worker, queue, alone=True)
        bus.settle_each([(one, "deferred" if one.twin == "pending" else "done") for one in [*known, *held]], delay=0)
        truth.done([one.event_id for one in held if one.twin is None])
