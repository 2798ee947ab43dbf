"""What a worker gives back that it does not know of: claims whose reply was lost, and nothing that it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest

from eventbus.bus import EventBus
from eventbus.postgres.admin import resume
from eventbus.postgres.breaker import Breaker
from eventbus.postgres.claiming import PostgresConsumer
from eventbus.postgres.link import Link
from eventbus.postgres.outage import Outage
from eventbus.postgres.statements import Statements
from eventbus.postgres.watching import Watching
from eventbus.settings import load
from eventbus.transport import Delivery

pytestmark = pytest.mark.parametrize("major", [18], indirect=True)


@pytest.fixture
async def consumer(dsn: str, conn: psycopg.Connection) -> AsyncIterator[PostgresConsumer]:
    """A registered consumer of the ordered queue ``keys``, in which ``a``, ``a`` and ``b`` wait."""
    resume(conn, "eventbus")
    conn.execute(
        'SELECT eventbus.declare_queues(\'[{"name": "keys", "patterns": ["#"], "kind": "ordered", "lanes": 1}]\')'
    )
    bus = EventBus(load({"dsn": dsn, "plugins": ()}, environment={}))
    for key in "aab":
        bus.outbox.publish_event("t", {}, key=key, conn=conn, autocommit=True)
    conn.execute("SELECT eventbus.resolve_topics(bindings_version, '{\"t\": [1]}') FROM eventbus.bus")
    conn.execute("SELECT eventbus.tick(100)")
    breaker = Breaker(Outage())
    links = Link(dsn, "claim", breaker), Link(dsn, "settle", breaker)
    calls = Statements("engine", "eventbus")
    one = PostgresConsumer(*links, calls, Watching(links[1], calls))
    one.names, one.kinds = {1: "keys"}, {1: "ordered"}
    await one.register()
    yield one
    for link in links:
        await link.close()


async def claim(consumer: PostgresConsumer) -> list[Delivery]:
    claimed = await consumer.claim({1: 100}, 1_000_000)
    return list(claimed.deliveries[1])


async def test_what_runs_is_not_given_back_while_its_claim_is_being_taken_apart(
    consumer: PostgresConsumer, conn: psycopg.Connection
) -> None:
    first, second = await claim(consumer)
    lease = first.lease
    known = [lease]  # the reply of what follows is still under way
    await consumer.detach(lease, [first.seq, second.seq])
    assert await consumer.release_unknown(known, thorough=False) == 0
    assert await consumer.release_unknown(known, thorough=True) == 0
    states = conn.execute("SELECT state FROM eventbus.exceptions ORDER BY seq").fetchall()
    assert states == [("claimed",), ("parked",), ("claimed",)], "an event that runs was handed out once more"


async def test_exceptions_whose_reply_was_lost_are_given_back(
    consumer: PostgresConsumer, conn: psycopg.Connection
) -> None:
    first, second = await claim(consumer)
    await consumer.detach(first.lease, [first.seq, second.seq])
    assert await consumer.release_unknown([], thorough=False) == 2
    states = conn.execute("SELECT state FROM eventbus.exceptions ORDER BY seq").fetchall()
    assert states == [("waiting",), ("parked",), ("waiting",)]
