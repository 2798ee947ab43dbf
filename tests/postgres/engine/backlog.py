"""A bus with a very large backlog and a very long past, whose statistics say that it is empty."""

from __future__ import annotations

from uuid import UUID

from tests.postgres.engine.driver import Engine

ROWS = 1_000_000
EXCEPTIONS = 100_000
PER_TRANSACTION = 50

DRAINED, WAITING, RETRYING, SMALL = 1, 2, 3, 4
"""Queues: a million claims are settled; a million deliveries wait; 100,000 retries wait; a few deliveries wait."""
SMALL_BACKLOG = 10_000


def prepare(bus: Engine) -> UUID:
    """Declare the queues of a fresh bus whose tables are not analysed by themselves; its oldest worker."""
    assert bus.declare(waiting="none", drained="none") == {"waiting": WAITING, "drained": DRAINED}
    assert bus.declare(retrying="none", small="orders.#") == {"retrying": RETRYING, "small": SMALL}
    for table in bus.column(
        "SELECT relname FROM pg_class WHERE relnamespace = '{bus}'::regnamespace AND relkind = 'r'"
    ):
        bus.rows(f"ALTER TABLE {{bus}}.{table} SET (autovacuum_enabled = false)")
    for table in ("settlements", "claims", "outbox", "deliveries", "exceptions", "scheduled", "workers"):
        bus.rows(f"ALTER TABLE {{bus}}.{table} SET UNLOGGED")  # quicker to fill, and planned alike
    bus.resolve(["orders.created"])
    return bus.register()


def use_everything(session: Engine) -> None:
    """Make a plan for every statement while the tables hold next to nothing; leaves a bus that is drained."""
    for _ in range(7):  # by then every plan is the one that stays
        session.publish_many(4)
        session.rows("SELECT {bus}.publish('orders.created', '{}', delay => interval '0')")
        session.rows("SELECT {bus}.fire_due(10, '-infinity')")
        session.relay()
        dead, worker = session.register(), session.register()
        claim = session.claimed(dead, SMALL, 1)
        session.beat(dead, {claim.id: claim.lo}, open_from=claim.id)
        session.fall_silent(dead)
        session.take_over(worker, max_crashes=2)
        session.settle_due(session.claim_due(worker, SMALL, alone=True), "done")
        claim = session.claimed(worker, SMALL)
        session.record(claim, done=[claim.lo], outcomes=[{"seq": claim.lo + 1, "outcome": "retry"}])
        session.settle(claim, outcomes={claim.id: [{"seq": claim.hi, "hi": claim.hi, "outcome": "released"}]})
        held = session.claim_due(worker, SMALL)
        session.settle_due(held[:1], "retry", delay=0)
        session.settle_due(held[1:], "dead", reason="x")
        session.settle_due(session.claim_due(worker, SMALL), "done")
        session.rows("SELECT {bus}.held(%s, 0)", worker)
        session.fall_asleep()
        for seconds, probe_seconds in ((600.0, None), (0.0, 600.0), (0.0, 0.001), (600.0, None)):
            session.pause(SMALL, "tests", seconds, probe_seconds)
            session.publish_many(1)
            session.relay()
            session.claim(worker, SMALL)
            session.claim_due(worker, SMALL)
        session.rows("SELECT {bus}.free_probe(%s, 'tests', gen_random_uuid())", SMALL)
        session.resume(SMALL, "tests")
        session.rows("DELETE FROM {bus}.workers WHERE id = ANY (%s)", [dead, worker])


def fill(bus: Engine, veteran: UUID) -> None:
    """The backlog and the past. The events come from transactions that committed before the next tick looks."""
    bus.rows("SET synchronous_commit = off")
    bus.rows("SET session_replication_role = replica")  # no triggers and foreign keys while we fill
    for table in ("outbox", "deliveries", "claims", "settlements", "ticks"):
        bus.rows(f"DELETE FROM {{bus}}.{table} {'WHERE id > 1' if table == 'ticks' else ''}")
    for table in ("outbox", "claims"):
        bus.rows(f"SELECT setval('{{bus}}.{table}_id_seq', 1, false)")
    _fill_past(bus, veteran)
    bus.rows("SET session_replication_role = origin")
    bus.rows("UPDATE {bus}.workers SET open_from = (SELECT max(id) + 1 FROM {bus}.claims) WHERE id = %s", veteran)


def _fill_past(bus: Engine, veteran: UUID) -> None:
    bus.rows(
        "INSERT INTO {bus}.outbox (xid, event_id, topic, payload, size)"
        " SELECT (3 + n / %s %% 400)::text::xid8, ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid,"
        " 'orders.created', '{}', 2 FROM generate_series(1, %s) n",
        PER_TRANSACTION,
        ROWS,
    )
    for queue, count in ((WAITING, ROWS), (SMALL, SMALL_BACKLOG)):
        bus.rows(
            "INSERT INTO {bus}.deliveries (queue_id, lane, seq, outbox_id, size)"
            " SELECT %s, 0, n, n, 2 FROM generate_series(1, %s) n",
            queue,
            count,
        )
    bus.rows(
        "INSERT INTO {bus}.claims (token, worker_id, queue_id, lane, lo, hi)"
        " SELECT ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid, %s, %s, 0, n, n"
        " FROM generate_series(1, %s) n",
        veteran,
        DRAINED,
        ROWS,
    )
    bus.rows("INSERT INTO {bus}.settlements (claim_id, kind) SELECT n, 'settled' FROM generate_series(1, %s) n", ROWS)
    bus.rows(
        "INSERT INTO {bus}.exceptions (due_at, seq, outbox_id, queue_id, lane, attempts, crashes, alone)"
        " SELECT clock_timestamp() - interval '1 hour' + n * interval '1 ms', n, n, %s, 0, 1, n %% 2, n %% 2 = 1"
        " FROM generate_series(1, %s) n",
        RETRYING,
        EXCEPTIONS,
    )
    bus.rows(
        "INSERT INTO {bus}.scheduled (due_at, event_id, topic, payload, size)"
        " SELECT clock_timestamp() - interval '1 hour' + n * interval '1 ms', gen_random_uuid(),"
        " 'orders.created', '{}', 2 FROM generate_series(1, %s) n",
        EXCEPTIONS,
    )
    bus.rows(
        "INSERT INTO {bus}.topics (topic, bindings_version, fanout)"
        " SELECT 'topic.' || n, (SELECT bindings_version FROM {bus}.bus), 1 FROM generate_series(1, %s) n",
        EXCEPTIONS,
    )
    bus.rows(
        "INSERT INTO {bus}.routes (topic_id, queue_id) SELECT id, %s FROM {bus}.topics WHERE topic LIKE 'topic.%%'",
        WAITING,
    )
    bus.rows(
        "INSERT INTO {bus}.workers (id, state, host, pid)"
        " SELECT gen_random_uuid(), 'dead', 'gone', n FROM generate_series(1, %s) n",
        EXCEPTIONS,
    )
