"""Taking back a delayed event: it is cancelled or delivered, never both and never neither."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest

from eventbus.errors import NotInTransaction, PublishError
from eventbus.event import OutboxEvent
from eventbus.postgres.publishing import PublishStatements
from eventbus.publishing.outbox import Outbox
from eventbus.settings import load
from tests.waiting import wait_until


@pytest.fixture(scope="session")
def outbox() -> Outbox:
    return Outbox(PublishStatements("eventbus"), load({}, environment={}))


@pytest.fixture
def tx(dsn: str) -> Iterator[psycopg.Connection]:
    """A connection as programs use it: not in autocommit mode."""
    with closing(psycopg.connect(dsn)) as connection:
        yield connection


@pytest.fixture
def relay(dsn: str) -> Iterator[psycopg.Connection]:
    """The relay's connection."""
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        yield connection


@pytest.fixture
def due(conn: psycopg.Connection, outbox: Outbox) -> uuid.UUID:
    """A scheduled event whose time has come."""
    event_id = outbox.publish_event("a", 1, delay=0.000001, conn=conn, autocommit=True)
    wait_until(lambda: conn.execute("SELECT 1 FROM eventbus.scheduled WHERE due_at <= clock_timestamp()").fetchone())
    return event_id


def fire(relay: psycopg.Connection, most: int = 100) -> int:
    row = relay.execute("SELECT fired FROM eventbus.fire_due(%s, '-infinity')", [most]).fetchone()
    assert row is not None
    return int(row[0])


def published(conn: psycopg.Connection) -> list[uuid.UUID]:
    return [event_id for (event_id,) in conn.execute("SELECT event_id FROM eventbus.outbox")]


def waiting(conn: psycopg.Connection) -> list[uuid.UUID]:
    return [event_id for (event_id,) in conn.execute("SELECT event_id FROM eventbus.scheduled ORDER BY id")]


def is_blocked(conn: psycopg.Connection) -> bool:
    blocked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return conn.execute(blocked.encode()).fetchone() == (1,)


def test_a_cancelled_event_is_gone_once_the_caller_commits_and_only_then(
    tx: psycopg.Connection, conn: psycopg.Connection, outbox: Outbox
) -> None:
    first, second = (outbox.publish_event("a", 1, delay=3600, conn=conn, autocommit=True) for _ in range(2))
    assert outbox.cancel_event(first, conn=tx) is True
    assert outbox.cancel_event(first, conn=tx) is False
    assert waiting(conn) == [first, second]
    tx.commit()
    assert waiting(conn) == [second]
    assert outbox.cancel_event(first, conn=tx) is False
    assert outbox.cancel_event(uuid.uuid4(), conn=tx) is False


def test_a_cancel_that_is_rolled_back_has_not_happened(
    tx: psycopg.Connection, conn: psycopg.Connection, outbox: Outbox
) -> None:
    event_id = outbox.publish_event("a", 1, delay=3600, conn=conn, autocommit=True)
    assert outbox.cancel_event(event_id, conn=tx)
    tx.rollback()
    with tx.transaction(), tx.transaction(force_rollback=True):
        assert outbox.cancel_event(event_id, conn=tx)
    assert waiting(conn) == [event_id]


def test_what_the_same_transaction_has_published_can_be_taken_back_in_it(
    tx: psycopg.Connection, conn: psycopg.Connection, outbox: Outbox
) -> None:
    one = outbox.publish_event("a", 1, delay=60, conn=tx)
    two, now = outbox.publish_events([OutboxEvent("b", 1, delay=60), ("c", 1)], conn=tx)
    assert outbox.cancel_event(one, conn=tx)
    assert not outbox.cancel_event(now, conn=tx), "it is published already, as far as this transaction is concerned"
    tx.commit()
    assert waiting(conn) == [two]
    assert published(conn) == [now]


def test_an_id_that_was_scheduled_twice_is_taken_back_as_a_whole(
    tx: psycopg.Connection, conn: psycopg.Connection, outbox: Outbox
) -> None:
    event_id = uuid.uuid4()
    outbox.publish_events([OutboxEvent("a", 1, event_id=event_id, delay=n) for n in (60, 70)], conn=tx)
    assert outbox.cancel_event(event_id, conn=tx)
    tx.commit()
    assert waiting(conn) == []


def test_the_relay_leaves_alone_what_is_being_cancelled_and_never_delivers_it(
    tx: psycopg.Connection, conn: psycopg.Connection, relay: psycopg.Connection, outbox: Outbox, due: uuid.UUID
) -> None:
    assert outbox.cancel_event(due, conn=tx)
    assert fire(relay) == 0
    tx.commit()
    assert fire(relay) == 0
    assert (published(conn), waiting(conn)) == ([], [])


def test_the_relay_delivers_what_was_being_cancelled_when_the_cancel_is_rolled_back(
    tx: psycopg.Connection, conn: psycopg.Connection, relay: psycopg.Connection, outbox: Outbox, due: uuid.UUID
) -> None:
    assert outbox.cancel_event(due, conn=tx)
    assert fire(relay) == 0
    tx.rollback()
    assert fire(relay) == 1
    assert (published(conn), waiting(conn)) == ([due], [])


@pytest.mark.parametrize("fired", [True, False], ids=["fired", "relay killed"])
def test_a_cancel_waits_for_the_relay_that_is_firing_the_event_and_says_what_came_of_it(
    tx: psycopg.Connection,
    conn: psycopg.Connection,
    relay: psycopg.Connection,
    outbox: Outbox,
    due: uuid.UUID,
    fired: bool,
) -> None:
    with ThreadPoolExecutor(1) as thread:
        relay.execute("BEGIN")
        assert fire(relay) == 1
        cancelling = thread.submit(outbox.cancel_event, due, conn=tx)
        wait_until(lambda: is_blocked(conn))
        relay.execute("COMMIT" if fired else "ROLLBACK")
        assert cancelling.result(10) is not fired
    tx.commit()
    assert fire(relay) == 0
    assert (published(conn), waiting(conn)) == ([due] if fired else [], [])


def test_a_repeatable_read_cancel_of_what_was_fired_after_its_snapshot_fails_instead_of_lying(
    tx: psycopg.Connection, conn: psycopg.Connection, relay: psycopg.Connection, outbox: Outbox, due: uuid.UUID
) -> None:
    tx.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    tx.execute("SELECT 1")
    assert fire(relay) == 1
    with pytest.raises(psycopg.errors.SerializationFailure):
        outbox.cancel_event(due, conn=tx)
    assert published(conn) == [due]


def test_of_two_cancels_at_once_one_has_done_it(dsn: str, conn: psycopg.Connection, outbox: Outbox) -> None:
    ids = [outbox.publish_event("a", n, delay=3600, conn=conn, autocommit=True) for n in range(40)]

    def cancel(_: int) -> list[bool]:
        with psycopg.connect(dsn, autocommit=True) as connection:
            return [outbox.cancel_event(one, conn=connection, autocommit=True) for one in ids]

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(cancel, range(4)))
    assert [sum(of_one) for of_one in zip(*answers, strict=True)] == [1] * 40


def test_hundreds_of_cancels_beside_a_firing_relay_each_event_is_cancelled_or_delivered(
    dsn: str, conn: psycopg.Connection, relay: psycopg.Connection, outbox: Outbox
) -> None:
    events = [OutboxEvent("a", n, delay=0.0005 * n) for n in range(1, 600)]
    ids = outbox.publish_events(events, conn=conn, autocommit=True)
    started = threading.Event()

    def cancel(mine: list[uuid.UUID]) -> list[uuid.UUID]:
        taken = []
        with psycopg.connect(dsn) as connection:
            for number, one in enumerate(mine):
                if outbox.cancel_event(one, conn=connection) and number % 3:
                    taken.append(one)
                    connection.commit()
                    started.set()
                else:
                    connection.rollback()
        return taken

    with ThreadPoolExecutor(3) as threads:
        cancelling = [threads.submit(cancel, ids[n::3]) for n in range(3)]
        assert started.wait(30)
        wait_until(lambda: fire(relay, 5) == 0 and all(one.done() for one in cancelling) and not waiting(conn), 60)
        cancelled = {one for done in cancelling for one in done.result()}
    delivered = published(conn)
    assert len(delivered) == len(set(delivered))
    assert cancelled.isdisjoint(delivered)
    assert cancelled | set(delivered) == set(ids)
    assert cancelled
    assert delivered


def test_outside_a_transaction_a_cancel_has_to_say_so(conn: psycopg.Connection, outbox: Outbox) -> None:
    event_id = outbox.publish_event("a", 1, delay=60, conn=conn, autocommit=True)
    with pytest.raises(NotInTransaction, match=r"the cancel .*with conn\.transaction\(\).*autocommit=True"):
        outbox.cancel_event(event_id, conn=conn)
    assert waiting(conn) == [event_id]
    assert outbox.cancel_event(event_id, conn=conn, autocommit=True)
    assert waiting(conn) == []
    event_id = outbox.publish_event("a", 1, delay=60, conn=conn, autocommit=True)
    with conn.transaction():
        assert outbox.cancel_event(event_id, conn=conn)
    assert waiting(conn) == []


def test_a_cancel_uses_the_bound_connection(tx: psycopg.Connection, conn: psycopg.Connection, outbox: Outbox) -> None:
    event_id = outbox.publish_event("a", 1, delay=60, conn=conn, autocommit=True)
    with pytest.raises(PublishError, match="no connection"):
        outbox.cancel_event(event_id)
    with outbox.using(tx):
        assert outbox.cancel_event(event_id)
    tx.commit()
    assert waiting(conn) == []


@pytest.mark.parametrize("wrong", ["01a22c4e-7596-7514-aa0a-605ce5f1f2a9", None, 7])
def test_what_is_no_id_is_refused_and_the_transaction_stays_usable(
    wrong: object, tx: psycopg.Connection, outbox: Outbox
) -> None:
    with pytest.raises(PublishError, match=r"event_id is a uuid\.UUID"):
        outbox.cancel_event(wrong, conn=tx)  # type: ignore[arg-type]
    assert tx.execute("SELECT 1").fetchone()


def test_the_callers_own_factories_and_adapters_do_not_change_the_answer(
    tx: psycopg.Connection, conn: psycopg.Connection, outbox: Outbox
) -> None:
    ids = [outbox.publish_event("a", 1, delay=60, conn=conn, autocommit=True) for _ in range(2)]
    tx.row_factory = psycopg.rows.dict_row  # type: ignore[assignment]
    tx.execute("SET search_path = ''")
    assert outbox.cancel_event(ids[0], conn=tx) is True
    assert outbox.cancel_event(ids[0], conn=tx) is False
    with tx.pipeline():
        tx.execute("SELECT 1")
        assert outbox.cancel_event(ids[1], conn=tx) is True
        assert outbox.cancel_event(ids[1], conn=tx) is False
    tx.commit()
    assert waiting(conn) == []


def test_a_database_without_the_bus_says_what_to_do(empty_dsn: str, outbox: Outbox) -> None:
    with closing(psycopg.connect(empty_dsn)) as connection:
        for prepare in ("SELECT 1", "CREATE SCHEMA eventbus"):
            connection.execute(prepare.encode())
            connection.commit()
            with pytest.raises(psycopg.errors.ProgrammingError) as error:
                outbox.cancel_event(uuid.uuid4(), conn=connection)
            assert "eventbus migrate" in error.value.__notes__[0]
            connection.rollback()


async def test_the_same_on_an_async_connection(dsn: str, conn: psycopg.Connection, outbox: Outbox) -> None:
    event_id = outbox.publish_event("a", 1, delay=60, conn=conn, autocommit=True)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        with pytest.raises(NotInTransaction):
            await outbox.acancel_event(event_id, conn=connection)
        with pytest.raises(PublishError, match="async"):
            outbox.cancel_event(event_id, conn=connection)
        async with connection.transaction():
            assert await outbox.acancel_event(event_id, conn=connection) is True
            assert await outbox.acancel_event(event_id, conn=connection) is False
        assert await outbox.acancel_event(event_id, conn=connection, autocommit=True) is False
    assert waiting(conn) == []
