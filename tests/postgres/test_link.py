"""A link comes back in its turn, tells its caller at once when it has to wait, and is no burden while it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import psycopg
import pytest

from eventbus.errors import Unavailable
from eventbus.postgres.breaker import Breaker
from eventbus.postgres.link import Link
from eventbus.postgres.outage import Outage
from tests.waiting import wait_until

pytestmark = pytest.mark.parametrize("major", [18], indirect=True)

ASK = b"SELECT 1"
WRITE = b"CREATE TABLE written ()"


class Links:
    """Two links with one breaker, and what was told of outages."""

    def __init__(self, dsn: str) -> None:
        self.told: list[str | float] = []
        self.breaker = Breaker(Outage(self.told.append, self.told.append))
        self.one, self.other = (Link(dsn, name, self.breaker) for name in ("one", "other"))


@pytest.fixture
async def links(dsn: str) -> AsyncIterator[Links]:
    links = Links(dsn)
    yield links
    await links.one.close()
    await links.other.close()


async def kill(link: Link, conn: psycopg.Connection) -> None:
    """End the server's process behind a link, and wait until it is gone."""
    pid = link.backend_pid
    conn.execute("SELECT pg_terminate_backend(%s)", [pid])

    def gone() -> bool:
        return conn.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [pid]).rowcount == 0

    await asyncio.to_thread(wait_until, gone)


async def test_a_link_whose_server_process_was_killed_is_back_within_a_moment_and_the_other_works_on(
    links: Links, conn: psycopg.Connection
) -> None:
    for link in (links.one, links.other):
        await link.rows(ASK)
    await kill(links.one, conn)
    with pytest.raises(Unavailable):
        await links.one.rows(ASK)
    began = time.monotonic()
    assert await links.other.rows(ASK) == [(1,)]
    await links.one.recover()
    assert await links.one.rows(ASK) == [(1,)]
    assert time.monotonic() - began < 1
    assert len(links.told) == 2


async def test_a_link_that_may_not_connect_now_says_so_at_once_and_recovers_with_the_probe_of_another(
    links: Links,
) -> None:
    links.breaker.broke()
    probe = await links.breaker.turn()
    began = time.monotonic()
    with pytest.raises(Unavailable, match="away"):
        await links.one.rows(ASK)
    assert time.monotonic() - began < 1
    recovering = asyncio.create_task(links.one.recover())
    await links.other.close()
    with probe:
        assert not recovering.done()
    async with asyncio.timeout(5):
        await recovering
    assert await links.one.rows(ASK) == [(1,)]
    assert links.told == [], "it waited, and had no trouble of its own"


async def test_a_failed_attempt_of_one_link_makes_no_pause_of_another_longer(
    links: Links, conn: psycopg.Connection
) -> None:
    await links.one.rows(ASK)
    away = Link("host=127.0.0.1 port=1 dbname=nowhere", "away", links.breaker)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await away.rows(ASK)
        links.breaker._not_before = 0.0
    await kill(links.one, conn)
    with pytest.raises(Unavailable):
        await links.one.rows(ASK)
    assert links.one._backoff.pause() <= 0.1
    await away.close()


async def test_a_server_that_takes_no_writes_is_one_outage_until_the_write_works_although_reads_do(
    links: Links, conn: psycopg.Connection
) -> None:
    await links.one.rows(b"SET default_transaction_read_only = on")
    with pytest.raises(Unavailable, match="read-only"):
        await links.one.rows(WRITE)
    await links.one.recover()
    await links.one.rows(ASK)
    assert len(links.told) == 1
    await links.one.rows(WRITE)
    assert len(links.told) == 2


async def test_a_statement_that_fails_by_itself_keeps_no_other_link_from_connecting(links: Links) -> None:
    with pytest.raises(Unavailable, match="nothing"):
        await links.one.rows(b"SELECT FROM nothing")
    pid = links.one.backend_pid
    assert await links.other.rows(ASK) == [(1,)]
    assert links.one.backend_pid == pid is not None
