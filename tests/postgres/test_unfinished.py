"""Handlers that leave a statement of their transaction unfinished: nothing waits for it for ever."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from eventbus import Event, RetryPolicy
from eventbus.bus import EventBus
from eventbus.postgres.admin import resume
from eventbus.postgres.tries import Unit
from eventbus.settings import load

one_server = pytest.mark.parametrize("major", [18], indirect=True)
STREAM = "SELECT generate_series(1, 100000)"


class Mistaken(Exception):
    """A mistake of the handler itself, in the middle of something."""


def sync_handler(kept: list[Any], mistake: str) -> Any:
    def handle(event: Event, conn: psycopg.Connection) -> None:
        conn.execute("INSERT INTO effects VALUES (%s)", [event.payload])
        if event.payload != 1:
            return
        if mistake == "copy":
            block = conn.cursor().copy("COPY (SELECT generate_series(1, 100000)) TO STDOUT")
            kept.append(block)
            block.__enter__().read()
            return
        for row in (rows := conn.cursor().stream(STREAM)):
            if mistake == "raise":
                raise Mistaken(row)
            kept.append(rows)
            return

    return handle


def async_handler(kept: list[Any], mistake: str) -> Any:
    async def handle(event: Event, conn: psycopg.AsyncConnection) -> None:
        await conn.execute("INSERT INTO effects VALUES (%s)", [event.payload])
        if event.payload != 1:
            return
        if mistake == "copy":
            block = conn.cursor().copy("COPY (SELECT generate_series(1, 100000)) TO STDOUT")
            kept.append(block)
            await (await block.__aenter__()).read()
            return
        async for row in (rows := conn.cursor().stream(STREAM)):
            if mistake == "raise":
                raise Mistaken(row)
            kept.append(rows)
            return

    return handle


@one_server
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_handler_that_does_not_notice_that_its_connection_breaks_each_time_has_failed_in_the_end(
    dsn: str, conn: psycopg.Connection, kind: str
) -> None:
    bus = books(dsn, conn)
    runs = []

    def plain(event: Event, conn: psycopg.Connection) -> None:
        runs.append(event.attempt)
        with suppress(psycopg.OperationalError):
            conn.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    async def on_the_loop(event: Event, conn: psycopg.AsyncConnection) -> None:
        runs.append(event.attempt)
        with suppress(psycopg.OperationalError):
            await conn.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    policy = RetryPolicy(max_attempts=2, first=0.01, jitter=False)
    subscribe = bus.subscribe("orders.#", name="books", transactional=True, concurrency=1, retry=policy)
    subscribe(plain if kind == "plain" else on_the_loop)
    bus.outbox.publish_event("orders.created", 1, conn=conn, autocommit=True)
    assert await bus.worker(until_idle=True).run() == 0
    assert runs == [1, 1, 1, 2]
    assert conn.execute("SELECT attempts FROM eventbus.dead_letters").fetchall() == [(2,)]


@one_server
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_handler_does_not_begin_when_its_lease_has_run_out_while_its_transaction_was_opened(
    dsn: str, conn: psycopg.Connection, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = books(dsn, conn)
    begun: list[Unit] = []
    runs = []
    begin = Unit.begin

    def slow_begin(unit: Unit) -> bytes:
        begun.append(unit)
        if len(begun) == 1:
            unit._patience.tenure.renew(0.0)  # frozen for longer than a lease
        return begin(unit)

    def plain(event: Event, conn: psycopg.Connection) -> None:
        runs.append(len(begun))

    async def on_the_loop(event: Event, conn: psycopg.AsyncConnection) -> None:
        runs.append(len(begun))

    monkeypatch.setattr(Unit, "begin", slow_begin)
    subscribe = bus.subscribe("orders.#", name="books", transactional=True)
    subscribe(plain if kind == "plain" else on_the_loop)
    bus.outbox.publish_event("orders.created", 1, conn=conn, autocommit=True)
    assert await bus.worker(until_idle=True).run() == 0
    assert runs == [2]


def books(dsn: str, conn: psycopg.Connection) -> EventBus:
    """A bus whose queue ``books`` is there before anything is published."""
    resume(conn, "eventbus")
    conn.execute("CREATE TABLE effects (n int)")
    conn.execute(
        "SELECT eventbus.declare_queues(%s)",
        [json.dumps([{"name": "books", "patterns": ["orders.#"], "tracking": "transactional"}])],
    )
    return EventBus(load({"dsn": dsn, "lease": 2}, environment={}))


@one_server
@pytest.mark.parametrize("mistake", ["raise", "stream", "copy"])
@pytest.mark.parametrize("kind", [sync_handler, async_handler], ids=["plain", "async"])
async def test_a_handler_that_ends_in_the_middle_of_a_statement_has_failed_and_keeps_nobody_waiting(
    dsn: str, conn: psycopg.Connection, kind: Any, mistake: str, caplog: pytest.LogCaptureFixture
) -> None:
    bus = books(dsn, conn)
    kept: list[Any] = []
    policy = RetryPolicy(max_attempts=2, first=0.01, jitter=False)
    bus.subscribe("orders.#", name="books", transactional=True, concurrency=1, retry=policy)(kind(kept, mistake))
    bus.outbox.publish_events([("orders.created", n) for n in range(3)], conn=conn, autocommit=True)
    assert await bus.worker(until_idle=True).run() == 0
    assert sorted(n for (n,) in conn.execute("SELECT n FROM effects")) == [0, 2]
    [(attempts, message)] = conn.execute(
        "SELECT attempts, last_error->>'message' FROM eventbus.dead_letters"
    ).fetchall()
    assert attempts == 2
    assert ("left a statement unfinished" in message) is (mistake != "raise")
    assert "database trouble" not in caplog.text
    kept.clear()
