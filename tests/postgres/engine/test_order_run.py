"""Ordered queues under everything at once: handlers that fail, workers that die, stop and are slow, zombies, redrives.

Every worker here is a thread with a session of its own, and keeps to what the consumer keeps to: it runs the events of
one key one after the other, and stops with a key at the first one that is not done.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

import psycopg

from tests.postgres.engine.driver import Claim, Engine, Held
from tests.postgres.engine.sessions import NewSession

SECONDS = float(os.environ.get("TEST_HAMMER_SECONDS", "4"))
KEYS = "abcdefgh"
FAILURES = ("retry", "retry", "deferred", "dead", "released")

TWO_AT_WORK = """
SELECT array_agg(e.state ORDER BY e.seq) FROM {bus}.exceptions e
WHERE e.queue_id = %s AND e.key IS NOT NULL AND e.state <> 'parked' GROUP BY e.lane, e.key
HAVING count(DISTINCT coalesce(e.token, '00000000-0000-0000-0000-000000000000')) > 1
    OR count(*) FILTER (WHERE e.state = 'waiting') > 1
"""
BEHIND_NOTHING = """
SELECT e.key FROM {bus}.exceptions e WHERE e.queue_id = %s AND e.state = 'parked'
  AND NOT EXISTS (SELECT 1 FROM {bus}.exceptions x WHERE x.queue_id = e.queue_id AND x.lane = e.lane AND x.key = e.key
                  AND x.state <> 'parked')
  AND NOT EXISTS (SELECT 1 FROM {bus}.dead_letters l WHERE l.queue_id = e.queue_id AND l.lane = e.lane
                  AND l.key = e.key AND l.blocks)
"""


class History:
    """What handlers did, in the order in which they did it."""

    def __init__(self) -> None:
        self.succeeded: dict[str | None, list[str]] = {}
        """Events of each key by their first success."""
        self.settled: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.problems: list[str] = []
        self.lock = threading.Lock()

    def success(self, event: str, key: str | None) -> None:
        with self.lock:
            of_key = self.succeeded.setdefault(key, [])
            if event not in of_key:
                of_key.append(event)

    def done(self, kind: str, events: Sequence[str]) -> None:
        with self.lock:
            self.kinds[kind] += 1
            self.settled.update(events)


@dataclass(frozen=True, slots=True)
class Item:
    """One event in the hands of a worker: a delivery of a claim, or an exception."""

    event: str
    key: str | None
    seq: int = 0
    held: Held | None = None


class Worker:
    """One worker; whom ``everybody`` lists may be taken over at any time."""

    def __init__(self, engine: Engine, history: History, queue: int, everybody: list[UUID], seed: int) -> None:
        self._engine = engine
        self._history = history
        self._queue = queue
        self._everybody = everybody
        self._random = random.Random(seed)
        self._register()

    def _register(self) -> None:
        self._id = self._engine.register()
        self._everybody.append(self._id)

    def feed(self) -> None:
        labels = [f"{self._random.choice(KEYS)}1" if self._random.random() < 0.9 else "1" for _ in range(12)]
        self._engine.publish_keyed(*labels)
        self._engine.tick(100)  # unless a redrive is at it

    def claim(self) -> None:
        claims, _ = self._engine.claim_any(
            self._id, {self._queue: self._random.randrange(1, 40)}, turn=self._random.randrange(100)
        )
        for claim in claims:
            items = [
                Item(str(event), key, seq)
                for event, key, seq in zip(claim.event_ids, claim.keys, claim.seqs, strict=True)
            ]
            self._random.choice((self._settle, self._settle, self._detach, self._die))(claim, items)

    def _settle(self, claim: Claim, items: Sequence[Item]) -> None:
        outcomes = self._run(items)
        if claim.id in self._engine.settle(claim, outcomes={claim.id: self._said(outcomes)}):
            self._history.done("settle", _done(outcomes))

    def _detach(self, claim: Claim, items: Sequence[Item]) -> None:
        """A part runs to its end, of some other keys the first one is running, and then the claim lasts too long."""
        finished = {key for key in {item.key for item in items} if self._random.random() < 0.5}
        outcomes = self._run([item for item in items if item.key in finished])
        running = [item for item in _firsts(items) if item.key not in finished and self._random.random() < 0.9]
        done = [item.seq for item, outcome in outcomes if outcome == "done"]
        held = self._engine.detach(claim, [item.seq for item in running], done, self._said(outcomes))
        if held is None:
            self._history.done("lost", [])
            return
        self._history.done("detach", _done(outcomes))
        kept = [(item, held[item.seq]) for item in running]
        self._again([Item(item.event, item.key, held=one) for item, one in kept if one is not None])

    def _die(self, claim: Claim, items: Sequence[Item]) -> None:
        self._run(items)
        self._engine.fall_silent(self._id)
        self._history.done("die", [])
        self._register()

    def due(self) -> None:
        held = self._engine.claim_due(self._id, self._queue, self._random.randrange(1, 20))
        held = held or self._engine.claim_due(self._id, self._queue, alone=True)
        self._again([Item(str(one.event_id), one.key, held=one) for one in held])

    def _again(self, items: Sequence[Item]) -> None:
        outcomes = self._run(items)
        if outcomes and self._random.random() < 0.1:
            self._engine.fall_silent(self._id)
            self._register()
            return
        said = [(item.held, outcome) for item, outcome in outcomes if item.held is not None]
        settled = self._engine.settle_each(said, delay=0, reason="x")
        done = [item for item, outcome in outcomes if outcome == "done" and item.held and item.held.id in settled]
        self._history.done("again", [item.event for item in done])

    def _run(self, items: Sequence[Item]) -> list[tuple[Item, str]]:
        """Run each key as far as it goes; the keys of the claim in turn, as slots would."""
        outcomes: list[tuple[Item, str]] = []
        stopped: set[str] = set()
        stopping = self._random.random() < 0.1
        for item in items:
            if item.key in stopped:
                outcome = "released" if stopping else "parked"
            elif stopping and self._random.random() < 0.5:
                outcome = "released"
            else:
                outcome = "done" if self._random.random() < 0.8 else self._random.choice(FAILURES)
            if outcome == "done":
                self._history.success(item.event, item.key)
            elif item.key is not None:
                stopped.add(item.key)
            outcomes.append((item, outcome))
        return outcomes

    def _said(self, outcomes: Sequence[tuple[Item, str]]) -> list[dict[str, object]]:
        return [
            {"seq": item.seq, "outcome": outcome, "delay": 0, "reason": "x"}
            for item, outcome in outcomes
            if outcome != "done"
        ]

    def take_over(self) -> None:
        """Also of workers that are alive and well, and go on as zombies."""
        if self._random.random() < 0.2:
            self._engine.fall_silent(self._random.choice(self._everybody[-8:]))
        workers, _ = self._engine.take_over(self._id, max_crashes=1000)
        if workers:
            self._history.done("take over", [])

    def redrive(self) -> None:
        letters = self._engine.column("SELECT id FROM {bus}.dead_letters WHERE queue_id = %s", self._queue)
        chosen = [letter for letter in letters if self._random.random() < 0.5]
        if chosen:
            self._engine.rows("SELECT {bus}.redrive(%s::bigint[])", chosen)
            self._history.done("redrive", [])

    def watch(self) -> None:
        """What must hold after every commit."""
        for problem, statement in (("two at work", TWO_AT_WORK), ("behind nothing", BEHIND_NOTHING)):
            for row in self._engine.rows(statement, self._queue):
                self._history.problems.append(f"{problem}: {row}")

    def go_on(self, call: Callable[[Worker], None], stop: threading.Event, failures: list[BaseException]) -> None:
        while not stop.is_set():
            try:
                call(self)
            except psycopg.Error as error:
                if error.sqlstate != "EB001":
                    failures.append(error)
                    return
                self._register()
            except BaseException as error:  # noqa: BLE001 - told by the test
                failures.append(error)
                return


def _done(outcomes: Sequence[tuple[Item, str]]) -> list[str]:
    return [item.event for item, outcome in outcomes if outcome == "done"]


def _firsts(items: Sequence[Item]) -> list[Item]:
    """The first one of each key, and all without one."""
    return [item for item in items if item.key is None or item is _first_of(items, item.key)]


def _first_of(items: Sequence[Item], key: str | None) -> Item:
    return next(item for item in items if item.key == key)


def deadlocks(bus: Engine) -> int:
    return int(bus.value("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"))


def run(bus: Engine, session: NewSession, queue: int) -> History:
    """Let everything happen at once, and then let everything end well."""
    history, stop, failures, everybody = History(), threading.Event(), list[BaseException](), list[UUID]()
    bus.resolve(["orders.created"])
    roles = [
        Worker.feed, *[Worker.claim] * 3, *[Worker.due] * 3, Worker.take_over, Worker.redrive, Worker.watch,
    ]  # fmt: skip
    threads = [
        threading.Thread(target=Worker(session(), history, queue, everybody, seed).go_on, args=(role, stop, failures))
        for seed, role in enumerate(roles)
    ]
    for thread in threads:
        thread.start()
    stop.wait(SECONDS)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert history.problems == []
    assert set(history.kinds) >= {"settle", "detach", "die", "again", "take over", "redrive"}
    finish(bus, queue, history)
    return history


def finish(bus: Engine, queue: int, history: History) -> None:
    """Let everything that is left succeed, dead letters included."""
    bus.relay()
    bus.fall_silent(*bus.column("SELECT id FROM {bus}.workers WHERE state = 'live'"))
    worker = bus.register()
    while bus.take_over(worker, max_crashes=1000)[0]:
        pass
    bus.rows("SELECT {bus}.redrive(ARRAY(SELECT id FROM {bus}.dead_letters))")
    more: dict[int, int | None] = {queue: 1}
    while more:
        claims, more = bus.claim_any(worker, {queue: 1000})
        for claim in claims:
            assert bus.settle(claim) == {claim.id}
            for event, key in zip(claim.event_ids, claim.keys, strict=True):
                history.success(str(event), key)
            history.settled.update(map(str, claim.event_ids))
    while held := bus.claim_due(worker, queue) or bus.claim_due(worker, queue, alone=True):
        for one in held:
            history.success(str(one.event_id), one.key)
        history.settled.update(str(one.event_id) for one in held)
        assert len(bus.settle_due(held, "done")) == len(held)


def test_of_every_key_each_event_succeeds_after_the_one_before_it_and_nothing_is_lost_or_stuck(
    bus: Engine, session: NewSession
) -> None:
    queue, before = bus.declare_queue("keys", kind="ordered", lanes=3), deadlocks(bus)
    history = run(bus, session, queue)
    nothing_is_left(bus, queue, history)
    published: dict[str | None, list[str]] = {}
    for key, event in bus.rows("SELECT key, event_id::text FROM {bus}.outbox ORDER BY id"):
        published.setdefault(key, []).append(event)
    assert len(published) == len(KEYS) + 1
    for key in KEYS:
        assert history.succeeded[key] == published[key], f"order of {key}"
    assert deadlocks(bus) == before


def test_where_dead_letters_are_skipped_two_events_of_a_key_still_never_run_at_once(
    bus: Engine, session: NewSession
) -> None:
    queue, before = bus.declare_queue("keys", kind="ordered", lanes=3, when_exhausted="skip"), deadlocks(bus)
    nothing_is_left(bus, queue, run(bus, session, queue))
    assert deadlocks(bus) == before


def nothing_is_left(bus: Engine, queue: int, history: History) -> None:
    assert bus.rows("SELECT key, state, seq FROM {bus}.exceptions WHERE queue_id = %s ORDER BY key, seq", queue) == []
    assert bus.rows("SELECT key FROM {bus}.dead_letters WHERE queue_id = %s", queue) == []
    assert history.settled == Counter(bus.column("SELECT event_id::text FROM {bus}.outbox"))
