"""Whatever ends a call of the engine in its middle: nothing of it was written, and the same call can be made again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import psycopg
import pytest

from eventbus.testing.failpoints import CATALOGUE, Armed, Failpoints, Point
from tests.postgres.engine.driver import Engine
from tests.waiting import wait_until

Call = Callable[[Engine], None]
TABLES = "outbox deliveries ticks claims progress settlements exceptions dead_letters replays pauses processed_events"
DEAD = {"seq": 2, "outcome": "dead", "reason": "tests"}


def publish(bus: Engine) -> Call:
    return lambda session: session.publish_many(3)


def tick(bus: Engine) -> Call:
    bus.publish_many(3)
    bus.relay()
    bus.publish_many(3)

    def call(session: Engine) -> None:
        assert session.tick().deliveries == 3

    return call


def claim(bus: Engine) -> Call:
    bus.publish_many(3)
    bus.relay()
    worker = bus.register()

    def call(session: Engine) -> None:
        assert session.claimed(worker, 1).seqs == [1, 2, 3]

    return call


def settle(bus: Engine) -> Call:
    bus.publish_many(3)
    bus.relay()
    held = bus.claimed(bus.register(), 1)

    def call(session: Engine) -> None:
        assert session.settle(held, outcomes={held.id: [DEAD]}) == {held.id}
        assert session.column("SELECT seq FROM {bus}.dead_letters") == [2]

    return call


def record(bus: Engine) -> Call:
    bus.publish_many(3)
    bus.relay()
    held = bus.claimed(bus.register(), 1)

    def call(session: Engine) -> None:
        assert session.record(held, [1], [{"seq": 2, "outcome": "retry", "delay": 0}])
        assert session.column("SELECT seq FROM {bus}.exceptions") == [2]

    return call


def take_over(bus: Engine) -> Call:
    bus.publish_many(3)
    bus.relay()
    silent, heir = bus.register(), bus.register()
    bus.claimed(silent, 1)
    bus.fall_silent(silent)

    def call(session: Engine) -> None:
        assert session.take_over(heir) == (1, 3)

    return call


def redrive(bus: Engine) -> Call:
    settle(bus)(bus)
    letters = bus.column("SELECT id FROM {bus}.dead_letters")

    def call(session: Engine) -> None:
        assert session.value("SELECT {bus}.redrive(%s::bigint[])", letters) == letters
        assert session.column("SELECT seq FROM {bus}.exceptions") == [2]

    return call


def replay(bus: Engine) -> Call:
    bus.publish_many(3)
    bus.relay()
    number = bus.value("SELECT {bus}.begin_replay(1, NULL, NULL, ARRAY['orders.created'])")

    def call(session: Engine) -> None:
        assert session.value("SELECT deliveries FROM {bus}.replay_step(%s, 100, 100)", number) == 3

    return call


def pause(bus: Engine) -> Call:
    def call(session: Engine) -> None:
        assert session.pause(1, "tests")

    return call


def resume(bus: Engine) -> Call:
    assert bus.pause(1, "tests")

    def call(session: Engine) -> None:
        assert session.resume(1, "tests")

    return call


def purge(bus: Engine) -> Call:
    bus.rows(
        "INSERT INTO {bus}.processed_events (queue_id, event_id, claimed_at, completed_at)"
        " VALUES (1, gen_random_uuid(), now() - interval '1 day', now() - interval '1 day')"
    )

    def call(session: Engine) -> None:
        assert session.value("SELECT {bus}.purge_executions(3600, 100)") == 1

    return call


SCENARIOS: Final[Mapping[str, Callable[[Engine], Call]]] = {
    "published": publish,
    "mid_tick": tick,
    "claimed": claim,
    "mid_settle": settle,
    "mid_progress": record,
    "mid_take_over": take_over,
    "mid_redrive": redrive,
    "mid_replay": replay,
    "paused": pause,
    "resumed": resume,
    "mid_purge": purge,
}
each_point = pytest.mark.parametrize("point", CATALOGUE, ids=lambda point: point.name)


@pytest.fixture
def bus(conn: psycopg.Connection) -> Engine:
    bus = Engine(conn)
    bus.attach(resume=True)
    assert bus.declare(orders="orders.#") == {"orders": 1}
    bus.publish("orders.known")
    bus.relay()
    bus.resolve(["orders.created"])
    [first] = bus.claim_any(bus.register(), {1: 10})[0]
    bus.settle(first)
    bus.rows("TRUNCATE {bus}.deliveries, {bus}.claims, {bus}.progress, {bus}.settlements")
    return bus


@pytest.fixture
def points(dsn: str) -> Iterator[Failpoints]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Failpoints(connection)


@pytest.fixture
def victim(dsn: str) -> Iterator[Engine]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Engine(connection)


def written(bus: Engine) -> list[object]:
    """Everything that there is, but not how far the sequences are."""
    tables = [bus.rows(f"SELECT t::text FROM {{bus}}.{table} t ORDER BY 1") for table in TABLES.split()]
    return [*tables, bus.rows("SELECT id, state FROM {bus}.workers ORDER BY id")]


def test_no_point_is_without_a_scenario() -> None:
    assert [point.name for point in CATALOGUE] == [*SCENARIOS]


@each_point
@pytest.mark.parametrize("how", [Armed("fail"), Armed("kill")], ids=str)
def test_a_call_that_ends_at_a_point_has_written_nothing_and_can_be_made_again(
    bus: Engine, points: Failpoints, victim: Engine, point: Point, how: Armed
) -> None:
    call = SCENARIOS[point.name](bus)
    before = written(bus)
    with points.armed(point, how):
        with pytest.raises(psycopg.Error) as caught:
            call(victim)
        assert caught.value.sqlstate == ("57P01" if how.deed == "kill" else how.sqlstate)
        assert written(bus) == before
        call(bus)
    assert written(bus) != before


@each_point
def test_a_process_that_is_killed_while_it_is_stopped_at_a_point_leaves_nothing_behind(
    bus: Engine, points: Failpoints, victim: Engine, point: Point
) -> None:
    call = SCENARIOS[point.name](bus)
    before = written(bus)

    def die() -> None:
        with pytest.raises(psycopg.OperationalError):
            call(victim)

    with points.armed(point, Armed("stop")):
        dying = threading.Thread(target=die)
        pid = victim.pid
        dying.start()
        wait_until(lambda: points.stopped() == [pid])
        assert written(bus) == before
        bus.rows("SELECT pg_terminate_backend(%s)", pid)
        dying.join(60)
        wait_until(lambda: not points.stopped())
        assert written(bus) == before
        call(bus)
    assert written(bus) != before


@each_point
def test_a_call_that_waits_at_a_point_is_late_and_whole(
    bus: Engine, points: Failpoints, victim: Engine, point: Point
) -> None:
    call = SCENARIOS[point.name](bus)
    before = written(bus)
    with points.armed(point, Armed("stop")):
        late = threading.Thread(target=call, args=(victim,))
        late.start()
        wait_until(points.stopped)
        points.release()
        late.join(60)
        assert not late.is_alive()
    assert written(bus) != before


def test_a_point_can_delay_a_call_and_fail_it_as_a_timeout_does(
    bus: Engine, points: Failpoints, victim: Engine
) -> None:
    point, before = CATALOGUE[0], written(bus)
    call = SCENARIOS[point.name](bus)
    with points.armed(point, Armed("fail", sqlstate="57014")), pytest.raises(psycopg.errors.QueryCanceled):
        call(victim)
    began = time.monotonic()
    with points.armed(point, Armed("delay")):
        call(victim)
    assert time.monotonic() - began >= 0.1
    assert written(bus) != before


def test_a_bus_has_nothing_of_a_point_that_was_armed(bus: Engine, points: Failpoints) -> None:
    objects = (
        "SELECT relname FROM pg_class UNION ALL SELECT proname FROM pg_proc UNION ALL SELECT tgname FROM pg_trigger"
    )
    before = sorted(bus.column(objects))
    with points.armed(CATALOGUE[0], Armed("stop")):
        assert sorted(bus.column(objects)) != before
    assert sorted(bus.column(objects)) == before
