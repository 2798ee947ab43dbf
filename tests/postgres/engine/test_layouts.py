"""Lanes can be changed while a queue works: nothing is lost, nothing runs twice, every key keeps its order."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from eventbus.postgres.lanes import change_lanes
from tests.postgres.engine.driver import Engine, Held
from tests.postgres.engine.sessions import Background, NewSession, open_transaction
from tests.postgres.engine.test_random_run import in_threads
from tests.waiting import wait_until

DEAD = {"outcome": "dead", "reason": "gave up"}
Work = tuple[int, str | None, str]
"""Number, key and event id of something that a worker holds."""


class Worker:
    """Handles what it claims, one by one; every fifth try fails. Of each key, what follows a failure is parked.

    ``done`` is written before anything is settled, as the effects of a handler are.
    """

    def __init__(self, engine: Engine, queue: int, done: list[tuple[str | None, str]], seed: int) -> None:
        self.id = engine.register()
        self._engine = engine
        self._queue = queue
        self._done = done
        self._random = random.Random(seed)
        self._turn = seed

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            if not self.work():
                stop.wait(0.003)

    def work(self) -> int:
        """Claim and handle what there is; how many deliveries that were."""
        self._turn += 1
        claims, _ = self._engine.claim_any(self.id, {self._queue: 40}, turn=self._turn)
        for claim in claims:
            outcomes = self._handle(list(zip(claim.seqs, claim.keys, map(str, claim.event_ids), strict=True)))
            said = [{"seq": seq, **outcome} for seq, outcome in outcomes.items() if outcome]
            assert self._engine.settle(claim, outcomes={claim.id: said}) == {claim.id}
        held = self._engine.claim_due(self.id, self._queue)
        self._settle(held, self._handle([(one.id, one.key, str(one.event_id)) for one in held]))
        return sum(len(claim.seqs) for claim in claims) + len(held)

    def _settle(self, held: list[Held], outcomes: dict[int, dict[str, object]]) -> None:
        for wanted in ("retry", "parked", "done"):
            mine = [one for one in held if outcomes[one.id].get("outcome", "done") == wanted]
            if mine:
                assert self._engine.settle_due(mine, wanted, delay=0.01) == {one.id for one in mine}

    def _handle(self, work: list[Work]) -> dict[int, dict[str, object]]:
        outcomes: dict[int, dict[str, object]] = {}
        failed = set()
        for number, key, event_id in work:
            if key is not None and key in failed:
                outcomes[number] = {"outcome": "parked"}
            elif self._random.random() < 0.2:
                outcomes[number] = {"outcome": "retry", "delay": 0.01}
                failed.add(key)
            else:
                outcomes[number] = {}
                self._done.append((key, event_id))
        return outcomes


def drain(worker: Worker, bus: Engine, queue: int) -> None:
    """Work until nothing is left, and nobody else has anything."""

    def empty() -> bool:
        worker.work()
        return not bus.value("SELECT EXISTS (SELECT 1 FROM {bus}.exceptions WHERE queue_id = %s)", queue) and not (
            worker.work() or layouts(bus, queue)[1:]
        )

    wait_until(empty)


def layouts(bus: Engine, queue: int) -> list[tuple[str, int]]:
    return [
        (kind, lanes)
        for kind, lanes in bus.rows(
            "SELECT kind, lanes FROM {bus}.layouts WHERE queue_id = %s ORDER BY lane_from", queue
        )
    ]


def change(bus: Engine, name: str, lanes: int) -> None:
    change_lanes(bus.connection, bus.schema, name, lanes)


@pytest.mark.parametrize("steps", [(4, 32), (1, 8, 2, 64, 16), (1024, 1)])
def test_every_key_keeps_its_order_while_the_lanes_change_under_workers_that_fail(  # noqa: C901 - threads
    own_bus: Engine, session: NewSession, steps: tuple[int, ...]
) -> None:
    queue = own_bus.declare_queue("keyed", kind="ordered")
    done: list[tuple[str | None, str]] = []
    published: dict[str | None, list[str]] = {}
    stop, failures = threading.Event(), list[BaseException]()
    workers = [Worker(session(), queue, done, number) for number in range(4)]
    relay, publisher = session(), session()
    chosen = random.Random(1)

    def publish() -> None:
        while not stop.is_set():
            with publisher.connection.transaction():
                for _ in range(chosen.randrange(1, 20)):
                    key = f"key{chosen.randrange(100)}" if chosen.random() < 0.95 else None
                    published.setdefault(key, []).append(publisher.publish(key=key))

    def keep_relaying() -> None:
        while not stop.is_set():
            tick = relay.tick(100)
            if tick.unknown:
                relay.resolve(tick.unknown)
            elif tick.state != "ticked":
                stop.wait(0.002)

    calls: list[Callable[[], object]] = [publish, keep_relaying]
    calls += [lambda worker=worker: worker.run(stop) for worker in workers]  # type: ignore[misc]
    threads = in_threads(calls, failures)
    try:
        for place, lanes in enumerate(steps):
            before = len(done)
            wait_until(lambda before=before: len(done) > before + 300 or failures)  # type: ignore[misc]
            change(own_bus, "keyed", lanes)
            if place % 2 == 0:
                wait_until(lambda: len(layouts(own_bus, queue)) == 1 or failures)
        wait_until(lambda: len(layouts(own_bus, queue)) == 1 or failures)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    own_bus.relay()
    drain(workers[0], own_bus, queue)
    assert layouts(own_bus, queue) == [("ordered", steps[-1])]
    assert Counter(event for _, event in done) == Counter(event for events in published.values() for event in events)
    for key, events in published.items():
        if key is not None:
            assert [event for its, event in done if its == key] == events


def test_new_lanes_are_claimed_from_only_when_the_old_ones_are_empty(bus: Engine) -> None:
    queue = bus.declare_queue("keyed", kind="ordered", lanes=2)
    worker = bus.register()
    bus.publish_keyed("a1", "b1")
    bus.relay()
    first, _ = bus.claim_any(worker, {queue: 10})
    change(bus, "keyed", 3)
    change(bus, "keyed", 1)
    bus.publish_keyed("a2", "b2")
    bus.relay()
    assert bus.claim(worker, queue) is None, "an event ran before an earlier one of its key was done"
    retried = first[0].seqs[0]
    bus.settle(*first, outcomes={first[0].id: [{"seq": retried, "outcome": "retry", "delay": 0}]})
    later: list[object] = []
    while (claim := bus.claim(worker, queue)) or len(layouts(bus, queue)) > 1:
        later += claim.payloads if claim else []
    assert layouts(bus, queue) == [("ordered", 1)]
    failed = first[0].payloads[0]
    assert later == [label for label in ("a2", "b2") if str(label)[0] != str(failed)[0]]
    due = bus.claim_due(worker, queue)
    assert [one.payload for one in due] == [failed, f"{str(failed)[0]}2"]


def fill_with_everything(bus: Engine, queue: int, worker: object) -> None:
    """Of a plain queue: a released range, a waiting retry and its successors, a dead letter, each with keys."""
    bus.publish_keyed("a1", "b1", "a2", "c1", "b2", "a3", "d1", "d2", "1")
    bus.relay()
    claim = bus.claimed(worker, queue)  # type: ignore[arg-type]
    bus.settle(
        claim,
        outcomes={
            claim.id: [
                {"seq": claim.seq("a1"), "outcome": "retry", "delay": 0},
                {"seq": claim.seq("a2"), "outcome": "retry", "delay": 0},
                {"seq": claim.seq("c1"), **DEAD},
                {"seq": claim.seq("a3"), "hi": claim.seq("d2"), "outcome": "released"},
            ]
        },
    )


def rows_of(bus: Engine, queue: int) -> list[tuple[str, str, str | None]]:
    return [
        (payload, state, key)
        for payload, state, key in bus.rows(
            "SELECT o.payload #>> '{}', e.state, e.key FROM {bus}.exceptions e"
            " JOIN {bus}.outbox o ON o.id = e.outbox_id WHERE e.queue_id = %s ORDER BY 1",
            queue,
        )
    ]


def test_a_queue_that_becomes_ordered_runs_what_it_had_left_in_the_order_of_the_keys(bus: Engine) -> None:
    queue = bus.declare_queue("work")
    worker = bus.register()
    fill_with_everything(bus, queue, worker)
    assert bus.declare_queue("work", kind="ordered", lanes=3) == queue
    bus.publish_keyed("a4", "c2")
    bus.relay()
    claim = bus.claim(worker, queue)
    assert layouts(bus, queue) == [("ordered", 3)]
    assert (
        rows_of(bus, queue)[:5]
        == [
            ("a1", "waiting", "a"),
            ("a2", "parked", "a"),
            ("a3", "parked", "a"),
            *([("a4", "parked", "a")] if len(rows_of(bus, queue)) > 5 else []),
            ("d1", "waiting", "d"),
            ("d2", "parked", "d"),
        ][:5]
    )
    assert claim is None or list(claim.payloads) == ["c2"], "a dead letter of a plain queue blocks nothing"


def test_a_queue_that_stops_being_ordered_lets_everything_run_and_blocks_nothing_when_it_is_ordered_again(
    bus: Engine,
) -> None:
    queue = bus.declare_queue("work", kind="ordered", lanes=4)
    worker = bus.register()
    bus.publish_keyed("a1", "a2", "b1", "b2")
    bus.relay()
    claims, _ = bus.claim_any(worker, {queue: 100})
    bus.settle(
        *claims,
        outcomes={
            claim.id: [
                {"seq": seq, **(DEAD if label == "a1" else {"outcome": "retry" if label == "b1" else "parked"})}
                for seq, label in zip(claim.seqs, claim.payloads, strict=True)
            ]
            for claim in claims
        },
    )
    assert [state for _, state, _ in rows_of(bus, queue)] == ["parked", "waiting", "parked"]
    bus.declare_queue("work", kind="plain")
    assert bus.claim(worker, queue) is None
    assert layouts(bus, queue) == [("plain", 1)]
    assert rows_of(bus, queue) == [("a2", "waiting", None), ("b1", "waiting", None), ("b2", "waiting", None)]
    assert bus.column("SELECT blocks FROM {bus}.dead_letters") == [False]
    bus.declare_queue("work", kind="ordered", lanes=2)
    bus.claim(worker, queue)
    assert rows_of(bus, queue) == [("a2", "waiting", "a"), ("b1", "waiting", "b"), ("b2", "parked", "b")]
    bus.declare_queue("work", kind="prioritized")
    bus.claim(worker, queue)
    assert layouts(bus, queue) == [("prioritized", 3)]
    due = bus.claim_due(worker, queue)
    assert sorted(str(one.payload) for one in due) == ["a2", "b1", "b2"]
    bus.settle_due(due, "done")
    assert rows_of(bus, queue) == []


def test_events_of_a_prioritized_queue_that_becomes_ordered_run_one_at_a_time_in_each_key(bus: Engine) -> None:
    queue = bus.declare_queue("work", kind="prioritized", lanes=3)
    worker = bus.register()
    for priority in (9, 0, 5, 9):
        bus.publish(key="a", priority=priority)
    bus.relay()
    claims, _ = bus.claim_any(worker, {queue: 100})
    assert len(claims) == 3
    for claim in claims:
        bus.settle(claim, outcomes={claim.id: [{"seq": seq, "outcome": "retry", "delay": 0} for seq in claim.seqs]})
    bus.declare_queue("work", kind="ordered")
    bus.claim(worker, queue)
    assert sorted(state for _, state, _ in rows_of(bus, queue)) == ["parked", "parked", "parked", "waiting"]


def test_what_a_worker_runs_when_the_queue_becomes_ordered_is_waited_for(bus: Engine) -> None:
    queue = bus.declare_queue("work")
    worker = bus.register()
    bus.publish_keyed("a1", "a2")
    bus.relay()
    claim = bus.claimed(worker, queue)
    bus.settle(claim, outcomes={claim.id: [{"seq": seq, "outcome": "retry", "delay": 0} for seq in claim.seqs]})
    running = bus.claim_due(worker, queue, limit=1)
    bus.declare_queue("work", kind="ordered")
    bus.publish_keyed("a3")
    bus.relay()
    assert bus.claim(worker, queue) is None
    assert len(layouts(bus, queue)) == 2
    bus.settle_due(running, "done")
    assert bus.claim(worker, queue) is None, "a3 is parked behind a2"
    assert rows_of(bus, queue) == [("a2", "waiting", "a"), ("a3", "parked", "a")]


def test_a_released_range_that_is_taken_apart_while_the_layout_ends_runs_once(
    own_bus: Engine, session: NewSession, background: Background
) -> None:
    queue = own_bus.declare_queue("work")
    worker, other = own_bus.register(), own_bus.register()
    own_bus.publish_keyed("a1", "a2", "a3", "a4")
    own_bus.relay()
    claim = own_bus.claimed(worker, queue)
    own_bus.settle(claim, outcomes={claim.id: [{"seq": claim.lo, "hi": claim.hi, "outcome": "released"}]})
    own_bus.declare_queue("work", kind="prioritized")
    taker, ender = session(), session()
    with open_transaction(taker):
        taken = taker.claim_due(worker, queue, limit=2)
        ending = background.blocked(ender, lambda: ender.claim(other, queue))
    assert ending.result() is None
    assert [label for label, _, _ in rows_of(own_bus, queue)] == ["a1", "a2", "a3", "a4"], "twice or never"
    assert own_bus.settle_due(taken, "done") == {one.id for one in taken}
    rest = own_bus.claim_due(other, queue)
    assert [one.payload for one in rest] == ["a3", "a4"]


def test_a_parked_event_whose_outbox_row_is_gone_does_not_keep_its_layout_for_ever(bus: Engine) -> None:
    queue = bus.declare_queue("work", kind="ordered", lanes=2)
    worker = bus.register()
    bus.publish_keyed("a1", "a2")
    bus.relay()
    [claim], _ = bus.claim_any(worker, {queue: 100})
    bus.settle(claim, outcomes={claim.id: [
        {"seq": claim.lo, "outcome": "retry", "delay": 0}, {"seq": claim.hi, "outcome": "parked"}]})  # fmt: skip
    bus.rows("DELETE FROM {bus}.outbox")
    change(bus, "work", 5)
    assert bus.claim(worker, queue) is None
    assert layouts(bus, queue) == [("ordered", 5)]
    assert bus.column("SELECT state FROM {bus}.exceptions ORDER BY seq") == ["waiting", "parked"]


def test_redriving_waits_until_a_layout_has_ended_so_that_no_letter_returns_to_lanes_that_are_gone(
    own_bus: Engine, session: NewSession
) -> None:
    queue = own_bus.declare_queue("work", kind="ordered", lanes=2)
    worker = own_bus.register()
    change(own_bus, "work", 3)
    redriver = session()
    with open_transaction(redriver):
        redriver.rows("SELECT pg_advisory_xact_lock({bus}.lock_key('tick'))")
        own_bus.publish_keyed("a1")
        assert own_bus.claim(worker, queue) is None
        assert len(layouts(own_bus, queue)) == 2
    own_bus.claim(worker, queue)
    assert len(layouts(own_bus, queue)) == 1


@pytest.mark.parametrize("lane", [0, 1, 2, 4])
def test_a_layout_does_not_end_while_somebody_changes_keys_in_one_of_its_lanes_or_the_next(
    bus: Engine, session: NewSession, lane: int
) -> None:
    queue = bus.declare_queue("work", kind="ordered", lanes=2)
    worker, other = bus.register(), session()
    change(bus, "work", 3)
    with open_transaction(other):
        other.rows("SELECT pg_advisory_xact_lock({bus}.lock_key('lane', %s, %s))", queue, lane)
        assert bus.claim(worker, queue) is None
        assert len(layouts(bus, queue)) == 2
    bus.claim(worker, queue)
    assert len(layouts(bus, queue)) == 1
