"""The rare statements of a worker: several tasks may ask at once, and no plugin can pass for the operator."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import psycopg
import pytest

from eventbus.postgres.breaker import Breaker
from eventbus.postgres.link import Link
from eventbus.postgres.outage import Outage
from eventbus.postgres.pausing import pauses
from eventbus.postgres.statements import Statements
from eventbus.postgres.watching import Watching
from tests.postgres.line import SCHEMA, Line

pytestmark = pytest.mark.parametrize("major", [18], indirect=True)


@pytest.fixture
async def watching(dsn: str, conn: psycopg.Connection) -> AsyncIterator[Watching]:
    Line(conn).declare(ledger=["orders.#"])
    link = Link(dsn, "watch", Breaker(Outage()))
    yield Watching(link, Statements("engine", SCHEMA))
    await link.close()


async def test_tasks_that_ask_at_once_share_the_connection_one_after_the_other(
    watching: Watching, conn: psycopg.Connection
) -> None:
    sources = [f"plugin-{number}" for number in range(8)]
    assert all(await asyncio.gather(*(watching.pause(1, source, "x", 60, 5) for source in sources)))
    assert sorted(item.source for item in pauses(conn, SCHEMA)) == sources
    ended = await asyncio.gather(*(watching.resume(1, source) for source in sources), watching.undone([1]))
    assert ended == [True] * 8 + [False]
    assert pauses(conn, SCHEMA) == []


async def test_who_is_late_or_wrong_is_told_so_and_changes_nothing(
    watching: Watching, conn: psycopg.Connection
) -> None:
    assert not await watching.pause(4711, "plugin", "the queue was dropped", None, None)
    assert not await watching.resume(1, "plugin")
    assert await watching.pause(1, "plugin", "x", 60, 5)
    assert not await watching.free_probe(1, "plugin", uuid.uuid4())
    for call in (watching.pause(1, "manual", "x", None, None), watching.resume(1, "manual")):
        with pytest.raises(ValueError, match="the operator's"):
            await call
    assert [item.source for item in pauses(conn, SCHEMA)] == ["plugin"]
