"""The wire fails where it is told to, so that a test that uses it has tried what it says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

from eventbus.testing.wire import Fault, When, Wire
from tests.waiting import wait_until

pytestmark = pytest.mark.parametrize("major", [18], indirect=True)
INSERT = "INSERT INTO kept VALUES (%s)"


@pytest.fixture
def wire(empty_dsn: str) -> Iterator[Wire]:
    with Wire(empty_dsn) as wire:
        query(empty_dsn, "CREATE TABLE kept (id int)")
        yield wire


def query(dsn: str, statement: str) -> list[tuple[int]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize(("when", "kept"), [("before", []), ("after", [(1,)])])
def test_a_cut_statement_has_reached_the_server_exactly_if_it_was_cut_afterwards(
    wire: Wire, empty_dsn: str, when: When, kept: list[tuple[int]], prepare: bool
) -> None:
    with psycopg.connect(wire.dsn, autocommit=True) as connection:
        wire.arm(Fault("INSERT INTO kept", when))
        connection.execute("SELECT %s", [1], prepare=prepare)
        assert wire.cuts == 0
        with pytest.raises(psycopg.OperationalError):
            connection.execute(INSERT, [1], prepare=prepare)
    assert wire.cuts == 1
    assert query(empty_dsn, "SELECT id FROM kept") == kept
    assert query(wire.dsn, "SELECT 1") == [(1,)], "only one connection was to be cut"


def test_a_statement_that_was_prepared_before_the_fault_was_armed_is_found(wire: Wire, empty_dsn: str) -> None:
    with psycopg.connect(wire.dsn, autocommit=True) as connection:
        connection.execute(INSERT, [1], prepare=True)
        wire.arm(Fault("INSERT INTO kept", "after"))
        with pytest.raises(psycopg.OperationalError):
            connection.execute(INSERT, [2], prepare=True)
    assert query(empty_dsn, "SELECT id FROM kept ORDER BY id") == [(1,), (2,)]


@pytest.mark.parametrize(("when", "kept"), [("before", []), ("after", [(1,)])])
def test_neither_side_of_a_silent_connection_hears_that_it_is_gone(
    wire: Wire, empty_dsn: str, when: When, kept: list[tuple[int]]
) -> None:
    heard = threading.Event()
    connection = psycopg.connect(wire.dsn, autocommit=True)

    def insert() -> None:
        with pytest.raises(psycopg.OperationalError):
            connection.execute(INSERT, [1])
        heard.set()

    wire.arm(Fault("INSERT INTO kept", when, "silence"))
    client = threading.Thread(target=insert)
    client.start()
    wait_until(lambda: wire.cuts == 1 and query(empty_dsn, "SELECT id FROM kept") == kept)
    there = f"SELECT 1 FROM pg_stat_activity WHERE pid = {connection.info.backend_pid}"
    assert query(empty_dsn, there) == [(1,)]
    assert not heard.wait(0.2)
    wire.__exit__()
    assert heard.wait(10)
    client.join()
    connection.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_delayed_statement_is_late_and_whole(wire: Wire, empty_dsn: str, when: When) -> None:
    with psycopg.connect(wire.dsn, autocommit=True) as connection:
        wire.arm(Fault("INSERT INTO kept", when, "delay", 0.2))
        began = time.monotonic()
        connection.execute(INSERT, [1])
        assert time.monotonic() - began >= 0.2
        assert connection.execute("SELECT id FROM kept").fetchall() == [(1,)]


def test_a_wire_leaves_no_thread_behind(empty_dsn: str) -> None:
    before = set(threading.enumerate())
    with Wire(empty_dsn) as wire, psycopg.connect(wire.dsn, autocommit=True) as connection:
        connection.execute("SELECT 1")
        assert len(set(threading.enumerate()) - before) == 2
    assert set(threading.enumerate()) == before
