"""The happy path only inserts: see "Why it only inserts" in docs/storage-engine.md."""

from __future__ import annotations

from tests.postgres.engine.driver import Engine

EVENTS = 10_000
TABLES = ("outbox", "ticks", "deliveries", "claims", "progress", "settlements")


def changes(bus: Engine) -> dict[str, tuple[int, int, int]]:
    """(inserted, updated, deleted) rows of each table so far."""
    bus.rows("SELECT pg_stat_force_next_flush()")
    bus.rows("SELECT pg_stat_clear_snapshot()")
    return {
        table: (inserted, updated, deleted)
        for table, inserted, updated, deleted in bus.rows(
            "SELECT relname, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_user_tables"
            " WHERE schemaname = %s AND relname = ANY (%s)",
            bus.schema,
            list(TABLES),
        )
    }


def test_a_long_query_elsewhere_slows_nothing_because_draining_leaves_no_dead_rows(own_bus: Engine) -> None:
    bus = own_bus
    bus.resolve(["orders.created"])
    for _ in range(10):
        bus.publish_many(EVENTS // 10)
    bus.relay(400)
    worker = bus.register()
    claims = 0
    while claim := bus.claim(worker, 1, 200):
        claims += 1
        assert bus.record(claim, done=claim.seqs[:10])
        assert bus.settle(claim) == {claim.id}
        bus.beat(worker, {claim.id: claim.hi}, open_from=claim.id)
    assert {table: row[1:] for table, row in changes(bus).items()} == dict.fromkeys(TABLES, (0, 0))
    inserted = {table: row[0] for table, row in changes(bus).items()}
    assert inserted == {
        "outbox": EVENTS,
        "ticks": 1 + EVENTS // 400 + 1,
        "deliveries": EVENTS,
        "claims": claims,
        "settlements": claims,
        "progress": claims * 10,
    }
    assert claims == EVENTS // 200
