from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import sql

from eventbus.postgres.migrate import migrate
from eventbus.postgres.privileges import CONSUME, Right, grants
from eventbus.testing.plugins import PluginBench
from eventbus_circuit_breaker.health import findings
from eventbus_circuit_breaker.plugin import CircuitBreaker
from eventbus_circuit_breaker.records import Breaker, breakers, close_by_hand, migrations
from eventbus_circuit_breaker.sql import CLOSE, LOOK, OPEN
from tests.waiting import wait_until


class Table:
    """The breakers of one database, with pauses of 30, 60, … 600 seconds."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection
        migrate(connection.info.dsn, "eventbus", [("circuit_breaker", step) for step in migrations()])
        queue = {"patterns": ["#"], "kind": "plain", "tracking": "none"}
        connection.execute(
            "SELECT eventbus.declare_queues(%s)", [json.dumps([queue | {"name": name} for name in ("q", "other")])]
        )

    def ask(self, statement: str, *parameters: Any, connection: psycopg.Connection | None = None) -> Any:
        query = sql.SQL(statement).format(schema=sql.Identifier("eventbus"))
        return (connection or self.connection).execute(query, parameters).fetchone()

    def open(self, probe_age: float | None = None, connection: psycopg.Connection | None = None) -> Any:
        arguments = ("q", probe_age, "5 failures in a row", "OSError: no", 30.0, 2.0, 600.0, 60.0)
        return self.ask(OPEN, *arguments, connection=connection)

    def close(self, probe_age: float | None) -> Any:
        return self.ask(CLOSE, "q", probe_age)

    def age(self, seconds: float) -> None:
        """Let that much time pass for the breaker."""
        self.connection.execute(
            "UPDATE eventbus.circuit_breakers SET opened_at = opened_at - make_interval(secs => %(s)s),"
            " began_at = began_at - make_interval(secs => %(s)s)",
            {"s": seconds},
        )
        self.connection.execute("UPDATE eventbus.pauses SET until = until - make_interval(secs => %s)", (seconds,))

    def waits_for_a_lock(self, other: psycopg.Connection) -> bool:
        found = self.connection.execute(
            "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", (other.info.backend_pid,)
        ).fetchone()
        return bool(found and found[0])

    def pauses(self) -> dict[str, str]:
        rows = self.connection.execute("SELECT source, reason FROM eventbus.pauses").fetchall()
        return dict(rows)

    def shown(self, queue: str = "q") -> Breaker:
        [breaker] = [each for each in breakers(self.connection, "eventbus") if each.queue == queue]
        return breaker


@pytest.fixture
def table(conn: psycopg.Connection) -> Table:
    return Table(conn)


@pytest.fixture
def strangers(dsn: str) -> Iterator[list[psycopg.Connection]]:
    connections = [psycopg.connect(dsn, autocommit=True) for _ in range(3)]
    yield connections
    for connection in connections:
        connection.close()


def test_opening_pauses_the_queue_for_everybody_and_says_why(table: Table) -> None:
    assert table.open() == ("opened", 30.0, 1)
    assert table.pauses() == {"circuit_breaker": "5 failures in a row; OSError: no"}
    assert (table.shown().state, table.shown().reason, table.shown().error) == (
        "open", "5 failures in a row", "OSError: no",
    )  # fmt: skip


def test_processes_that_find_the_same_out_at_once_open_it_once(
    table: Table, strangers: list[psycopg.Connection]
) -> None:
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda stranger: table.open(connection=stranger), strangers))
    assert sorted(state for state, _, _ in found) == ["open", "open", "opened"]
    assert {trips for _, _, trips in found} == {1}
    assert all(29 < seconds <= 30 for _, seconds, _ in found)


def test_a_process_that_comes_second_finds_it_open_however_late_the_first_one_commits(
    table: Table, strangers: list[psycopg.Connection]
) -> None:
    table.open()
    table.close(probe_age=None)
    first, second, _ = strangers
    with ThreadPoolExecutor() as pool:
        with first.transaction():
            first.execute("SELECT 1 FROM eventbus.circuit_breakers WHERE queue = 'q' FOR UPDATE")
            late = pool.submit(table.open, connection=second)
            wait_until(lambda: table.waits_for_a_lock(second))
            assert table.open(connection=first)[0] == "opened"
        assert late.result(10)[::2] == ("open", 1)


def test_each_failed_probe_doubles_the_pause_up_to_ten_minutes(table: Table) -> None:
    table.open()
    seconds = []
    for _ in range(6):
        table.age(700)
        seconds.append(table.open(probe_age=0.1)[1])
    assert seconds == [60, 120, 240, 480, 600, 600]
    assert table.shown().trips == 7


def test_a_probe_that_began_before_the_newest_opening_changes_nothing(table: Table) -> None:
    table.open()
    table.age(50)
    assert table.open(probe_age=0.1)[2] == 2
    table.age(10)
    assert table.open(probe_age=30)[0] == "open"
    assert table.close(probe_age=30) == (None, None)
    assert table.shown().trips == 2


def test_failures_while_it_is_tried_do_not_open_it_again(table: Table) -> None:
    table.open()
    table.age(31)
    assert table.open() == ("open", 0.0, 1)
    assert table.shown().state == "ready"


def test_a_successful_probe_closes_it_and_the_next_pause_is_a_first_one(table: Table) -> None:
    table.open()
    table.age(40)
    table.open(probe_age=0.1)
    table.age(60)
    seconds, trips = table.close(probe_age=0.1)
    assert (round(seconds), trips) == (100, 2)
    assert table.pauses() == {}
    assert table.shown().state == "closed"
    assert table.open() == ("opened", 30.0, 1)


def test_closing_twice_happens_once(table: Table) -> None:
    table.open()
    table.age(40)
    assert table.close(probe_age=0.1) != (None, None)
    assert table.close(probe_age=0.1) == (None, None)
    assert table.open(probe_age=0.1)[0] == "closed"


def test_a_pause_by_hand_is_never_touched(table: Table) -> None:
    table.connection.execute(
        "SELECT eventbus.pause_queue((SELECT id FROM eventbus.queues WHERE name = 'q'), 'manual', 'repair', NULL, NULL)"
    )
    table.open()
    assert set(table.pauses()) == {"manual", "circuit_breaker"}
    table.age(40)
    table.close(probe_age=0.1)
    assert table.pauses() == {"manual": "repair"}
    assert table.shown().state == "closed"


def test_a_queue_that_somebody_resumed_by_hand_begins_anew(table: Table) -> None:
    table.open()
    table.age(40)
    table.open(probe_age=0.1)
    table.connection.execute("DELETE FROM eventbus.pauses")
    assert (table.shown().state, table.shown().trips) == ("closed", 0)
    assert table.close(probe_age=0.1) == (None, None)
    assert table.open() == ("opened", 30.0, 1)


def test_one_queue_leaves_another_alone(table: Table) -> None:
    table.open()
    assert table.ask(LOOK, "other") is None
    assert table.ask(LOOK, "q")[1] == 1


def test_a_queue_that_is_gone_is_no_trouble(table: Table) -> None:
    assert table.ask(OPEN, "gone", None, "", "", 30.0, 2.0, 600.0, 60.0) == ("unknown", 0.0, 0)
    assert table.ask(CLOSE, "gone", None) == (None, None)
    assert breakers(table.connection, "eventbus") == []


def test_a_person_may_close_it_whatever_its_probes_say(table: Table) -> None:
    table.open()
    closing = close_by_hand(table.connection, "eventbus", "q")
    assert closing is not None
    assert closing.trips == 1
    assert close_by_hand(table.connection, "eventbus", "q") is None


def test_a_role_that_only_consumes_can_open_and_close_it_with_the_rights_that_are_named(table: Table, run: str) -> None:
    role = f"eventbus_test_{run}_breaker"
    own = [Right(name, rights) for step in migrations() for name, rights in step.rights.items()]
    table.connection.execute(f"CREATE ROLE {role}".encode())
    try:
        for statement in grants([*CONSUME, *own], "eventbus", role):
            table.connection.execute(statement.encode())
        table.connection.execute(f"SET ROLE {role}".encode())
        assert table.open()[0] == "opened"
        assert table.ask(LOOK, "q")[1] == 1
        assert table.close(probe_age=None)[1] == 1
    finally:
        table.connection.execute("RESET ROLE")
        table.connection.execute(f"DROP OWNED BY {role}".encode())
        table.connection.execute(f"DROP ROLE {role}".encode())


def test_it_says_that_a_probe_is_out_and_that_one_was_lost(table: Table) -> None:
    table.open()
    table.age(31)
    [queue_id] = table.connection.execute("SELECT id FROM eventbus.queues WHERE name = 'q'").fetchall()[0]
    table.connection.execute("SELECT eventbus.take_probe(%s, gen_random_uuid(), gen_random_uuid())", (queue_id,))
    assert table.shown().state == "probing"
    assert 59 < (table.shown().seconds or 0) <= 60
    table.connection.execute("UPDATE eventbus.pauses SET probe_until = probe_until - interval '2 minutes'")
    assert table.shown().state == "ready"
    table.connection.execute("SELECT eventbus.heed_pauses(%s)", (queue_id,))
    assert table.shown().state == "open"


def test_a_doctor_names_the_queue_the_reason_and_what_to_do(table: Table) -> None:
    [before] = findings(table.connection, "eventbus")
    table.open()
    [found] = PluginBench(CircuitBreaker).call("eventbus_health", connection=table.connection, schema="eventbus")
    assert (before.level, before.code, found.level, found.code) == (
        "ok", "circuits_closed", "degraded", "circuit_open",
    )  # fmt: skip
    assert "queue q" in found.message
    assert "5 failures in a row; OSError: no" in found.message
    assert "eventbus circuits close q" in str(found.hint)
    table.age(31)
    assert [each.code for each in findings(table.connection, "eventbus")] == ["circuit_open"]


def test_a_doctor_tells_that_the_tables_are_gone_and_how_to_make_them_again(table: Table) -> None:
    table.connection.execute("DROP TABLE eventbus.circuit_breakers CASCADE")
    [found] = findings(table.connection, "eventbus")
    assert (found.level, found.code) == ("degraded", "circuit_breakers_missing")
    functions = table.connection.execute(
        "SELECT format('DROP FUNCTION %s', oid::regprocedure) FROM pg_proc"
        " WHERE starts_with(proname, 'circuit_breaker') AND pronamespace = 'eventbus'::regnamespace"
    ).fetchall()
    for (drop,) in functions:
        table.connection.execute(drop.encode())
    table.connection.execute(str(found.hint).partition("after: ")[2].encode())
    assert Table(table.connection).open()[0] == "opened", "what it says does not help"
