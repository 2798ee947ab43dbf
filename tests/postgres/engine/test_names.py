"""Whatever the schema is called, whatever search_path says, and whoever else lives in the database."""

from __future__ import annotations

import uuid

import pytest

from tests.postgres.engine.conftest import NewBus
from tests.postgres.engine.driver import Engine
from tests.postgres.engine.sessions import NewSession, open_transaction

TRAPS = {
    "pg_notify(text, text)": "void",
    "set_config(text, text, boolean)": "text",
    "current_setting(text)": "text",
    "clock_timestamp()": "timestamptz",
    "pg_current_snapshot()": "pg_snapshot",
    "pg_current_xact_id()": "xid8",
    "pg_current_xact_id_if_assigned()": "xid8",
    "pg_visible_in_snapshot(xid8, pg_snapshot)": "boolean",
    "pg_snapshot_xip(pg_snapshot)": "SETOF xid8",
    "pg_try_advisory_xact_lock(bigint)": "boolean",
    "hashtextextended(text, bigint)": "bigint",
    "generate_series(bigint, bigint)": "SETOF bigint",
    "unnest(anyarray)": "SETOF anyelement",
    "cardinality(anyarray)": "integer",
    "octet_length(text)": "integer",
    "json_array_length(json)": "integer",
    "setval(regclass, bigint)": "bigint",
    "gen_random_uuid()": "uuid",
}
OPERATORS = ("=", "<", "<=", ">", ">=", "<>")
TYPES = ("bigint", "integer", "text", "uuid", "xid8", "timestamptz")


def set_traps(bus: Engine, schema: str) -> None:
    """Make functions and operators that look like those of the server and fail when they are called."""
    body = "LANGUAGE plpgsql AS $$ BEGIN RAISE 'trapped'; END $$"
    bus.rows(f"CREATE SCHEMA {schema}")
    for signature, result in TRAPS.items():
        bus.rows(f"CREATE FUNCTION {schema}.{signature} RETURNS {result} {body}")
    for type_name in TYPES:
        bus.rows(f"CREATE FUNCTION {schema}.trap({type_name}, {type_name}) RETURNS boolean {body}")
        for operator in OPERATORS:
            bus.rows(
                f"CREATE OPERATOR {schema}.{operator}"
                f" (FUNCTION = {schema}.trap, LEFTARG = {type_name}, RIGHTARG = {type_name})"
            )


def go_all_the_way(engine: Engine, queue: int) -> None:
    """Call every function that programs call, with outcomes of every kind."""
    for _ in range(6):
        engine.publish(key="k")
    engine.rows("SELECT {bus}.publish('orders.created', '{}', delay => interval '0')")
    engine.rows("SELECT {bus}.fire_due(10, '-infinity')")
    assert sum(tick.events for tick in engine.relay()) == 7
    dead, worker = engine.register(), engine.register()
    taken = engine.claimed(dead, queue, 1)
    engine.beat(dead, {taken.id: taken.lo}, open_from=taken.id)
    engine.rows("SELECT {bus}.unregister_worker(%s)", dead)
    assert engine.take_over(worker, lease=0.1, max_crashes=2) == (1, 1)
    assert len(engine.settle_due(engine.claim_due(worker, queue, alone=True), "done")) == 1
    claim = engine.claimed(worker, queue)
    assert engine.record(claim, done=[2], outcomes=[{"seq": 3, "outcome": "retry", "delay": 0}])
    said = [{"seq": 4, "outcome": "dead", "reason": "x"}, {"seq": 5, "hi": 6, "outcome": "released"}]
    assert engine.settle(claim, outcomes={claim.id: said}) == {claim.id}
    assert len(engine.settle_due(engine.claim_due(worker, queue), "done")) == 3
    engine.rows("SELECT {bus}.release_unknown(%s, ARRAY[1::bigint], ARRAY[1::bigint])", worker)
    engine.rows("SELECT {bus}.held(%s, 0), {bus}.fall_asleep(5), {bus}.is_foreign()", worker)


def test_nothing_depends_on_search_path_even_where_it_is_hostile(bus: Engine, session: NewSession) -> None:
    victim, evil = session(), f"evil_{uuid.uuid4().hex[:8]}"
    set_traps(bus, evil)
    for table in ("outbox", "ticks", "deliveries", "claims", "settlements", "progress", "exceptions", "workers", "bus"):
        victim.rows(f"CREATE TEMPORARY TABLE {table} (trap integer)")
    victim.rows(f"SET search_path = {evil}, pg_temp, pg_catalog")
    go_all_the_way(victim, 1)
    assert bus.column("SELECT reason FROM {bus}.dead_letters") == ["x"]


def test_attaching_does_not_depend_on_search_path(bus: Engine, session: NewSession) -> None:
    victim, evil = session(), f"evil_{uuid.uuid4().hex[:8]}"
    event = bus.publish()
    bus.rows("UPDATE {bus}.ticks SET system_identifier = 0")
    set_traps(bus, evil)
    victim.rows(f"SET search_path = {evil}, pg_temp, pg_catalog")
    assert victim.attach(resume=True) == "resumed"
    bus.relay()
    assert bus.delivered(1) == [event]


@pytest.mark.parametrize("schema", ["My-Bus_9", "_", "a-" * 20])
def test_a_bus_works_under_any_name_that_the_settings_allow(new_bus: NewBus, schema: str) -> None:
    bus = new_bus(schema)
    bus.declare(orders="orders.#")
    go_all_the_way(bus, 1)
    bus.rows(f'LISTEN "{schema}.work"')
    bus.rows(f'LISTEN "{schema}.relay"')
    assert bus.value("SELECT {bus}.fall_asleep(5)") is False
    bus.publish()
    bus.relay()
    heard = [(told.channel, told.payload) for told in bus.connection.notifies(timeout=5, stop_after=2)]
    assert heard == [(f"{schema}.relay", ""), (f"{schema}.work", "1")]


def test_two_buses_in_one_database_neither_block_nor_wake_each_other(new_bus: NewBus) -> None:
    names = (f"Bus{uuid.uuid4().hex[:8]}", f"bus{uuid.uuid4().hex[:8]}")
    first, second = buses = [new_bus(name) for name in names]
    for bus in buses:
        bus.declare(orders="orders.#")
        bus.resolve(["orders.created"])
        bus.publish_many(2)
    with open_transaction(first):
        assert (first.tick().events, second.tick().events) == (2, 2)
    with open_transaction(first):
        assert (first.claimed(first.register(), 1).seqs, second.claimed(second.register(), 1).seqs) == ([1, 2], [1, 2])
    second.rows(f'LISTEN "{second.schema}.relay"')
    for bus in buses:
        bus.rows("SELECT {bus}.fall_asleep(5)")
    first.publish()
    assert list(second.connection.notifies(timeout=0)) == []
    second.publish()
    assert len(list(second.connection.notifies(timeout=5, stop_after=1))) == 1
