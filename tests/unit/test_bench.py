"""A wrong benchmark misleads more than none: what these figures rest on."""

from __future__ import annotations

import asyncio
import uuid

import psycopg
import pytest

from bench import line, rowqueue, wire
from bench.meter import SLICES, Meter
from bench.report import Figure, Target, Workload, as_markdown, ratio
from bench.rounds import take_turns
from bench.servers import SCHEMA
from eventbus.postgres.migrate import migrate

one_version = pytest.mark.parametrize("major", [15], indirect=True)


def test_a_missed_target_is_printed_as_missed() -> None:
    figures = [
        Figure("w", "too slow", 1.29, "x", Target(">=", 1.3)),
        Figure("w", "too late", 15.1, "ms", Target("<=", 15.0)),
        Figure("w", "reached", 1.3, "x", Target(">=", 1.3)),
    ]
    rows = as_markdown({}, {}, [Workload("w", figures, 1.0, 0.0)]).splitlines()
    assert [row.split("|")[-2].strip() for row in rows if row.startswith("| w |")] == ["**no**", "**no**", "yes"]


def test_a_ratio_compares_neighbours_in_time_so_a_machine_that_slows_down_does_not_change_it() -> None:
    assert ratio("w", "r", ours=[12.0, 100.0, 4.0], theirs=[3.0, 20.0, 5.0]).value == 4.0


def test_nobody_always_runs_first_on_a_machine_that_gets_slower_or_warmer() -> None:
    ran: list[str] = []
    take_turns({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, 2)
    assert ran == ["a", "b", "b", "a"]


def test_the_meter_finishes_at_the_last_event_and_not_before() -> None:
    finished: list[int] = []
    meter = Meter(40, lambda: finished.append(1))
    meter.start()
    for _ in range(39):
        meter.count()
    assert not finished
    meter.count()
    assert finished == [1]
    slices = meter.result(40)["slices"]
    assert isinstance(slices, list)
    assert len(slices) == SLICES


@one_version
def test_payloads_have_the_size_that_the_figures_name(conn: psycopg.Connection) -> None:
    line.fill(conn, 12)
    sizes = line.run(conn, "SELECT DISTINCT octet_length(payload::text), size FROM {s}.outbox")
    assert sizes == [(line.PAYLOAD_BYTES, line.PAYLOAD_BYTES)]


@one_version
def test_a_fast_loss_is_no_result(empty_dsn: str) -> None:
    worker, token = uuid.uuid4(), uuid.uuid4()
    migrate(empty_dsn, SCHEMA)
    with line.connect(empty_dsn) as conn:
        line.declare(conn)
        line.fill(conn, 10)
        line.relay(conn)
        line.run(conn, "SELECT {s}.register_worker(%s, 'bench', 1)", (worker,))
        line.run(conn, "SELECT * FROM {s}.claim(%s, %s, ARRAY[1], ARRAY[9], 1000000)", (worker, token))
        line.run(conn, "SELECT {s}.settle(ARRAY[1]::bigint[], ARRAY[%s]::uuid[], NULL)", (token,))
        line.require_settled(conn, 9)
        with pytest.raises(RuntimeError, match="10 events were published, 9 are settled"):
            line.require_settled(conn, 10)


@one_version
def test_the_row_queue_that_the_bus_is_compared_with_handles_every_row_once(conn: psycopg.Connection) -> None:
    payloads: list[str] = []

    async def handle(_topic: str, payload: str) -> None:
        payloads.append(payload)

    rowqueue.create(conn, 250)
    assert asyncio.run(rowqueue.drain(conn, handle, seconds=60.0)) == 250
    assert len(set(payloads)) == len(payloads) == 250
    assert line.run(conn, "SELECT count(*) FROM row_queue") == [(0,)]


@one_version
def test_every_statement_of_an_idle_worker_is_counted(dsn: str) -> None:
    with wire.counted(dsn) as (through, counter), psycopg.connect(through, autocommit=True) as connection:
        before = counter.statements
        connection.execute("SELECT 1")
        for number in range(10):  # prepared from the fifth on
            connection.execute("SELECT %s::int", [number])
        with connection.transaction():
            pass
        assert counter.statements - before == 13


@one_version
def test_an_old_snapshot_really_keeps_the_server_from_cleaning_up(dsn: str, conn: psycopg.Connection) -> None:
    conn.execute("CREATE TABLE short_lived AS SELECT 1 AS number")
    with line.old_snapshot(dsn, held=True):
        conn.execute("DELETE FROM short_lived")
        conn.execute("VACUUM short_lived")
        [(held,)] = conn.execute("SELECT pg_relation_size('short_lived')").fetchall()
    conn.execute("VACUUM short_lived")
    [(released,)] = conn.execute("SELECT pg_relation_size('short_lived')").fetchall()
    assert held > released == 0
