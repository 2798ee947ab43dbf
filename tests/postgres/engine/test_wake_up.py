"""No committed event waits for the poll floor, and publishers notify only who sleeps.

See "Waking up" in docs/storage-engine.md.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import psycopg
import pytest
from psycopg import errors

from eventbus.postgres.migrate import migrate
from tests.postgres.engine.conftest import ClusterOf
from tests.postgres.engine.driver import Engine
from tests.postgres.engine.sessions import GATE, Background, NewSession, gate_closed, open_transaction


class Ears:
    """A session that hears what is sent to sleeping relays."""

    def __init__(self, engine: Engine, sender: Engine) -> None:
        self._engine = engine
        self._sender = sender
        self._channel = f"{engine.schema}.relay"
        engine.rows(f'LISTEN "{self._channel}"')

    def heard(self) -> int:
        """How many notifications there were since the last call: a mark sent now comes after all of them."""
        self._sender.rows(f"""NOTIFY "{self._channel}", 'mark'""")
        for count, told in enumerate(self._engine.connection.notifies(timeout=10)):
            if told.payload == "mark":
                return count
        raise AssertionError("the mark did not come")


@pytest.fixture
def ears(bus: Engine, session: NewSession) -> Ears:
    return Ears(session(), bus)


def wake(bus: Engine) -> None:
    """What a tick does that finds something."""
    bus.rows("SELECT setval('{bus}.relay_sleep', 0)")


def test_publishers_notify_nobody_while_the_relay_is_at_work(bus: Engine, ears: Ears) -> None:
    bus.publish()
    bus.publish_many(100)
    assert ears.heard() == 0


def test_a_sleeping_relay_is_woken_once_per_transaction_however_it_publishes(bus: Engine, ears: Ears) -> None:
    columns, values = "(event_id, topic, payload, size)", ("gen_random_uuid()", "'orders.created'", "'{}'", "2")
    ways: dict[str, Callable[[], object]] = {
        "publish()": bus.publish,
        "many": lambda: bus.publish_many(100),
        "delayed": lambda: bus.rows("SELECT {bus}.publish('orders.created', '{}', delay => '1 hour')"),
        "values": lambda: bus.rows(f"INSERT INTO {{bus}}.outbox {columns} VALUES ({', '.join(values)})"),
    }
    for way, publish in ways.items():
        assert bus.fall_asleep() is False
        with bus.connection.transaction():
            publish()
            publish()
        assert ears.heard() == 1, way
    with bus.connection.cursor().copy(f'COPY "{bus.schema}".outbox {columns} FROM STDIN'.encode()) as copy:
        copy.write_row(("00000000-0000-7000-8000-000000000000", "orders.created", "{}", 2))
    assert ears.heard() == 1


def test_nobody_is_woken_for_what_was_rolled_back(bus: Engine, ears: Ears) -> None:
    bus.fall_asleep()
    with bus.connection.transaction(force_rollback=True):
        bus.publish()
    with bus.connection.transaction(), bus.connection.transaction(force_rollback=True):
        bus.publish()
    assert ears.heard() == 0


def test_publishers_stop_notifying_when_the_relay_is_at_work_again(bus: Engine, ears: Ears) -> None:
    bus.resolve(["orders.created"])
    bus.fall_asleep()
    bus.publish()
    assert ears.heard() == 1
    assert bus.tick().events == 1
    bus.publish()
    assert ears.heard() == 0


def test_publishers_stop_notifying_a_relay_that_is_gone(bus: Engine, ears: Ears) -> None:
    bus.fall_asleep(-10)
    bus.publish()
    assert ears.heard() == 0


def test_a_relay_that_sleeps_long_is_woken_although_another_one_sleeps_less(bus: Engine, ears: Ears) -> None:
    bus.fall_asleep(60)
    bus.fall_asleep(-10)
    bus.publish()
    assert ears.heard() == 1


ORDERS = ["".join(order) for order in permutations("ICFT") if "".join(order).find("I") < "".join(order).find("C")]
ORDERS = [order for order in ORDERS if order.find("F") < order.find("T")]


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_no_committed_event_waits_for_the_poll_floor(
    bus: Engine, session: NewSession, ears: Ears, isolation: str
) -> None:
    """Insert, Commit, Fall asleep, Tick in every order: the relay has it, is told of it, or does not sleep."""
    bus.resolve(["orders.created"])
    publisher, relay = session(), session()
    for order in ORDERS:
        wake(bus)
        publisher.rows(f"BEGIN ISOLATION LEVEL {isolation}")
        publisher.rows("SELECT count(*) FROM {bus}.topics")  # takes the snapshot
        uncertain, relayed = False, 0
        for step in order:
            if step == "I":
                publisher.publish()
            elif step == "C":
                publisher.rows("COMMIT")
            elif step == "F":
                uncertain = relay.fall_asleep()
            else:
                relayed = relay.tick().events
        assert relayed or ears.heard() or uncertain, order
        bus.relay()
        assert uncertain is (order.find("I") < order.find("F") < order.find("C")), order


def test_a_publisher_in_the_middle_of_its_insert_either_wakes_the_relay_or_is_waited_for(
    bus: Engine, session: NewSession, background: Background, ears: Ears
) -> None:
    publisher, keeper = session(), session()
    with gate_closed(keeper):
        waiting = background.blocked(
            publisher,
            lambda: publisher.rows(
                "INSERT INTO {bus}.outbox (event_id, topic, payload, size) SELECT gen_random_uuid(), 'orders.created',"
                f" '{{}}', 2 FROM (SELECT pg_advisory_lock_shared({GATE}) OFFSET 0) gate"
            ),
        )
        assert bus.fall_asleep() is True
    waiting.result()
    assert ears.heard() == 1
    assert bus.fall_asleep() is False


def test_a_relay_need_not_look_for_those_who_only_read_or_maintain_the_outbox(bus: Engine, session: NewSession) -> None:
    other = session()
    for statement in (
        "SELECT * FROM {bus}.outbox",
        "LOCK TABLE {bus}.outbox IN ROW SHARE MODE",
        "ANALYZE {bus}.outbox",
    ):
        with open_transaction(other):
            other.rows(statement)
            assert bus.fall_asleep() is False


def test_two_phase_commits_work_while_no_relay_asks_to_be_woken_and_are_waited_for(
    cluster_of: ClusterOf, major: int
) -> None:
    dsn, schema = cluster_of(major).dsn(), "two-phase"
    migrate(dsn, schema)
    with psycopg.connect(dsn, autocommit=True) as first, psycopg.connect(dsn, autocommit=True) as second:
        bus, publisher = Engine(first, schema), Engine(second, schema)
        bus.declare(orders="#")
        publisher.rows("BEGIN")
        event = publisher.publish()
        publisher.rows("PREPARE TRANSACTION 'one'")
        bus.relay()
        assert bus.fall_asleep() is True
        publisher.rows("COMMIT PREPARED 'one'")
        bus.relay()
        assert bus.delivered(1) == [event]
        assert bus.fall_asleep() is False
        publisher.rows("BEGIN")
        publisher.publish()
        with pytest.raises(errors.FeatureNotSupported, match="NOTIFY"):
            publisher.rows("PREPARE TRANSACTION 'two'")


def test_consumers_are_told_once_per_tick_which_queues_were_fed(bus: Engine, session: NewSession) -> None:
    bus.declare(audit="#", other="other")
    bus.resolve(["orders.created"])
    listener = session()
    listener.rows(f'LISTEN "{bus.schema}.work"')
    bus.publish_many(10)
    bus.tick()
    assert bus.tick().state == "idle"
    bus.declare(**{f"queue{number}": "many" for number in range(400)})
    bus.publish("many")
    bus.relay()
    told = [one.payload for one in listener.connection.notifies(timeout=10, stop_after=2)]
    assert told == ["1,2", "*"]
