"""Publishing on real PostgreSQL: in the caller's transaction, on the caller's connection, or not at all."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from typing import Any

import psycopg
import pytest
from psycopg.types.json import JsonbDumper
from psycopg.types.string import StrBinaryDumper, StrDumper, TextLoader

from eventbus.errors import (
    InvalidHeaders,
    InvalidKey,
    InvalidPayload,
    InvalidTopic,
    NotInTransaction,
    PayloadTooLarge,
    PublishError,
)
from eventbus.event import Event, OutboxEvent, current_event
from eventbus.postgres.publishing import PublishStatements
from eventbus.publishing.connections import Statement
from eventbus.publishing.outbox import Outbox
from eventbus.settings import load

ORDER: dict[str, Any] = {"id": 1}


@pytest.fixture(scope="session")
def outbox() -> Outbox:
    return Outbox(PublishStatements("eventbus"), load({"max_payload_bytes": 1000}, environment={}))


@pytest.fixture
def tx(dsn: str) -> Iterator[psycopg.Connection]:
    """A connection as programs use it: not in autocommit mode, with a table of the program's own."""
    with closing(psycopg.connect(dsn)) as connection:
        connection.execute("CREATE TABLE orders (id integer)")
        connection.commit()
        yield connection


@asynccontextmanager
async def async_connection(dsn: str, *, autocommit: bool = False) -> AsyncIterator[psycopg.AsyncConnection]:
    connection = await psycopg.AsyncConnection.connect(dsn, autocommit=autocommit)
    async with connection:
        yield connection


def stored(dsn: str, columns: str = "topic", table: str = "outbox") -> list[Any]:
    """What others see now, oldest first: the rows of one table of the bus."""
    with psycopg.connect(dsn, autocommit=True) as other:
        rows = other.execute(f"SELECT {columns} FROM eventbus.{table} ORDER BY id").fetchall()
    return [row[0] if len(row) == 1 else row for row in rows]


def usable(connection: psycopg.Connection) -> bool:
    return connection.execute("SELECT 1").fetchone() is not None


# In the caller's transaction


def test_an_event_exists_if_and_only_if_the_business_row_does(tx: psycopg.Connection, dsn: str, outbox: Outbox) -> None:
    tx.execute("INSERT INTO orders VALUES (1)")
    outbox.publish_event("orders.created", ORDER, conn=tx)
    assert stored(dsn) == []
    tx.rollback()
    tx.execute("INSERT INTO orders VALUES (2)")
    outbox.publish_event("orders.kept", ORDER, conn=tx)
    tx.commit()
    assert stored(dsn) == ["orders.kept"]
    assert tx.execute("SELECT id FROM orders").fetchall() == [(2,)]


def test_an_event_of_a_rolled_back_savepoint_is_never_sent(tx: psycopg.Connection, dsn: str, outbox: Outbox) -> None:
    with tx.transaction():
        outbox.publish_event("a", ORDER, conn=tx)
        with suppress(ZeroDivisionError), tx.transaction():
            outbox.publish_event("b", ORDER, conn=tx)
            raise ZeroDivisionError
        with tx.transaction(force_rollback=True), tx.transaction():
            outbox.publish_event("c", ORDER, conn=tx)
        with tx.transaction():
            outbox.publish_event("d", ORDER, conn=tx)
        assert stored(dsn) == []
    assert stored(dsn) == ["a", "d"]


def test_events_of_savepoints_belong_to_the_outer_transaction_for_the_relay(
    tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    with tx.transaction():
        outbox.publish_event("a", ORDER, conn=tx)
        with tx.transaction():
            outbox.publish_event("b", ORDER, conn=tx)
    assert len(set(stored(dsn, "xid::text"))) == 1


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel))
def test_publishing_works_at_every_isolation_level(
    level: psycopg.IsolationLevel, tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    tx.isolation_level = level
    outbox.publish_event("a", ORDER, conn=tx)
    outbox.publish_events([("b", ORDER)], conn=tx)
    tx.commit()
    assert stored(dsn) == ["a", "b"]


def test_the_id_is_known_before_the_commit_and_is_the_stored_one(
    tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    mine = uuid.uuid4()
    ids = [outbox.publish_event("a", ORDER, conn=tx), outbox.publish_event("b", ORDER, event_id=mine, conn=tx)]
    ids += outbox.publish_events([("c", ORDER), OutboxEvent("d", ORDER, event_id=uuid.UUID(int=1))], conn=tx)
    tx.commit()
    assert ids[1] == mine
    assert ids[0].version == ids[2].version == 7
    assert ids[3] == uuid.UUID(int=1)
    assert stored(dsn, "event_id") == ids


# What is stored


@pytest.mark.parametrize("bulk", [False, True], ids=["one", "bulk"])
def test_every_column_arrives_exactly(bulk: bool, tx: psycopg.Connection, dsn: str, outbox: Outbox) -> None:
    payload = {"text": 'quote " back \\ tab \t { } , NULL é 😀 \0', "\0": "\\u0000", "n": 10**30, "f": -0.0}
    key = "k, \"q\" \\ {} 'é' NULL"
    headers = {"trace-id": 'a"b\\c,d \n', "none": None}
    if bulk:
        outbox.publish_events([OutboxEvent("null", payload, key, headers)], conn=tx)
    else:
        outbox.publish_event("null", payload, key=key, headers=headers, conn=tx)
    tx.commit()
    (row,) = stored(dsn, "topic, key, payload::text, headers::text, size, octet_length(payload::text)")
    topic, stored_key, text, stored_headers, size, octets = row
    assert (topic, stored_key) == ("null", key)
    assert json.loads(text) == payload
    assert str(json.loads(text)["f"]) == "-0.0"
    assert json.loads(stored_headers) == {"trace-id": 'a"b\\c,d \n'}
    assert size == octets == len(text.encode())


def test_one_and_many_store_the_same_text_byte_for_byte(tx: psycopg.Connection, dsn: str, outbox: Outbox) -> None:
    payloads: list[Any] = [
        None,
        0,
        "",
        [],
        {},
        [None],
        {"a": None},
        "null",
        True,
        [[1.0, 10**30]],
        {"\0": ["é😀\\u0000"]},
    ]
    for payload in payloads:
        outbox.publish_event("a", payload, conn=tx)
    outbox.publish_events([("a", payload) for payload in payloads], conn=tx)
    tx.commit()
    rows = stored(dsn, "payload::text, headers::text, key, size")
    assert rows[: len(payloads)] == rows[len(payloads) :]
    assert [json.loads(row[0]) for row in rows[: len(payloads)]] == payloads
    assert {row[1:3] for row in rows} == {(None, None)}


def test_many_events_keep_their_order_whatever_they_carry(tx: psycopg.Connection, dsn: str, outbox: Outbox) -> None:
    events = [
        OutboxEvent(f"t.{n}", {"n": n}, key=str(n) if n % 2 else None, headers={"n": str(n)} if n % 3 else None)
        for n in range(2_500)
    ]
    assert outbox.publish_events(iter(events), conn=tx) == stored_after_commit(tx, dsn)
    rows = stored(dsn, "topic, payload::text, key, headers::text")
    assert rows == [
        (f"t.{n}", f'{{"n":{n}}}', str(n) if n % 2 else None, f'{{"n":"{n}"}}' if n % 3 else None) for n in range(2_500)
    ]


def stored_after_commit(connection: psycopg.Connection, dsn: str) -> list[Any]:
    connection.commit()
    return stored(dsn, "event_id")


def test_no_events_are_no_statement_and_need_no_connection(outbox: Outbox) -> None:
    assert outbox.publish_events([]) == []


def test_large_payloads_are_split_into_statements_that_stay_small() -> None:
    outbox = Outbox(PublishStatements("eventbus"), load({}, environment={}))
    recorder = Recorder()
    outbox.connections.register(recorder)
    three = "x" * (3 * 1024 * 1024)
    nine = "x" * (9 * 1024 * 1024)
    outbox.publish_events([("a", nine)] + [("a", three)] * 5 + [("a", nine), ("b", 1)], conn=recorder)
    assert [len(json.loads(str(statement.parameters[3]))) for statement in recorder.statements] == [1, 2, 2, 1, 1, 1]
    outbox.publish_events([("a", 1)] * 2_001, conn=recorder)
    assert [len(json.loads(str(statement.parameters[3]))) for statement in recorder.statements] == [1000, 1000, 1]


class Recorder:
    """A connection and its adapter in one, as another library's adapter would be."""

    statements: Sequence[Statement] = ()
    answer: str | None = None
    open = True

    def handles(self, connection: object) -> bool:
        return connection is self

    def in_transaction(self, connection: object) -> bool:
        return self.open

    def execute(self, connection: object, statements: Sequence[Statement]) -> None:
        self.statements = statements

    def fetch(self, connection: object, statement: Statement) -> str | None:
        self.statements = [statement]
        return self.answer


def test_another_librarys_connection_gets_the_same_rules_and_only_text(outbox: Outbox) -> None:
    outbox = Outbox(PublishStatements("eventbus"), load({}, environment={}))
    recorder = Recorder()
    outbox.connections.register(recorder)
    outbox.publish_event("a", {"price": Decimal("1.5")}, key="k", delay=5, conn=recorder)
    outbox.publish_event("b", 1, conn=recorder)
    ((sql, parameters),) = recorder.statements
    assert "$6" in sql
    assert all(value is None or type(value) is str for value in parameters)
    assert outbox.cancel_event(uuid.uuid4(), conn=recorder) is False
    recorder.answer = "cancelled"
    assert outbox.cancel_event(uuid.uuid4(), conn=recorder) is True
    recorder.open = False
    with pytest.raises(NotInTransaction):
        outbox.publish_event("a", 1, conn=recorder)
    with pytest.raises(NotInTransaction):
        outbox.cancel_event(uuid.uuid4(), conn=recorder)


# Delay


@pytest.mark.parametrize(
    ("delay", "text"),
    [
        (1, "1.000000"),
        (1.5, "1.500000"),
        (0.000001, "0.000001"),
        (timedelta(days=2, microseconds=1), "172800.000001"),
        (timedelta(days=36_500), "3153600000.000000"),
    ],
)
def test_a_delay_is_exact_to_the_microsecond(delay: float | timedelta, text: str) -> None:
    outbox = Outbox(PublishStatements("eventbus"), load({}, environment={}))
    recorder = Recorder()
    outbox.connections.register(recorder)
    outbox.publish_event("a", 1, delay=delay, conn=recorder)
    assert recorder.statements[0].parameters[6] == f'{{"{text} seconds"}}'


def test_a_delayed_event_waits_in_its_own_table_for_the_databases_clock(
    tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    tx.execute("SET IntervalStyle = sql_standard")
    tx.execute("SET DateStyle = 'SQL, DMY'")
    tx.execute("SET TimeZone = 'Asia/Kathmandu'")
    at = datetime(2027, 2, 1, 3, 4, 5, 678_901, tzinfo=timezone(timedelta(hours=2, seconds=7)))
    outbox.publish_event("a", ORDER, key="k", headers={"h": "1"}, delay=90.25, conn=tx)
    outbox.publish_event("b", ORDER, delay=timedelta(days=2, microseconds=1), conn=tx)
    outbox.publish_event("c", ORDER, at=at, conn=tx)
    outbox.publish_event("d", ORDER, delay=0, conn=tx)
    outbox.publish_event("e", ORDER, delay=1e-9, conn=tx)
    tx.commit()
    assert stored(dsn) == ["d", "e"]
    rows = stored(dsn, "topic, due_at - created_at, due_at, key, headers::text, payload::text, size", "scheduled")
    assert [row[0] for row in rows] == ["a", "b", "c"]
    assert abs(rows[0][1] - timedelta(seconds=90.25)) < timedelta(seconds=1)
    assert abs(rows[1][1] - timedelta(days=2)) < timedelta(seconds=1)
    assert rows[2][2] == at
    assert rows[0][3:] == ("k", '{"h":"1"}', '{"id":1}', 8)


def test_an_event_that_is_due_already_or_in_a_hundred_years_is_accepted(
    tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    outbox.publish_event("a", ORDER, at=datetime(1999, 1, 1, tzinfo=UTC), conn=tx)
    outbox.publish_event("b", ORDER, at=datetime(1, 1, 1, tzinfo=UTC), conn=tx)
    outbox.publish_event("c", ORDER, at=datetime.max.replace(tzinfo=UTC), conn=tx)
    outbox.publish_event("d", ORDER, delay=timedelta(days=36_500), conn=tx)
    tx.commit()
    assert stored(dsn, table="scheduled") == ["a", "b", "c", "d"]


def test_a_priority_arrives_by_every_way_of_publishing_and_is_the_lowest_if_nothing_is_said(
    tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    class Urgency(IntEnum):
        HIGH = 7

    outbox.publish_event("a", 1, conn=tx)
    outbox.publish_event("b", 1, priority=9, conn=tx)
    outbox.publish_event("c", 1, priority=Urgency.HIGH, delay=60, conn=tx)
    many: list[OutboxEvent | tuple[str, Any]] = [
        OutboxEvent("d", 1, priority=3),
        ("e", 1),
        OutboxEvent("f", 1, priority=1, delay=60),
    ]
    outbox.publish_events(many, conn=tx)
    tx.execute("SELECT eventbus.publish('g', '1', priority => 4)")
    tx.execute("SELECT eventbus.publish('h', '1', priority => NULL)")
    tx.execute("SELECT eventbus.publish('i', '1', priority => 5, delay => '1 minute')")
    tx.commit()
    assert stored(dsn, "topic, priority") == [("a", 0), ("b", 9), ("d", 3), ("e", 0), ("g", 4), ("h", 0)]
    assert stored(dsn, "topic, priority", "scheduled") == [("c", 7), ("f", 1), ("i", 5)]


async def test_a_priority_arrives_from_an_async_connection_too(dsn: str, outbox: Outbox) -> None:
    async with async_connection(dsn) as connection:
        await outbox.apublish_event("a", 1, priority=9, conn=connection)
        await outbox.apublish_events([OutboxEvent("b", 1, priority=2)], conn=connection)
    assert stored(dsn, "topic, priority") == [("a", 9), ("b", 2)]


def test_a_misspelt_option_is_an_error_instead_of_being_ignored(tx: psycopg.Connection, outbox: Outbox) -> None:
    with pytest.raises(TypeError, match="prio"):
        outbox.publish_event("a", 1, prio=9, conn=tx)  # type: ignore[call-arg]


def test_delayed_and_immediate_events_of_one_call_go_their_own_ways(
    tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    outbox.publish_events([OutboxEvent("a", 1), OutboxEvent("b", 2, delay=60), OutboxEvent("c", 3)], conn=tx)
    tx.commit()
    assert stored(dsn) == ["a", "c"]
    assert stored(dsn, table="scheduled") == ["b"]


# Refused before any SQL


@pytest.mark.parametrize("major", [18], indirect=True)
@pytest.mark.parametrize(
    ("error", "options"),
    [
        (InvalidTopic, {"topic": "a..b"}),
        (InvalidTopic, {"topic": "orders.*"}),
        (InvalidTopic, {"topic": "a\0"}),
        (InvalidKey, {"key": "a\0b"}),
        (InvalidKey, {"key": "\ud83d"}),
        (InvalidKey, {"key": ""}),
        (InvalidKey, {"key": 7}),
        (InvalidHeaders, {"headers": {"Trace_ID": "1"}}),
        (InvalidHeaders, {"headers": {"a": "\0"}}),
        (InvalidHeaders, {"headers": "a"}),
        (InvalidPayload, {"payload": {"a": float("nan")}}),
        (InvalidPayload, {"payload": {"a": "\ud83d"}}),
        (InvalidPayload, {"payload": b"x"}),
        (PayloadTooLarge, {"payload": "x" * 999}),
        (PublishError, {"priority": -1}),
        (PublishError, {"priority": 10}),
        (PublishError, {"priority": 10**5000}),
        (PublishError, {"priority": True}),
        (PublishError, {"priority": 5.0}),
        (PublishError, {"priority": "5"}),
        (PublishError, {"priority": None}),
        (PublishError, {"delay": -1}),
        (PublishError, {"delay": timedelta(microseconds=-1)}),
        (PublishError, {"delay": float("nan")}),
        (PublishError, {"delay": float("inf")}),
        (PublishError, {"delay": 1e300}),
        (PublishError, {"delay": 10**5000}),
        (PublishError, {"delay": -(10**5000)}),
        (PublishError, {"delay": timedelta.max}),
        (PublishError, {"delay": "5"}),
        (PublishError, {"delay": True}),
        (PublishError, {"delay": 5, "at": datetime(2027, 1, 1, tzinfo=UTC)}),
        (PublishError, {"delay": 0, "at": datetime(2027, 1, 1, tzinfo=UTC)}),
        (PublishError, {"at": datetime(2027, 1, 1)}),  # noqa: DTZ001 - the point of the test
        (PublishError, {"at": date(2027, 1, 1)}),
        (PublishError, {"at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-1)))}),
        (PublishError, {"event_id": "01a22c4e-7596-7514-aa0a-605ce5f1f2a9"}),
    ],
)
def test_a_refused_publish_leaves_the_transaction_usable_and_its_other_events_unharmed(
    error: type[PublishError], options: dict[str, Any], tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    event: dict[str, Any] = {"topic": "bad", "payload": 1} | options
    with tx.transaction():
        outbox.publish_event("good", ORDER, conn=tx)
        with pytest.raises(error):
            outbox.publish_event(conn=tx, **event)
        with pytest.raises(error) as caught:
            outbox.publish_events([("bulk", 1), OutboxEvent(**event)], conn=tx)
        assert "number 1 of the events" in caught.value.__notes__[0]
        assert usable(tx)
    assert stored(dsn) == ["good"]
    assert stored(dsn, table="scheduled") == []


@pytest.mark.parametrize("item", ["orders.created", ("a",), ("a", 1, 2), ["a", 1], None, {"topic": "a"}], ids=repr)
def test_an_event_of_the_wrong_shape_is_refused_instead_of_being_taken_apart(item: Any, outbox: Outbox) -> None:
    with pytest.raises(PublishError, match="OutboxEvent or a tuple"):
        outbox.publish_events([item])


# The caller's connection


def test_outside_a_transaction_is_an_error_that_shows_both_ways_out(
    conn: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    with pytest.raises(NotInTransaction, match=r"with conn\.transaction\(\).*autocommit=True"):
        outbox.publish_event("a", ORDER, conn=conn)
    with pytest.raises(NotInTransaction):
        outbox.publish_events([("a", ORDER)], conn=conn)
    with conn.transaction():
        outbox.publish_event("b", ORDER, conn=conn)
    conn.execute("BEGIN")
    outbox.publish_event("c", ORDER, conn=conn)
    conn.execute("COMMIT")
    outbox.publish_event("d", ORDER, conn=conn, autocommit=True)
    assert stored(dsn) == ["b", "c", "d"]


def test_many_events_in_autocommit_mode_are_all_or_none(conn: psycopg.Connection, dsn: str, outbox: Outbox) -> None:
    conn.execute("ALTER TABLE eventbus.scheduled ADD CONSTRAINT no CHECK (topic <> 'poison')")
    events = [OutboxEvent("a", n) for n in range(1_500)] + [OutboxEvent("poison", 1, delay=60)]
    with pytest.raises(psycopg.errors.CheckViolation):
        outbox.publish_events(events, conn=conn, autocommit=True)
    assert stored(dsn) == []
    outbox.publish_events(events[:-1], conn=conn, autocommit=True)
    assert len(stored(dsn)) == 1_500


def test_many_events_never_commit_the_callers_transaction(tx: psycopg.Connection, dsn: str, outbox: Outbox) -> None:
    outbox.publish_events([("a", n) for n in range(1_500)], conn=tx, autocommit=True)
    assert stored(dsn) == []
    tx.rollback()
    assert stored(dsn) == []


@pytest.mark.parametrize("autocommit", [False, True])
def test_publishing_in_a_pipeline_joins_its_transaction(autocommit: bool, dsn: str, outbox: Outbox) -> None:
    with psycopg.connect(dsn, autocommit=autocommit) as connection, connection.pipeline():
        with connection.transaction():
            connection.execute("SELECT 1")
            outbox.publish_event("a", ORDER, conn=connection)
            outbox.publish_events([("b", n) for n in range(1_500)], conn=connection)
            assert stored(dsn) == []
        with suppress(ZeroDivisionError), connection.transaction():
            outbox.publish_event("c", ORDER, conn=connection)
            raise ZeroDivisionError
    assert len(stored(dsn)) == 1_501


def test_a_begin_or_commit_that_waits_in_the_pipeline_counts(
    conn: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    with conn.pipeline():
        conn.execute("SELECT 1")
        with pytest.raises(NotInTransaction):
            outbox.publish_event("a", ORDER, conn=conn)
        conn.execute("BEGIN")
        outbox.publish_event("b", ORDER, conn=conn)
        conn.execute("COMMIT")
        with pytest.raises(NotInTransaction):
            outbox.publish_event("c", ORDER, conn=conn)
    assert stored(dsn) == ["b"]


async def test_publishing_in_an_async_pipeline_joins_its_transaction(dsn: str, outbox: Outbox) -> None:
    async with async_connection(dsn, autocommit=True) as connection, connection.pipeline():
        await connection.execute("SELECT 1")
        with pytest.raises(NotInTransaction):
            await outbox.apublish_event("a", ORDER, conn=connection)
        async with connection.transaction():
            await outbox.apublish_event("b", ORDER, conn=connection)
            await outbox.apublish_events([("c", 1)], conn=connection)
    assert stored(dsn) == ["b", "c"]


async def test_async_connections_have_the_same_rules(dsn: str, outbox: Outbox) -> None:
    async with async_connection(dsn) as connection:
        first = await outbox.apublish_event("a", ORDER, key="k", headers={"h": "1"}, conn=connection)
        await outbox.apublish_event("later", ORDER, delay=60, conn=connection)
        with pytest.raises(InvalidPayload):
            await outbox.apublish_event("b", {1.5: 1}, conn=connection)
        assert stored(dsn) == []
        await connection.commit()
        await outbox.apublish_event("c", ORDER, conn=connection)
        await connection.rollback()
    async with async_connection(dsn, autocommit=True) as connection:
        with pytest.raises(NotInTransaction, match=r"with conn\.transaction\(\).*autocommit=True"):
            await outbox.apublish_event("d", ORDER, conn=connection)
        ids = await outbox.apublish_events([("e", n) for n in range(1_500)], conn=connection, autocommit=True)
        assert await outbox.apublish_events([]) == []
    assert stored(dsn, "event_id") == [first, *ids]
    assert stored(dsn, table="scheduled") == ["later"]


async def test_many_async_events_in_autocommit_mode_are_all_or_none(
    conn: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    conn.execute("ALTER TABLE eventbus.scheduled ADD CONSTRAINT no CHECK (topic <> 'poison')")
    async with async_connection(dsn, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.CheckViolation):
            await outbox.apublish_events(
                [OutboxEvent("a", 1), OutboxEvent("poison", 1, delay=60)], conn=connection, autocommit=True
            )
    assert stored(dsn) == []


async def test_a_connection_of_the_other_kind_is_refused_with_the_name_of_the_right_call(
    tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    async with async_connection(dsn) as connection:
        with pytest.raises(PublishError, match="apublish_event"):
            outbox.publish_event("a", ORDER, conn=connection)
        with pytest.raises(PublishError, match=r"call outbox\.publish_event"):
            await outbox.apublish_event("a", ORDER, conn=tx)


async def test_what_is_no_connection_is_refused_with_what_to_pass(
    tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    class Pool:
        def getconn(self) -> None:
            """What every pool has."""

    wrong: list[tuple[Any, str]] = [
        (Pool(), r"pool\.connection"),
        (tx.cursor(), r"cursor\.connection"),
        (dsn, "cannot publish on builtins.str"),
        (object(), "cannot publish on builtins.object"),
    ]
    for thing, hint in wrong:
        with pytest.raises(PublishError, match=hint):
            outbox.publish_event("a", ORDER, conn=thing)
        with pytest.raises(PublishError, match=hint):
            await outbox.apublish_event("a", ORDER, conn=thing)
        with pytest.raises(PublishError, match=hint), outbox.using(thing):
            pass
    with pytest.raises(PublishError, match=r"conn=.*outbox\.using"):
        outbox.publish_event("a", ORDER)


def test_errors_of_the_callers_connection_pass_through(
    tx: psycopg.Connection, conn: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable):
        tx.execute("SELECT FROM no_such_table")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        outbox.publish_event("a", ORDER, conn=tx)
    tx.rollback()
    outbox.publish_event("b", ORDER, conn=tx)
    conn.execute("SELECT pg_terminate_backend(%s)", [tx.info.backend_pid])
    with pytest.raises(psycopg.OperationalError):
        outbox.publish_event("c", ORDER, conn=tx)
    with pytest.raises(psycopg.OperationalError):
        outbox.publish_event("d", ORDER, conn=tx)
    conn.close()
    for autocommit in (False, True):
        with pytest.raises(psycopg.OperationalError, match="closed"):
            outbox.publish_event("e", ORDER, conn=conn, autocommit=autocommit)
    assert stored(dsn) == []


def test_a_database_without_the_bus_says_what_to_do(empty_dsn: str, outbox: Outbox) -> None:
    with closing(psycopg.connect(empty_dsn)) as connection, pytest.raises(psycopg.errors.UndefinedTable) as caught:
        outbox.publish_event("a", ORDER, conn=connection)
    assert "eventbus migrate" in caught.value.__notes__[0]


class Shouting(StrDumper):
    """Stands for any dumper that changes text."""

    def dump(self, obj: str) -> bytes:
        return obj.upper().encode()


class Reversed(TextLoader):
    def load(self, data: Any) -> str:
        return str(super().load(data))[::-1]


def only_with_columns(cursor: psycopg.Cursor) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Rows as dicts, by a factory that was never tried on an INSERT."""
    assert cursor.description is not None
    names = [column.name for column in cursor.description]
    return lambda values: dict(zip(names, values, strict=True))


def test_the_programs_own_adapters_and_row_factory_neither_matter_nor_change(
    tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    tx.row_factory = only_with_columns  # type: ignore[assignment]
    tx.cursor_factory = psycopg.ClientCursor
    tx.adapters.register_dumper(dict, JsonbDumper)
    tx.adapters.register_dumper(list, JsonbDumper)
    tx.adapters.register_dumper(str, StrBinaryDumper)
    tx.adapters.register_dumper(str, Shouting)
    tx.adapters.register_loader("text", Reversed)
    before = (tx.row_factory, tx.cursor_factory, tx.autocommit, tx.isolation_level, tx.prepare_threshold)
    outbox.publish_event("orders.created", {"id": ["x"]}, key="k", headers={"h": "v"}, conn=tx)
    outbox.publish_events([OutboxEvent("orders.created", {"id": ["x"]}, "k", {"h": "v"})], conn=tx)
    row: Any = tx.execute("SELECT %s::text AS t", ["ab"]).fetchone()
    assert row == {"t": "BA"}
    assert before == (tx.row_factory, tx.cursor_factory, tx.autocommit, tx.isolation_level, tx.prepare_threshold)
    tx.commit()
    expected = ("orders.created", "k", '{"id":["x"]}', '{"h":"v"}')
    assert stored(dsn, "topic, key, payload::text, headers::text") == [expected, expected]


async def test_the_programs_own_adapters_do_not_matter_on_an_async_connection(dsn: str, outbox: Outbox) -> None:
    async with async_connection(dsn) as connection:
        connection.adapters.register_dumper(str, Shouting)
        connection.row_factory = only_with_columns  # type: ignore[assignment]
        await outbox.apublish_event("orders.created", {"id": ["x"]}, key="k", headers={"h": "v"}, conn=connection)
        await outbox.apublish_events([("orders.created", {"id": ["x"]})], conn=connection)
    row = ("orders.created", '{"id":["x"]}')
    assert stored(dsn, "topic, payload::text") == [row, row]


def test_search_path_never_matters(tx: psycopg.Connection, dsn: str, outbox: Outbox) -> None:
    tx.execute("CREATE SCHEMA trap")
    tx.execute("CREATE FUNCTION trap.octet_length(text) RETURNS integer LANGUAGE sql AS 'SELECT -1'")
    tx.execute(
        "CREATE FUNCTION trap.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT now() - ''9 d''::interval'"
    )
    tx.execute("CREATE DOMAIN trap.uuid AS text CHECK (false)")
    tx.execute("CREATE DOMAIN trap.json AS text CHECK (false)")
    tx.execute("CREATE TABLE trap.outbox (topic text)")
    for path in ("", "trap, pg_catalog"):
        tx.execute("SELECT set_config('search_path', %s, false)", [path])
        outbox.publish_event("a", ORDER, conn=tx)
        outbox.publish_events([OutboxEvent("b", ORDER), OutboxEvent("c", ORDER, delay=60)], conn=tx)
    tx.commit()
    assert stored(dsn, "size") == [8, 8, 8, 8]
    assert stored(dsn, "due_at > created_at", "scheduled") == [True, True]


def test_a_schema_with_an_awkward_name_is_quoted(empty_dsn: str) -> None:
    from eventbus.postgres.migrate import migrate

    migrate(empty_dsn, schema="Evt-2")
    outbox = Outbox(PublishStatements("Evt-2"), load({}, environment={}))
    with psycopg.connect(empty_dsn) as connection:
        outbox.publish_event("a", ORDER, conn=connection)
        outbox.publish_events([OutboxEvent("b", ORDER, delay=1)], conn=connection)
        assert connection.execute('SELECT topic FROM "Evt-2".outbox').fetchall() == [("a",)]
    assert '"a""b".outbox' in PublishStatements('a"b').publish


def test_a_publisher_that_may_only_insert_named_columns_can_publish(
    conn: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    role = f"eventbus_test_{uuid.uuid4().hex[:12]}"
    columns = "(event_id, topic, key, payload, headers, priority, size)"
    conn.execute(f"CREATE ROLE {role}")
    try:
        conn.execute(f"GRANT USAGE ON SCHEMA eventbus TO {role}")
        conn.execute(f"GRANT INSERT {columns} ON eventbus.outbox TO {role}")
        conn.execute(f"GRANT INSERT (due_at, {columns[1:]} ON eventbus.scheduled TO {role}")
        with conn.transaction():
            conn.execute(f"SET LOCAL ROLE {role}")
            outbox.publish_event("a", ORDER, conn=conn)
            outbox.publish_events([OutboxEvent("b", ORDER), OutboxEvent("c", ORDER, delay=1)], conn=conn)
    finally:
        conn.execute(f"DROP OWNED BY {role}")
        conn.execute(f"DROP ROLE {role}")
    assert stored(dsn) == ["a", "b"]


# Binding a connection


def test_a_bound_connection_is_used_until_the_block_ends_and_blocks_nest(
    tx: psycopg.Connection, dsn: str, outbox: Outbox
) -> None:
    with closing(psycopg.connect(dsn)) as second:
        with outbox.using(tx):
            outbox.publish_event("a", ORDER)
            with outbox.using(second):
                outbox.publish_event("b", ORDER)
                outbox.publish_event("c", ORDER, conn=tx)
            outbox.publish_events([("d", ORDER)])
        with pytest.raises(PublishError, match="no connection"):
            outbox.publish_event("e", ORDER)
        tx.commit()
    assert stored(dsn) == ["a", "c", "d"]


def test_an_error_inside_the_block_unbinds_the_connection(tx: psycopg.Connection, outbox: Outbox) -> None:
    with pytest.raises(ZeroDivisionError), outbox.using(tx):
        raise ZeroDivisionError
    with pytest.raises(PublishError, match="no connection"):
        outbox.publish_event("a", ORDER)


def test_a_binding_is_for_one_bus_and_one_thread(tx: psycopg.Connection, outbox: Outbox) -> None:
    other_bus = Outbox(PublishStatements("other"), load({}, environment={}))
    problems: list[str] = []

    def publish() -> None:
        try:
            outbox.publish_event("a", ORDER)
        except PublishError as error:
            problems.append(str(error))

    with outbox.using(tx):
        with pytest.raises(PublishError, match="no connection"):
            other_bus.publish_event("a", ORDER)
        thread = threading.Thread(target=publish)
        thread.start()
        thread.join()
    assert problems
    assert "no connection" in problems[0]


async def test_concurrent_tasks_publish_each_on_its_own_bound_connection(dsn: str, outbox: Outbox) -> None:
    all_bound = asyncio.Barrier(3)

    async def work(name: str) -> None:
        async with async_connection(dsn) as connection:
            with outbox.using(connection):
                await all_bound.wait()
                await outbox.apublish_event(name, ORDER)
                await asyncio.create_task(outbox.apublish_event(f"{name}.child", ORDER))
                if name == "b":
                    await connection.rollback()

    await asyncio.gather(work("a"), work("b"), work("c"))
    assert sorted(stored(dsn)) == ["a", "a.child", "c", "c.child"]


async def test_a_task_that_outlives_the_block_cannot_publish_on_a_connection_that_others_use_by_then(
    dsn: str, outbox: Outbox
) -> None:
    ended = asyncio.Event()

    async def late() -> None:
        await ended.wait()
        await outbox.apublish_event("late", ORDER)

    async with async_connection(dsn) as outer:
        with outbox.using(outer):
            async with async_connection(dsn) as inner:
                with outbox.using(inner):
                    task = asyncio.create_task(late())
                ended.set()
                with pytest.raises(PublishError, match="has ended"):
                    await task
    assert stored(dsn) == []


async def test_a_block_that_is_closed_in_another_context_ends_quietly(tx: psycopg.Connection, outbox: Outbox) -> None:
    async def bound() -> AsyncIterator[None]:
        with outbox.using(tx):
            yield

    async def step(generator: AsyncIterator[None]) -> None:
        await anext(generator, None)

    generator = bound()
    await asyncio.create_task(step(generator))
    await asyncio.create_task(step(generator))


# What caused what


def cause(headers: str | None) -> Event:
    return Event(
        event_id="01a22c4e-7596-7514-aa0a-605ce5f1f2a9",
        topic="orders.created",
        payload="1",
        headers=headers,
        key=None,
        published_at=datetime(2026, 11, 30, tzinfo=UTC),
        queue="billing",
    )


@pytest.mark.parametrize(
    ("inherited", "given", "expected"),
    [
        (None, None, {"correlation-id": str(cause(None).event_id), "causation-id": str(cause(None).event_id)}),
        (
            '{"correlation-id":"request-7","causation-id":"x","tenant":"t"}',
            {"own": "1"},
            {"own": "1", "tenant": "t", "correlation-id": "request-7", "causation-id": str(cause(None).event_id)},
        ),
        (
            '{"correlation-id":"request-7"}',
            {"correlation-id": "mine"},
            {"correlation-id": "mine", "causation-id": str(cause(None).event_id)},
        ),
        ('{"correlation-id":"request-7"}', {"correlation-id": None, "causation-id": None}, None),
        ('{"correlation-id":7}', {"causation-id": "mine"}, {"causation-id": "mine", "correlation-id": "7"}),
    ],
)
def test_what_a_handler_publishes_says_which_event_and_request_caused_it(
    inherited: str | None,
    given: dict[str, str | None] | None,
    expected: dict[str, str] | None,
    tx: psycopg.Connection,
    dsn: str,
    outbox: Outbox,
) -> None:
    token = current_event.set(cause(inherited))
    try:
        outbox.publish_event("a", ORDER, headers=given, conn=tx)
        outbox.publish_events([OutboxEvent("b", ORDER, headers=given)], conn=tx)
    finally:
        current_event.reset(token)
    tx.commit()
    assert stored(dsn, "headers") == [expected, expected]


def test_outside_a_handler_no_headers_are_invented(tx: psycopg.Connection, dsn: str, outbox: Outbox) -> None:
    outbox.publish_event("a", ORDER, conn=tx)
    outbox.publish_event("b", ORDER, headers={}, conn=tx)
    tx.commit()
    assert stored(dsn, "headers") == [None, None]
