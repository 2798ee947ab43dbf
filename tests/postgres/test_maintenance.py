"""Old executions go by themselves, and clean-up that cannot work harms nothing and floods no log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import psycopg
import pytest

from eventbus.postgres.breaker import Breaker
from eventbus.postgres.maintenance import Maintenance
from eventbus.postgres.outage import Outage
from eventbus.postgres.statements import Statements
from eventbus.settings import Settings


def maintenance(dsn: str, retention: float = 3600.0, breaker: Breaker | None = None) -> Maintenance:
    settings = Settings(dsn=dsn, processed_retention=retention)
    return Maintenance(settings, Statements("engine", "eventbus"), breaker or Breaker(Outage()), lambda: 0.5)


def remember(conn: psycopg.Connection, count: int, age: str) -> None:
    conn.execute(
        "INSERT INTO eventbus.processed_events (queue_id, event_id, claimed_at, completed_at)"
        " SELECT 1, gen_random_uuid(), now() - %s::interval, now() - %s::interval FROM generate_series(1, %s)",
        [age, age, count],
    )


def remembered(conn: psycopg.Connection) -> int:
    [(count,)] = conn.execute("SELECT count(*) FROM eventbus.processed_events").fetchall()
    return int(count)


async def until(predicate: Callable[[], bool]) -> None:
    """Wait for a condition in the database."""
    async with asyncio.timeout(20):
        while not predicate():  # noqa: ASYNC110 - the database does not announce it
            await asyncio.sleep(0.01)


async def test_a_round_removes_everything_that_is_old_enough_and_leaves_no_connection(
    conn: psycopg.Connection, dsn: str
) -> None:
    remember(conn, 5_000, "2 hours")
    remember(conn, 3, "30 minutes")
    assert await maintenance(dsn).clean_up() == 5_000
    assert remembered(conn) == 3
    left = conn.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND application_name = 'eventbus maintenance' AND state <> 'idle'"
    ).fetchone()
    assert left == (0,)


async def test_rounds_follow_each_other_until_the_worker_stops(
    conn: psycopg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventbus.postgres.maintenance._EVERY", 0.01)
    task = asyncio.create_task(maintenance(dsn).run())
    for _ in range(2):
        remember(conn, 10, "2 hours")
        await until(lambda: not remembered(conn))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_clean_up_that_fails_is_one_line_in_the_log_and_tried_again(
    conn: psycopg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eventbus.postgres.maintenance._EVERY", 0.001)
    monkeypatch.setattr("eventbus.postgres.maintenance._LEISURE", 0.0)
    conn.execute("ALTER FUNCTION eventbus.purge_executions RENAME TO gone")
    cleaner = maintenance(dsn)
    attempts = 0
    clean_up = cleaner.clean_up

    async def counted() -> int:
        nonlocal attempts
        attempts += 1
        return await clean_up()

    monkeypatch.setattr(cleaner, "clean_up", counted)
    with caplog.at_level(logging.INFO, "eventbus"):
        task = asyncio.create_task(cleaner.run())
        await until(lambda: attempts >= 4)
        conn.execute("ALTER FUNCTION eventbus.gone RENAME TO purge_executions")
        remember(conn, 1, "2 hours")
        await until(lambda: not remembered(conn) and len(caplog.records) >= 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    failed, works = caplog.messages
    assert failed.startswith("clean-up failed, and is tried again every minute: function eventbus.purge_executions")
    assert works == "clean-up works again"


async def test_clean_up_waits_for_a_database_that_is_away_without_a_word_and_rests_no_longer_for_it(
    conn: psycopg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eventbus.postgres.maintenance._EVERY", 0.01)
    breaker = Breaker(Outage())
    breaker.broke()
    probe = await breaker.turn()
    remember(conn, 10, "2 hours")
    task = asyncio.create_task(maintenance(dsn, breaker=breaker).run())
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > 1)  # thirty times that would be half a minute
    assert remembered(conn) == 10
    with probe:
        pass
    for _ in range(2):
        await until(lambda: not remembered(conn))
        remember(conn, 10, "2 hours")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert caplog.text == ""
