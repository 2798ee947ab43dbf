"""The rules of the tick, each shown by the interleaving that breaks it: see "The relay" in docs/storage-engine.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
from psycopg import errors

from tests.postgres.engine.driver import Engine
from tests.postgres.engine.sessions import GATE, Background, NewSession, gate_closed, open_transaction, stop_before

COLUMNS = "(event_id, topic, payload, size)"
NEW = "gen_random_uuid(), 'orders.created', '{}'::json, 2"


def copy(session: Engine) -> None:
    statement = f'COPY "{session.schema}".outbox {COLUMNS} FROM STDIN'
    with session.connection.cursor().copy(statement.encode()) as rows:
        for number in range(3):
            rows.write_row((f"00000000-0000-7000-8000-00000000000{number}", "orders.created", "{}", 2))


def trigger(session: Engine) -> None:
    session.rows("INSERT INTO {bus}.business VALUES (1)")


WAYS: dict[str, Callable[[Engine], object]] = {
    "values": lambda s: s.rows(f"INSERT INTO {{bus}}.outbox {COLUMNS} VALUES ({NEW}), ({NEW}), ({NEW})"),
    "select": lambda s: s.rows(f"INSERT INTO {{bus}}.outbox {COLUMNS} SELECT {NEW} FROM generate_series(1, 3)"),
    "ordered select": lambda s: s.rows(
        f"INSERT INTO {{bus}}.outbox {COLUMNS} SELECT {NEW} FROM generate_series(1, 3) n ORDER BY random() LIMIT 2"
    ),
    "upsert": lambda s: s.rows(f"INSERT INTO {{bus}}.outbox {COLUMNS} VALUES ({NEW}) ON CONFLICT DO NOTHING"),
    "cte": lambda s: s.rows(f"WITH e AS (INSERT INTO {{bus}}.outbox {COLUMNS} VALUES ({NEW}) RETURNING 1) TABLE e"),
    "publish()": lambda s: s.publish(),
    "trigger": trigger,
    "COPY": copy,
}


def test_no_event_is_lost_however_it_was_inserted_because_the_xid_comes_before_the_id(
    own_bus: Engine, session: NewSession, background: Background
) -> None:
    """The position bounds ids by xids: whoever draws an id must have its xid already."""
    bus = own_bus
    bus.rows("CREATE TABLE {bus}.business (id integer)")
    bus.rows("""CREATE FUNCTION {bus}.announce() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM {bus}.publish('orders.created', '{}'); RETURN NULL; END $$""")
    bus.rows("CREATE TRIGGER announce AFTER INSERT ON {bus}.business EXECUTE FUNCTION {bus}.announce()")
    alters, publishes = session(), session()
    for way, publish in WAYS.items():
        drawn = bus.rows("SELECT last_value, is_called FROM {bus}.outbox_id_seq")
        with open_transaction(alters):
            alters.rows("ALTER SEQUENCE {bus}.outbox_id_seq CACHE 1")  # whoever draws an id now waits
            waiting = background.blocked(publishes, partial(publish, publishes))
            assert bus.value("SELECT backend_xid IS NOT NULL FROM pg_stat_activity WHERE pid = %s", publishes.pid), way
            assert bus.rows("SELECT last_value, is_called FROM {bus}.outbox_id_seq") == drawn, way
        waiting.result()
    bus.relay()
    assert bus.delivered(1) == bus.column("SELECT event_id::text FROM {bus}.outbox ORDER BY id")
    assert len(bus.delivered(1)) == 3 + 3 + 2 + 1 + 1 + 1 + 1 + 3


def test_no_event_is_lost_whose_xid_was_drawn_after_the_snapshot_and_its_id_before_the_bound(
    own_bus: Engine, session: NewSession, background: Background
) -> None:
    bus = own_bus
    relays, publishes = session(), session()
    stop_before(bus, "tick", "SELECT CASE WHEN s.is_called")
    bus.resolve(["orders.created"])
    with gate_closed(bus):
        first = background.blocked(relays, relays.tick)
        late = publishes.publish()
    assert first.result().state == "idle"
    with gate_closed(bus):  # once more, with something to relay, so that the position moves past the id
        early = publishes.publish()
        second = background.blocked(relays, relays.tick)
        between = publishes.publish()
    assert second.result().events == 2
    assert bus.rows("SELECT ids_upto FROM {bus}.ticks ORDER BY id DESC LIMIT 1") == [(3,)]
    bus.relay()
    assert bus.delivered(1) == [late, early, between]


def test_no_event_is_relayed_twice_by_a_tick_whose_statement_began_before_the_last_tick_committed(
    bus: Engine, session: NewSession, background: Background
) -> None:
    """First the lock, then new statements: what the outer statement sees is older than the lock."""
    event = bus.publish()
    bus.resolve(["orders.created"])
    first, second = session(), session()
    late = (
        f"WITH gate AS MATERIALIZED (SELECT pg_advisory_xact_lock({GATE}))"
        " SELECT t.state FROM gate, LATERAL {bus}.tick(1000) t"
    )
    with gate_closed(first):
        waiting = background.blocked(second, lambda: second.value(late))
        assert first.tick().events == 1
    assert waiting.result() == "idle"
    assert bus.delivered(1) == [event]


def test_no_relay_waits_for_another_or_repeats_its_work(bus: Engine, session: NewSession) -> None:
    event = bus.publish()
    bus.resolve(["orders.created"])
    first = session()
    with open_transaction(first):
        assert first.tick().events == 1
        assert bus.tick().state == "busy"
    assert bus.tick().state == "idle"
    assert bus.delivered(1) == [event]


def test_no_event_is_lost_to_a_tick_inside_a_transaction_that_has_written(bus: Engine) -> None:
    """Its own xid would be in progress in the snapshot and older than the bound that protects stragglers."""
    event = bus.publish()
    bus.resolve(["orders.created"])
    with bus.connection.transaction(force_rollback=True):
        bus.rows("SELECT pg_current_xact_id()")
        with pytest.raises(errors.InvalidTransactionState, match="first write"):
            bus.tick()
    bus.relay()
    assert bus.delivered(1) == [event]


CALLS = {
    "tick": "SELECT {bus}.tick(1)",
    "declare_queues": "SELECT {bus}.declare_queues('[]')",
    "resolve_topics": "SELECT {bus}.resolve_topics(1, '{}')",
    "beat": "SELECT {bus}.beat(gen_random_uuid(), 30, 0, '{}')",
    "claim": "SELECT {bus}.claim(gen_random_uuid(), gen_random_uuid(), '{1}', '{1}', 1)",
    "claim_due": "SELECT {bus}.claim_due(gen_random_uuid(), gen_random_uuid(), '{1}', '{1}', '{-infinity}', 1, false)",
    "settle": "SELECT {bus}.settle('{1}', ARRAY[gen_random_uuid()], NULL)",
    "record_progress": "SELECT {bus}.record_progress(1, gen_random_uuid(), '{1}', '[]')",
    "settle_exceptions": "SELECT {bus}.settle_exceptions('{1}', ARRAY[gen_random_uuid()], '[]')",
    "release_unknown": "SELECT {bus}.release_unknown(gen_random_uuid(), '{1}', '{}')",
    "pause_queue": "SELECT {bus}.pause_queue(1, 'tests', 'x', NULL, NULL)",
    "resume_queue": "SELECT {bus}.resume_queue(1, 'tests')",
    "free_probe": "SELECT {bus}.free_probe(1, 'tests', gen_random_uuid())",
    "take_over": "SELECT {bus}.take_over(gen_random_uuid(), 30, 3)",
}


def test_nothing_is_decided_by_an_old_snapshot(bus: Engine) -> None:
    for isolation in ("REPEATABLE READ", "SERIALIZABLE"):
        for call in CALLS.values():
            with (
                pytest.raises(errors.InvalidTransactionState, match="needs READ COMMITTED"),
                open_transaction(bus, isolation),
            ):
                bus.rows(call)


def test_no_queue_misses_events_because_it_was_declared_while_a_topic_was_being_resolved(bus: Engine) -> None:
    event = bus.publish()
    assert bus.tick().unknown == ["orders.created"]
    version, _ = bus.bindings()
    assert bus.declare(audit="#") == {"audit": 2}
    stored = bus.value("SELECT {bus}.resolve_topics(%s, %s)", version, json.dumps({"orders.created": [1]}))
    assert stored is False
    assert bus.rows("SELECT * FROM {bus}.topics") == []
    bus.relay()
    assert bus.delivered(1) == bus.delivered(2) == [event]


def test_no_queue_misses_events_of_a_topic_that_was_resolved_before_it_existed(bus: Engine) -> None:
    before = bus.publish()
    bus.relay()
    bus.declare(audit="#")
    after = bus.publish()
    bus.relay()
    assert bus.delivered(1) == [before, after]
    assert bus.delivered(2) == [after]


def test_declaring_a_queue_waits_for_the_tick_that_is_at_work(
    bus: Engine, session: NewSession, background: Background
) -> None:
    bus.publish()
    bus.resolve(["orders.created"])
    relays, declares = session(), session()
    with open_transaction(relays):
        relays.tick()
        waiting = background.blocked(declares, lambda: declares.declare(audit="#"))
    assert waiting.result() == {"audit": 2}


def test_order_is_kept_and_nothing_is_lost_when_a_new_topic_turns_up_in_the_middle(bus: Engine) -> None:
    bus.resolve(["orders.created"])
    events = [bus.publish(), bus.publish("orders.paid"), bus.publish()]
    first = bus.tick()
    assert (first.events, first.unknown) == (1, ["orders.paid"])
    bus.relay()
    assert bus.delivered(1) == events


def test_a_tick_writes_no_more_deliveries_than_asked_and_at_least_one_event(bus: Engine) -> None:
    bus.declare(a="#", b="#", c="#")
    bus.publish_many(5)
    bus.resolve(["orders.created"])
    assert [(tick.events, tick.deliveries) for tick in bus.relay(8)] == [(2, 8), (2, 8), (1, 4)]
    bus.publish_many(2)
    assert [(tick.events, tick.deliveries) for tick in bus.relay(3)] == [(1, 4), (1, 4)]


def test_an_event_that_no_queue_wants_is_counted_and_holds_nothing_up(bus: Engine) -> None:
    bus.publish("stock.moved")
    wanted = bus.publish()
    bus.relay()
    assert bus.delivered(1) == [wanted]
    assert bus.rows("SELECT topic, fanout, unrouted FROM {bus}.topics ORDER BY topic") == [
        ("orders.created", 1, 0),
        ("stock.moved", 0, 1),
    ]


def test_nothing_is_relayed_while_the_bus_is_paused_and_nothing_lost_afterwards(bus: Engine) -> None:
    event = bus.publish()
    bus.resolve(["orders.created"])
    bus.rows("UPDATE {bus}.bus SET state = 'paused'")
    assert bus.tick().state == "paused"
    bus.rows("UPDATE {bus}.bus SET state = 'running'")
    bus.relay()
    assert bus.delivered(1) == [event]


def test_nothing_is_relayed_twice_even_if_two_ticks_start_from_one_position(
    own_bus: Engine, session: NewSession, background: Background
) -> None:
    """With a lock that does not exclude, the keys of ticks and deliveries still do."""
    bus = own_bus
    event = bus.publish()
    bus.resolve(["orders.created"])
    bus.rows("CREATE SEQUENCE {bus}.no_lock")
    bus.rows(
        "CREATE OR REPLACE FUNCTION {bus}.lock_key(kind text, queue_id integer DEFAULT 0, lane integer DEFAULT 0)"
        " RETURNS bigint LANGUAGE sql VOLATILE RETURN nextval('{bus}.no_lock')"
    )
    first, stale = session(), session()
    with open_transaction(first):
        assert first.tick().events == 1
        waiting = background.blocked(stale, stale.tick)
    with pytest.raises(errors.UniqueViolation):
        waiting.result()
    assert bus.delivered(1) == [event]
