"""A queue that starts with the earliest event gets every event once, whatever happens while it is filled."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import psycopg
import psycopg.sql
import pytest

from eventbus.postgres.migrate import migrate
from tests.postgres.engine.conftest import ClusterOf
from tests.postgres.engine.driver import Engine
from tests.postgres.engine.publishers import Ledger, Publisher
from tests.postgres.engine.sessions import Background, NewSession, gate_closed, open_transaction, stop_before
from tests.postgres.engine.test_random_run import KILL_EVERY, PUBLISHERS, SECONDS, Ticker, in_threads, seed

__all__ = ["seed"]
FILLERS = 2


@dataclass(frozen=True, slots=True)
class Step:
    """What ``fill`` returned."""

    state: str
    events: int
    deliveries: int
    unknown: list[str]


def fill(bus: Engine, queue: int, limit: int = 1000) -> Step:
    [row] = bus.rows("SELECT state, events, deliveries, unknown FROM {bus}.fill(%s, %s)", queue, limit)
    return Step(*row)


def fill_up(bus: Engine, queue: int, limit: int = 1000) -> int:
    """Fill until the queue is active; how many steps it took."""
    for steps in range(1, 10_000):
        step = fill(bus, queue, limit)
        if step.unknown:
            bus.resolve(step.unknown)
        if step.state in ("filled", "active"):
            return steps
        assert step.state in ("more", "unknown"), step
    raise AssertionError("it never ended")


def declare(bus: Engine, name: str, *patterns: str, **more: object) -> int:
    wanted = [{"name": name, "patterns": patterns, "start": "earliest", **more}]
    [(_, number)] = bus.rows("SELECT name, id FROM {bus}.declare_queues(%s)", json.dumps(wanted))
    return int(number)


def state_of(bus: Engine, queue: int) -> str:
    return str(bus.value("SELECT state FROM {bus}.queues WHERE id = %s", queue))


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_an_old_event_is_delivered_once_and_in_order_with_those_published_during_and_after(
    bus: Engine, limit: int
) -> None:
    old = [bus.publish() for _ in range(7)]
    bus.relay(3)
    late = declare(bus, "late", "orders.#")
    during = []
    assert state_of(bus, late) == "filling"
    for _ in range(3):
        fill(bus, late, limit)
        during.append(bus.publish())
        bus.relay(2)
    fill_up(bus, late, limit)
    assert state_of(bus, late) == "active"
    after = [bus.publish() for _ in range(3)]
    bus.relay()
    assert bus.delivered(late) == bus.delivered(1) == old + during + after
    assert bus.column("SELECT seq FROM {bus}.deliveries WHERE queue_id = %s ORDER BY seq", late) == list(range(1, 14))
    assert bus.rows("SELECT * FROM {bus}.fillings") == []
    assert fill(bus, late).state == "active"


def test_only_topics_that_the_queue_wants_are_delivered_also_those_that_nobody_wanted_before(bus: Engine) -> None:
    bus.publish("users.created")
    wanted = [bus.publish("carts.filled"), bus.publish("carts.emptied")]
    bus.publish("orders.created")
    bus.relay()
    late = declare(bus, "late", "carts.*")
    fill_up(bus, late)
    assert bus.delivered(late) == wanted


def test_a_queue_that_is_first_on_an_empty_bus_is_active_at_once(bus: Engine) -> None:
    late = declare(bus, "late", "#")
    assert fill(bus, late).state == "filled"
    event = bus.publish()
    bus.relay()
    assert bus.delivered(late) == [event]


def test_events_that_the_relay_has_not_seen_come_from_the_relay_and_not_from_the_filling(bus: Engine) -> None:
    events = [bus.publish() for _ in range(3)]
    late = declare(bus, "late", "orders.#")
    assert fill(bus, late).state == "filled"
    bus.relay()
    assert bus.delivered(late) == events


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_a_queue_that_catches_up_in_the_middle_of_a_window_gets_its_rest_from_the_relay(
    bus: Engine, limit: int
) -> None:
    bus.publish()
    bus.relay()
    for size in (5, 4):
        for _ in range(size):
            bus.publish()
        bus.tick(2)
    late = declare(bus, "late", "orders.#")
    fill_up(bus, late, limit)
    assert bus.value("SELECT window_snapshot IS NOT NULL FROM {bus}.ticks ORDER BY id DESC LIMIT 1")
    bus.relay(2)
    assert bus.delivered(late) == bus.delivered(1)
    assert len(bus.delivered(late)) == 10


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_what_commits_late_with_a_low_number_is_delivered_once(bus: Engine, session: NewSession, limit: int) -> None:
    slow, slower = session(), session()
    with open_transaction(slower):
        events = [slower.publish()]
        with open_transaction(slow):
            slow.publish()
            for _ in range(3):
                bus.publish()
            bus.relay(2)
            late = declare(bus, "late", "orders.#")
            fill(bus, late, limit)
        bus.publish()
        bus.relay(2)
        fill(bus, late, limit)
        events += [slower.publish()]
    bus.tick(1)
    fill_up(bus, late, limit)
    bus.relay(2)
    assert sorted(bus.delivered(late)) == sorted(bus.delivered(1))
    assert len(set(bus.delivered(late))) == 7
    assert [event for event in bus.delivered(late) if event in events] == events


def test_an_event_whose_xid_was_drawn_after_the_relays_snapshot_and_its_id_before_the_bound_is_not_lost(
    own_bus: Engine, session: NewSession, background: Background
) -> None:
    relays, publishes = session(), session()
    stop_before(own_bus, "tick", "SELECT CASE WHEN s.is_called")
    own_bus.resolve(["orders.created"])
    with gate_closed(own_bus):
        events = [publishes.publish(), publishes.publish()]
        tick = background.blocked(relays, relays.tick)
        events.append(publishes.publish())
    assert tick.result().events == 2
    late = declare(own_bus, "late", "orders.#")
    own_bus.resolve(["orders.created"])
    assert fill(own_bus, late, 1).state == "more"
    own_bus.relay()
    fill_up(own_bus, late)
    assert own_bus.delivered(late) == events


def test_a_filling_waits_for_the_relay_and_for_a_paused_bus_instead_of_going_on(
    bus: Engine, session: NewSession
) -> None:
    bus.publish()
    bus.relay()
    late = declare(bus, "late", "orders.#")
    relay = session()
    with open_transaction(relay):
        bus_is_busy = relay.value("SELECT pg_advisory_xact_lock({bus}.lock_key('tick')) IS NOT NULL")
        assert bus_is_busy is not None
        assert fill(bus, late).state == "busy"
    bus.rows("UPDATE {bus}.bus SET state = 'paused'")
    assert fill(bus, late).state == "paused"
    bus.rows("UPDATE {bus}.bus SET state = 'running'")
    fill_up(bus, late)
    assert len(bus.delivered(late)) == 1


def test_a_queue_of_several_lanes_is_filled_into_them_and_keeps_the_order_of_each_key(bus: Engine) -> None:
    events = [(key, bus.publish(key=key)) for _ in range(5) for key in "abcdef"]
    bus.relay()
    late = declare(bus, "late", "orders.#", kind="ordered", lanes=4)
    fill_up(bus, late, 4)
    delivered = bus.delivered(late)
    assert sorted(delivered) == sorted(event for _, event in events)
    for key in "abcdef":
        mine = [event for its, event in events if its == key]
        assert [event for event in delivered if event in mine] == mine
    assert bus.value("SELECT count(DISTINCT lane) FROM {bus}.deliveries WHERE queue_id = %s", late) > 1


def test_events_are_consumed_while_their_queue_is_still_filling(bus: Engine) -> None:
    for _ in range(6):
        bus.publish()
    bus.relay()
    late = declare(bus, "late", "orders.#")
    worker = bus.register()
    bus.resolve(fill(bus, late, 2).unknown)
    fill(bus, late, 2)
    claim = bus.claimed(worker, late)
    assert bus.settle(claim) == {claim.id}
    fill_up(bus, late, 2)
    rest = bus.claimed(worker, late)
    assert [*claim.event_ids, *rest.event_ids] == bus.delivered(1)


def test_a_copy_that_is_restored_in_the_middle_of_a_filling_gets_the_rest_and_nothing_twice(bus: Engine) -> None:
    for _ in range(6):
        bus.publish()
    bus.relay()
    late = declare(bus, "late", "orders.#")
    bus.resolve(fill(bus, late, 4).unknown)
    fill(bus, late, 4)
    fresh = bus.publish()
    bus.rows("UPDATE {bus}.ticks SET system_identifier = 1")
    assert fill(bus, late).state == "busy"
    assert bus.attach() == "paused"
    bus.rows("UPDATE {bus}.bus SET state = 'running'")
    fill_up(bus, late, 2)
    bus.relay()
    assert bus.delivered(late) == bus.delivered(1)
    assert bus.delivered(late)[-1] == fresh


def test_a_hundred_thousand_old_events_are_filled_in_seconds_and_by_bounded_steps(own_bus: Engine) -> None:
    own_bus.publish_many(100_000)
    own_bus.relay(20_000)
    late = declare(own_bus, "late", "orders.#")
    began = time.monotonic()
    steps = fill_up(own_bus, late, 5_000)
    assert time.monotonic() - began < 30
    assert 20 <= steps <= 24
    assert own_bus.rows(
        "SELECT count(*), count(DISTINCT outbox_id), max(seq) FROM {bus}.deliveries WHERE queue_id = %s", late
    ) == [(100_000, 100_000, 100_000)]


class Filler:
    """Fills one queue; killed again and again, starts anew."""

    def __init__(self, dsn: str, seed: str, queue: Callable[[], int], stop: threading.Event) -> None:
        self.pid = 0
        self.deaths = 0
        self._dsn = dsn
        self._random = random.Random(seed)
        self._queue = queue
        self._stop = stop

    def run(self) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._dsn, autocommit=True) as connection:
                    self.pid = connection.info.backend_pid
                    self._fill(Engine(connection))
            except psycopg.OperationalError:
                self.deaths += 1

    def _fill(self, engine: Engine) -> None:
        while not self._stop.is_set():
            step = fill(engine, self._queue(), self._random.randrange(1, 200))
            if step.unknown:
                engine.resolve(step.unknown)
            if step.state in ("busy", "active"):
                self._stop.wait(0.002)


def test_every_committed_event_is_delivered_once_to_queues_that_begin_in_the_middle_of_everything(
    cluster_of: ClusterOf, major: int, seed: str
) -> None:
    cluster = cluster_of(major)
    name = f"filling_{time.time_ns():x}"
    with psycopg.connect(cluster.dsn(), autocommit=True) as admin:
        admin.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(name)))
    dsn = cluster.dsn(name)
    migrate(dsn, "eventbus")
    ledger, stop, stop_relays, failures = Ledger(), threading.Event(), threading.Event(), list[BaseException]()
    chosen = random.Random(seed)
    with ExitStack() as stack:
        bus = Engine(stack.enter_context(psycopg.connect(dsn, autocommit=True)))
        killer = Engine(stack.enter_context(psycopg.connect(dsn, autocommit=True)))
        everything = bus.declare(everything="#")["everything"]
        late: list[int] = []
        tickers = [Ticker(dsn, f"{seed}t{number}", stop_relays) for number in range(2)]
        fillers = [
            Filler(dsn, f"{seed}f{number}", lambda: chosen.choice(late or [everything]), stop_relays)
            for number in range(FILLERS)
        ]
        publishers = [
            Publisher(stack.enter_context(psycopg.connect(dsn)), ledger, f"{seed}p{number}", stop)
            for number in range(PUBLISHERS)
        ]

        def kill() -> None:
            while not stop.wait(KILL_EVERY):
                pid = chosen.choice([one.pid for one in tickers] + [one.pid for one in fillers])
                killer.rows("SELECT pg_terminate_backend(%s)", pid)

        relaying = in_threads([*(one.run for one in tickers), *(one.run for one in fillers)], failures)
        working = in_threads([*(publisher.run for publisher in publishers), kill], failures)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            stop.wait(SECONDS / 8)
            kind: dict[str, object] = {"kind": "ordered", "lanes": 3} if len(late) % 2 else {}
            late.append(declare(bus, f"late{len(late)}", "#", **kind))
        for flag, threads in ((stop, working), (stop_relays, relaying)):
            flag.set()
            for thread in threads:
                thread.join()
        assert failures == []
        bus.relay(50)
        reached = [queue for queue in late if state_of(bus, queue) == "active"]
        for queue in set(late) - set(reached):
            fill_up(bus, queue, 50)
        check(bus, ledger, everything, late)
    assert len(reached) > 3, "hardly any queue caught up while the bus was busy"
    assert sum(one.deaths for one in fillers) > 3


def check(bus: Engine, ledger: Ledger, everything: int, late: list[int]) -> None:
    expected = sorted(bus.delivered(everything))
    assert expected == sorted(ledger.committed)
    for queue in late:
        delivered = bus.delivered(queue)
        assert sorted(delivered) == expected, f"queue {queue}"
        place = {event: n for n, event in enumerate(delivered)}
        for key, published in ledger.by_key.items():
            assert sorted(published, key=place.__getitem__) == published, f"order of {key} in queue {queue}"
        assert (
            bus.rows(
                "SELECT lane FROM {bus}.deliveries WHERE queue_id = %s GROUP BY lane HAVING max(seq) <> count(*)", queue
            )
            == []
        ), "a gap in the numbers"
