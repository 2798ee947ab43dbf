"""Handlers that leave a statement of their transaction unfinished: nothing waits for it for ever."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from eventbus import Event, RetryPolicy
from eventbus.bus import EventBus
from eventbus.postgres.admin import resume
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
@pytest.mark.parametrize("mistake", ["raise", "stream", "copy"])
@pytest.mark.parametrize("kind", [sync_handler, async_handler], ids=["plain", "async"])
async def test_a_handler_that_ends_in_the_middle_of_a_statement_has_failed_and_keeps_nobody_waiting(
    dsn: str, conn: psycopg.Connection, kind: Any, mistake: str, caplog: pytest.LogCaptureFixture
) -> None:
    resume(conn, "eventbus")
    conn.execute("CREATE TABLE effects (n int)")
    conn.execute(
        "SELECT eventbus.declare_queues(%s)",
        [json.dumps([{"name": "books", "patterns": ["orders.#"], "tracking": "transactional"}])],
    )
    bus = EventBus(load({"dsn": dsn}, environment={}))
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
