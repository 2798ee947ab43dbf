"""What a scrape says of the database is what is there, and what cannot be read leaves the rest alone."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from eventbus.postgres import admin
from eventbus.postgres.migrate import migrate
from eventbus_prometheus.database import Database, Reading
from eventbus_prometheus.sections import SECTIONS
from eventbus_prometheus.tests.scraped import Samples, of, read, settings
from tests.postgres.line import DEAD, RETRY, SCHEMA, Line
from tests.servers import Cluster
from tests.waiting import wait_until

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
ALWAYS = {section.name for section in SECTIONS if section.relation is None}
EVERY = {section.name for section in SECTIONS}
one_version = pytest.mark.parametrize("major", [18], indirect=True)


@pytest.fixture
def line(conn: psycopg.Connection) -> Line:
    line = Line(conn)
    line.declare(ledger=["orders.#"])
    line.live()
    return line


def figures(found: Samples, queue: str) -> list[float]:
    names = ("waiting_events", "running_events", "retrying_events", "parked_events", "dead_letters")
    return [found[f"eventbus_queue_{name}", queue] for name in names]


def assert_agrees_with_the_command_line(dsn: str, line: Line) -> list[float]:
    """``eventbus queues`` says the same of each queue; the figures of the first one."""
    found = of(read(dsn))
    queues = admin.queues(line.conn, SCHEMA)
    for queue in queues:
        said = [queue.waiting, queue.running, queue.retrying, queue.parked, queue.dead]
        assert figures(found, queue.name) == said
        age = found["eventbus_queue_oldest_age_seconds", queue.name]
        assert age == pytest.approx(queue.oldest_age or 0.0, abs=5.0)
    return figures(found, queues[0].name)


def test_every_event_of_a_queue_is_in_the_figure_where_the_command_line_has_it(dsn: str, line: Line) -> None:
    for number in range(10):
        line.publish(payload=number)
    line.conn.execute("UPDATE eventbus.outbox SET published_at = published_at - interval '1 hour'")
    line.relay()
    assert assert_agrees_with_the_command_line(dsn, line) == [10, 0, 0, 0, 0]
    claim = line.claim("ledger", 6)
    line.conn.execute("SELECT eventbus.record_progress(%s, %s, ARRAY[1::bigint], '[]')", claim[:2])
    assert assert_agrees_with_the_command_line(dsn, line) == [4, 5, 0, 0, 0]
    assert line.settle(claim, s3=RETRY, s4=DEAD, s5={"outcome": "released", "hi": 6})
    assert assert_agrees_with_the_command_line(dsn, line) == [6, 0, 1, 0, 1]
    line.conn.execute("UPDATE eventbus.exceptions SET due_at = clock_timestamp() WHERE attempts = 1")
    held = line.claim_due("ledger")
    assert assert_agrees_with_the_command_line(dsn, line) == [4, 3, 0, 0, 1]
    assert of(read(dsn))["eventbus_queue_oldest_age_seconds", "ledger"] > 3600
    assert all(line.settle_exception(one, outcome="done") for one in held)
    assert line.settle(line.claim("ledger"))
    assert assert_agrees_with_the_command_line(dsn, line) == [0, 0, 0, 0, 1]
    assert of(read(dsn))["eventbus_queue_oldest_age_seconds", "ledger"] == 0


@pytest.mark.parametrize("kept", ["never claimed", "released alone", "released range", "retried", "claimed"])
def test_the_oldest_event_has_its_age_wherever_it_waits(dsn: str, line: Line, kept: str) -> None:
    for minutes in (20, 10, 0):
        line.conn.execute(
            "UPDATE eventbus.outbox SET published_at = published_at - make_interval(mins => %s) WHERE event_id = %s",
            [minutes, line.publish()],
        )
    line.relay()
    if kept != "never claimed":
        claim = line.claim("ledger", 2)
        outcome = RETRY if kept == "retried" else {"outcome": "released"}
        if kept != "claimed":
            assert line.settle(claim, s1=outcome | ({"hi": 2} if kept == "released range" else {}))
    age = of(read(dsn))["eventbus_queue_oldest_age_seconds", "ledger"]
    assert age == pytest.approx(0 if kept == "claimed" else 1200, abs=30)


def test_what_is_parked_behind_its_key_in_an_ordered_queue_is_counted_and_has_an_age(dsn: str, line: Line) -> None:
    wanted = [{"name": "keyed", "patterns": ["orders.#"], "kind": "ordered", "lanes": 4}]
    line.numbers |= dict(
        line.conn.execute("SELECT name, id FROM eventbus.declare_queues(%s)", [json.dumps(wanted)]).fetchall()
    )
    for key in ("a", "a", "a", "b"):
        line.publish(key=key)
    line.relay()
    lane_of_a = line.one("SELECT lane FROM eventbus.deliveries WHERE queue_id = %s ORDER BY outbox_id LIMIT 1",
                         line.numbers["keyed"])  # fmt: skip
    assert lane_of_a is not None
    assert assert_agrees_with_the_command_line(dsn, line)[0] == 4
    parked = {"outcome": "parked"}
    while (claim := line.claim("keyed"))[2]:
        of_a = len(claim[2]) >= 3
        assert line.settle(claim, **({"s1": RETRY, "s2": parked, "s3": parked} if of_a else {}))
    found = figures(of(read(dsn)), "keyed")
    assert found[2:4] == [1, 2]
    assert_agrees_with_the_command_line(dsn, line)
    assert of(read(dsn))["eventbus_queue_oldest_age_seconds", "keyed"] > 0


def test_committed_events_that_no_relay_has_seen_are_the_backlog(dsn: str, line: Line) -> None:
    assert of(read(dsn))["eventbus_outbox_backlog_events",] == 0
    assert of(read(dsn))["eventbus_outbox_oldest_age_seconds",] == 0
    line.publish()
    line.relay()
    with psycopg.connect(dsn) as other:
        other.execute("SELECT eventbus.publish('orders.created', '1', NULL)")
        line.publish()
        line.conn.execute("UPDATE eventbus.outbox SET published_at = published_at - interval '1 minute'")
        found = of(read(dsn))
        assert found["eventbus_outbox_backlog_events",] == 1
        assert 60 <= found["eventbus_outbox_oldest_age_seconds",] < 120
        line.relay()  # it passes the open transaction, whose event is a straggler then
        assert of(read(dsn))["eventbus_outbox_backlog_events",] == 0
        other.commit()
    assert of(read(dsn))["eventbus_outbox_backlog_events",] == 1
    status = admin.status(line.conn, SCHEMA)
    assert status.backlog.events == 1


def test_the_delay_of_the_relay_is_that_of_the_first_event_of_the_last_batch(dsn: str, line: Line) -> None:
    line.publish()
    line.relay()
    assert of(read(dsn))["eventbus_relay_delay_seconds",] < 5
    first, _second = line.publish(), line.publish()
    line.conn.execute(
        "UPDATE eventbus.outbox SET published_at = published_at - interval '9 seconds' WHERE event_id = %s", [first]
    )
    line.relay()
    assert 9 <= of(read(dsn))["eventbus_relay_delay_seconds",] < 20
    for column in ("ticks SET created_at = created_at", "outbox SET published_at = published_at"):
        line.conn.execute(f"UPDATE eventbus.{column} - interval '2 minutes'".encode())
    assert of(read(dsn))["eventbus_relay_delay_seconds",] == 0


def test_delayed_events_are_counted_and_how_late_the_first_is_once_it_should_have_gone(dsn: str, line: Line) -> None:
    insert = (
        "INSERT INTO eventbus.scheduled (due_at, event_id, topic, payload, size)"
        " VALUES (clock_timestamp() + %s::interval, gen_random_uuid(), 'orders.created', '1', 1)"
    )
    line.conn.execute(insert, ["1 hour"])
    found = of(read(dsn))
    assert (found["eventbus_scheduled_events",], found["eventbus_scheduled_overdue_seconds",]) == (1, 0)
    line.conn.execute(insert, ["-30 seconds"])
    found = of(read(dsn))
    assert found["eventbus_scheduled_events",] == 2
    assert 30 <= found["eventbus_scheduled_overdue_seconds",] < 60


def test_a_worker_is_alive_or_silent_and_one_that_signed_off_is_neither(dsn: str, line: Line) -> None:
    workers = ("eventbus_workers", "alive"), ("eventbus_workers", "silent")
    line.live()
    assert [of(read(dsn))[worker] for worker in workers] == [2, 0]
    line.conn.execute(
        "UPDATE eventbus.workers SET heartbeat_at = heartbeat_at - interval '20 seconds' WHERE id = %s", [line.worker]
    )
    assert [of(read(dsn))[worker] for worker in workers] == [2, 0]
    assert [of(read(dsn, lease=10.0))[worker] for worker in workers] == [1, 1]
    line.conn.execute("UPDATE eventbus.workers SET heartbeat_at = '-infinity' WHERE id = %s", [line.worker])
    assert [of(read(dsn))[worker] for worker in workers] == [1, 0]
    line.conn.execute("UPDATE eventbus.workers SET state = 'dead'")
    assert [of(read(dsn))[worker] for worker in workers] == [0, 0]


def test_a_paused_queue_says_by_whom_and_for_how_long(dsn: str, line: Line) -> None:
    assert not [key for key in of(read(dsn)) if key[0] == "eventbus_queue_paused"]
    line.conn.execute("SELECT eventbus.pause_queue(%s, 'manual', 'repairs', NULL, NULL)", [line.numbers["ledger"]])
    line.conn.execute("UPDATE eventbus.pauses SET since = since - interval '1 minute'")
    found = of(read(dsn))
    assert found["eventbus_queue_paused", "ledger", "manual"] == 1
    assert 60 <= found["eventbus_queue_paused_seconds", "ledger", "manual"] < 90


def test_a_bus_that_waits_to_be_resumed_says_so(dsn: str, line: Line) -> None:
    assert of(read(dsn))["eventbus_paused",] == 0
    line.conn.execute("UPDATE eventbus.bus SET state = 'paused', reason = 'restored'")
    assert of(read(dsn))["eventbus_paused",] == 1


def test_a_circuit_breaker_is_in_one_state(dsn: str, line: Line) -> None:
    reading = read(dsn)
    assert "circuit_breakers" in reading.found
    assert not reading.failures
    line.conn.execute("SELECT eventbus.circuit_breaker_open('ledger', NULL, 'failed', NULL, 30, 2, 600, 60)")
    found = of(read(dsn))
    assert found["eventbus_circuit_breaker_trips", "ledger"] == 1
    states = {key[2]: value for key, value in found.items() if key[0] == "eventbus_circuit_breaker_state"}
    assert states == {"open": 1, "closed": 0, "ready": 0, "probing": 0}
    line.conn.execute("SELECT eventbus.circuit_breaker_close('ledger', NULL)")
    found = of(read(dsn))
    assert found["eventbus_circuit_breaker_state", "ledger", "closed"] == 1
    assert found["eventbus_circuit_breaker_state", "ledger", "open"] == 0


def test_without_circuit_breakers_there_is_no_such_section_rather_than_a_failed_one(
    dsn: str, conn: psycopg.Connection
) -> None:
    conn.execute("DROP TABLE eventbus.circuit_breakers CASCADE")
    reading = read(dsn)
    assert set(reading.found) == ALWAYS
    assert (reading.failures, reading.absent) == ({}, {"circuit_breakers"})


def test_every_table_has_its_rows_and_its_size(dsn: str, line: Line) -> None:
    for _ in range(50):
        line.publish()
    line.conn.execute("DELETE FROM eventbus.outbox WHERE id <= 20")
    line.rows_read("outbox")  # which also makes the server write its statistics
    found = of(read(dsn))
    assert found["eventbus_table_live_rows", "outbox"] == 30
    assert found["eventbus_table_dead_rows", "outbox"] == 20
    assert found["eventbus_table_size_bytes", "outbox"] >= 8192
    tables = {key[1] for key in found if key[0] == "eventbus_table_size_bytes"}
    assert {"outbox", "deliveries", "claims", "exceptions", "dead_letters"} <= tables


def test_a_transaction_that_somebody_left_open_is_seen(dsn: str, line: Line) -> None:
    assert of(read(dsn))["eventbus_oldest_snapshot_age_transactions",] < 3
    with psycopg.connect(dsn) as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        began = time.monotonic()
        other.execute("SELECT 1")
        for _ in range(20):
            line.publish()
        wait_until(lambda: of(read(dsn))["eventbus_oldest_transaction_age_seconds",] > 0.1)
        found = of(read(dsn))
        assert found["eventbus_oldest_snapshot_age_transactions",] >= 20
        assert found["eventbus_oldest_transaction_age_seconds",] < time.monotonic() - began + 1


@one_version
def test_a_prepared_transaction_that_nobody_ends_is_seen(owned_cluster: Cluster) -> None:
    dsn = owned_cluster.dsn()
    migrate(dsn, schema=SCHEMA)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("BEGIN")
        conn.execute("SELECT pg_current_xact_id()")
        conn.execute("PREPARE TRANSACTION 'left'")
        wait_until(lambda: of(read(dsn))["eventbus_oldest_transaction_age_seconds",] > 0.1)
        conn.execute("ROLLBACK PREPARED 'left'")


@one_version
@pytest.mark.parametrize("section", sorted(ALWAYS - {"tables", "transactions"}))
def test_a_section_that_cannot_be_read_leaves_the_others_alone(dsn: str, line: Line, section: str) -> None:
    table = {"outbox": "outbox", "relay": "ticks"}.get(section, section)
    also = {"queues": ALWAYS, "outbox": {"queues", "outbox", "relay"}, "relay": {"relay", "outbox"}}
    line.conn.execute(f"ALTER TABLE eventbus.{table} RENAME TO elsewhere".encode())
    reading = read(dsn)
    assert section in reading.failures
    assert "does not exist" in reading.failures[section]
    assert set(reading.failures) <= also.get(section, {section} | ({"queues"} if section == "workers" else set()))
    assert {"tables", "transactions", "bus" if section != "bus" else "tables"} <= set(reading.found)


@one_version
def test_a_section_that_waits_for_a_lock_gives_up_and_leaves_the_others_alone(dsn: str, line: Line) -> None:
    database = Database(settings(dsn), timeout=5.0, statement_timeout=0.2)
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE eventbus.scheduled IN ACCESS EXCLUSIVE MODE")
        began = time.monotonic()
        reading = database.read()
        assert time.monotonic() - began < 3
    assert set(reading.failures) == {"scheduled", "tables"}  # the size of a table needs its lock, too
    assert set(reading.found) == EVERY - {"scheduled", "tables"}
    assert not database.read().failures


@one_version
def test_all_together_may_take_no_longer_than_the_setting_says(dsn: str, line: Line) -> None:
    database = Database(settings(dsn), timeout=0.3, statement_timeout=60.0)
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE eventbus.scheduled IN ACCESS EXCLUSIVE MODE")
        began = time.monotonic()
        reading = database.read()
        again = database.read()
        assert time.monotonic() - began < 2
        assert reading.failures["scheduled"] == reading.failures["workers"] == "no answer in time"
        assert {"queues", "outbox"} <= set(reading.found)
        assert set(again.failures) == EVERY, "it is not asked again while it hangs"
        other.rollback()
    wait_until(lambda: not database.read().failures)
    reading = Reading()
    database._fill(reading, deadline=time.monotonic() - 1)
    assert not reading.found, "whoever waited has gone, so nothing more is asked"


def test_a_server_that_accepts_and_says_nothing_costs_no_more_than_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        database = Database(settings(f"host=127.0.0.1 port={port} dbname=x"), timeout=0.2, statement_timeout=0.2)
        before = threading.active_count()
        began = time.monotonic()
        readings = [database.read() for _ in range(5)]
        assert time.monotonic() - began < 1.5
        assert threading.active_count() <= before + 1
    assert all(not reading.found for reading in readings)
    wait_until(lambda: threading.active_count() <= before)


@one_version
def test_an_outage_of_the_database_is_two_lines_in_the_log(
    owned_cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    dsn = owned_cluster.dsn()
    migrate(dsn, schema=SCHEMA)
    database = Database(settings(dsn), timeout=5.0, statement_timeout=2.0)
    with caplog.at_level(logging.INFO, "eventbus_prometheus"):
        assert not database.read().failures
        owned_cluster.stop()
        for _ in range(3):
            reading = database.read()
            assert set(reading.failures) == EVERY
            assert "failed: No such file" in reading.failures["queues"]
        owned_cluster.start()
        assert not database.read().failures
    first, second = [record.message for record in caplog.records]
    assert first.startswith("metrics: nothing of the database: OperationalError: ")
    assert first.count("failed: No such file") == 1
    assert second == "metrics: all of the database again"


def test_a_section_that_fails_now_and_then_is_not_said_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    database = Database(settings("dbname=x"), timeout=1.0, statement_timeout=1.0)
    with caplog.at_level(logging.INFO, "eventbus_prometheus"):
        for failing in ("relay",), ("relay", "outbox"), ("outbox",), ("relay",), (), ("relay",):
            database._report(Reading({"bus": ([], 0.0)}, dict.fromkeys(failing, "no right")))
    assert [record.message for record in caplog.records] == [
        "metrics: no relay: no right",
        "metrics: no outbox: no right",
        "metrics: all of the database again",
        "metrics: no relay: no right",
    ]


def test_the_rights_in_the_readme_are_enough_to_read_everything(dsn: str, conn: psycopg.Connection, run: str) -> None:
    role = f"metrics_{run}"
    grants = README.split("```sql")[1].split("```")[0].replace("monitoring", role)
    conn.execute(f"CREATE ROLE {role} LOGIN".encode())
    try:
        conn.execute(grants.encode())
        as_role = make_conninfo(dsn, options=f"-c role={role}")
        with psycopg.connect(dsn) as other:
            other.execute("SELECT pg_current_xact_id()")
            wait_until(lambda: of(read(as_role))["eventbus_oldest_transaction_age_seconds",] > 0)
        reading = read(as_role)
        assert (reading.failures, set(reading.found)) == ({}, EVERY)
    finally:
        conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


@one_version
def test_a_schema_with_an_unusual_name_is_read_too(empty_dsn: str) -> None:
    migrate(empty_dsn, schema="my-Bus")
    reading = read(empty_dsn, schema="my-Bus")
    assert not reading.failures
    assert of(reading)["eventbus_table_size_bytes", "outbox"] > 0


@one_version
def test_reading_leaves_no_connection_and_no_transaction_behind(dsn: str, conn: psycopg.Connection) -> None:
    read(dsn)
    wait_until(
        lambda: (
            conn.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'eventbus metrics'"
                " AND datname = current_database()"
            ).fetchone()
            == (0,)
        )
    )
