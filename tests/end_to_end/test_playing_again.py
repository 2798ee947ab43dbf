"""Redrive and replay from the command line, with real workers beside them, and with real kills in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from eventbus import cli
from eventbus.bus import EventBus
from eventbus.postgres.admin import resume
from eventbus.settings import load
from tests.postgres.line import SCHEMA, Line
from tests.waiting import wait_until

pytestmark = [pytest.mark.usefixtures("major"), pytest.mark.parametrize("major", [18], indirect=True)]

PROGRAM = str(Path(sys.executable).with_name("eventbus"))
HANDLERS = """
import json, os
from eventbus import Event, RetryPolicy, subscribe

FILE = os.open("journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
ONCE = RetryPolicy(max_attempts=1)

def note(event):
    marks = [event.replay_id, event.is_replay, event.redriven, event.attempt]
    os.write(FILE, (json.dumps([event.queue, str(event.event_id), event.key, *marks]) + "\\n").encode())
    if os.path.exists("broken"):
        raise ValueError("no connection")

@subscribe("orders.#", name="ledger", idempotent=True, retry=ONCE)
async def ledger(event: Event): note(event)

@subscribe("orders.#", name="book", ordered=True, retry=ONCE)
async def book(event: Event): note(event)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One call of a handler."""

    queue: str
    event_id: str
    key: str | None
    replay_id: int
    is_replay: bool
    redriven: bool
    attempt: int


class Shop:
    """A folder with handlers, a database, and the processes of the test."""

    def __init__(self, dsn: str, folder: Path, stack: ExitStack) -> None:
        self.dsn = dsn
        self.folder = folder
        self._stack = stack
        self._bus = EventBus(load({"dsn": dsn, "plugins": ()}, environment={}, folder=folder))
        (folder / "shop.py").write_text(HANDLERS)
        with psycopg.connect(dsn, autocommit=True) as conn:
            resume(conn, SCHEMA)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENTBUS_")}
        process = subprocess.Popen(
            [PROGRAM, *map(str, arguments)],
            env=environment
            | {"EVENTBUS_DSN": self.dsn, "EVENTBUS_PLUGINS": "stats", "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def done(self, *arguments: object, code: int = 0) -> str:
        """What a command answers, once it has ended."""
        out, err = (process := self.start(*arguments)).communicate(timeout=60)
        assert process.returncode == code, out + err
        return out

    def consume(self) -> None:
        self.done("consume", "shop", "--until-idle")

    def publish(self, count: int) -> list[str]:
        with psycopg.connect(self.dsn) as conn:
            events = [("orders.created", {"n": n}, f"k{n % 5}") for n in range(count)]
            return [
                str(self._bus.outbox.publish_event(topic, payload, key=key, conn=conn))
                for topic, payload, key in events
            ]

    def runs(self, queue: str) -> list[Run]:
        if not (self.folder / "journal").exists():
            return []
        runs = [Run(*json.loads(line)) for line in (self.folder / "journal").read_text().splitlines()]
        return [run for run in runs if run.queue == queue]

    def wait_for_runs(self, queue: str, count: int) -> None:
        wait_until(lambda: len(self.runs(queue)) >= count, 20)

    def query(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            return conn.execute(statement.encode(), parameters).fetchall()

    def count(self, table: str, condition: str = "true") -> int:
        return int(self.query(f"SELECT count(*) FROM eventbus.{table} WHERE {condition}")[0][0])


@pytest.fixture
def shop(dsn: str, tmp_path: Path) -> Iterator[Shop]:
    with ExitStack() as stack:
        yield Shop(dsn, tmp_path, stack)


def in_order_per_key(runs: list[Run], published: list[str]) -> bool:
    place = {event_id: n for n, event_id in enumerate(published)}
    by_key: dict[str | None, list[int]] = defaultdict(list)
    for run in runs:
        by_key[run.key].append(place[run.event_id])
    return all(places == sorted(places) for places in by_key.values())


def test_events_are_replayed_beside_running_workers_once_each_and_in_order(shop: Shop) -> None:
    worker = shop.start("consume", "shop")
    wait_until(lambda: shop.count("queues") == 2, 20)
    first = shop.publish(300)
    for queue in ("ledger", "book"):
        shop.wait_for_runs(queue, 300)
    replays = {queue: shop.start("replay", queue, "--rate", "400", "--json") for queue in ("ledger", "book")}
    later = [event_id for _ in range(10) for event_id in shop.publish(30)]
    for queue, process in replays.items():
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        answer = json.loads(out)
        assert answer["state"] == "finished"
        assert answer["played"] >= 300
        shop.wait_for_runs(queue, 600 + answer["played"])
        runs = shop.runs(queue)
        assert Counter(run.event_id for run in runs if not run.is_replay) == Counter(first + later)
        replayed = [run for run in runs if run.is_replay]
        assert {run.replay_id for run in replayed} == {answer["replay"]}
        again = Counter(run.event_id for run in replayed)
        assert set(again.values()) == {1}
        assert set(first) <= set(again)
        assert len(again) == answer["played"]
        assert not any(run.redriven for run in runs)
    replayed = [run for run in shop.runs("book") if run.is_replay]
    assert in_order_per_key(replayed, first + later)
    assert in_order_per_key([run for run in shop.runs("book") if not run.is_replay], first + later)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    assert shop.count("dead_letters") == 0


def test_a_replay_that_is_killed_and_resumed_plays_each_event_once(shop: Shop) -> None:
    shop.consume()
    published = shop.publish(300)
    shop.consume()
    process = shop.start("replay", "ledger", "--rate", "300")
    wait_until(lambda: shop.count("deliveries", "replay_id > 0") >= 60, 20)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    said = process.stderr.read() if process.stderr else ""
    [resume_with] = [line.rpartition("eventbus ")[2].split() for line in said.splitlines() if "--resume" in line]
    played = shop.count("deliveries", "replay_id > 0")
    assert played < 300
    shop.done(*resume_with)
    assert shop.count("deliveries", "replay_id > 0") == 300
    shop.consume()
    assert Counter(run.event_id for run in shop.runs("ledger") if run.is_replay) == Counter(published)
    shop.done(*resume_with, code=2)


def test_a_replay_that_is_interrupted_says_how_far_it_came_and_how_to_go_on(shop: Shop) -> None:
    shop.consume()
    shop.publish(200)
    shop.consume()
    process = shop.start("replay", "ledger", "--rate", "50")
    wait_until(lambda: shop.count("deliveries", "replay_id > 0") >= 10, 20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    played = shop.count("deliveries", "replay_id > 0")
    assert out == f"played {played} events into ledger\n"
    assert err.splitlines()[-1] == "stopped before the end; go on with: eventbus replay ledger --resume 1"
    assert f"{200 - played} events into ledger, 200 in all" in shop.done("replay", "ledger", "--resume", "1")


def test_a_redrive_that_is_killed_leaves_each_letter_in_one_place_and_one_that_fails_again_makes_one(
    shop: Shop,
) -> None:
    shop.consume()
    (shop.folder / "broken").touch()
    published = shop.publish(1000)
    shop.consume()
    assert shop.count("dead_letters") == 1000 + 5, "each of the ledger, and the first of each key"
    process = shop.start("dead-letters", "redrive", "--queue", "ledger", "--rate", "1000")
    wait_until(lambda: shop.count("exceptions", "redriven_from > 0") >= 200, 20)
    process.kill()
    process.wait(10)
    places = "SELECT seq FROM eventbus.{} WHERE queue_id = (SELECT id FROM eventbus.queues WHERE name = 'ledger')"
    seqs = [seq for (seq,) in shop.query(f"{places.format('exceptions')} UNION ALL {places.format('dead_letters')}")]
    assert sorted(seqs) == list(range(1, 1001))
    left = shop.count("dead_letters") - 5
    assert 0 < left < 1000
    both = [shop.start("dead-letters", "redrive", "--queue", "ledger", "--json") for _ in range(2)]
    moved = [number for process in both for number in json.loads(process.communicate(timeout=60)[0])["redriven"]]
    assert len(moved) == len(set(moved)) == left
    assert shop.count("exceptions", "redriven_from > 0") == 1000
    shop.consume()
    rows = shop.query(
        "SELECT event_id::text, attempts, redriven_from IS NOT NULL FROM eventbus.dead_letters l"
        " JOIN eventbus.queues q ON q.id = l.queue_id WHERE q.name = 'ledger'"
    )
    assert Counter(rows) == Counter((event_id, 1, True) for event_id in published)
    (shop.folder / "broken").unlink()
    shop.done("dead-letters", "redrive", "--all")
    shop.consume()
    assert shop.count("dead_letters") == 0
    assert Counter(run.event_id for run in shop.runs("ledger")) == Counter(published * 3)
    assert {(run.redriven, run.attempt) for run in shop.runs("ledger")[1000:]} == {(True, 1)}
    succeeded = shop.runs("book")[5:]
    assert Counter(run.event_id for run in succeeded) == Counter(published)
    assert in_order_per_key(succeeded, published)


def test_a_redrive_that_is_interrupted_says_how_many_it_moved(shop: Shop) -> None:
    shop.consume()
    (shop.folder / "broken").touch()
    shop.publish(100)
    shop.consume()
    process = shop.start("dead-letters", "redrive", "--queue", "ledger", "--rate", "20")
    wait_until(lambda: shop.count("exceptions", "redriven_from > 0") >= 5, 20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    moved = shop.count("exceptions", "redriven_from > 0")
    assert out == f"{moved} dead letters back in the queue\n"
    assert "stopped before the end" in err
    assert "Traceback" not in err


# What was asked for


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def on(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run one command in this process: its exit code and what it said."""
    for name in [name for name in os.environ if name.startswith("EVENTBUS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EVENTBUS_DSN", dsn)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def line(conn: psycopg.Connection) -> Line:
    line = Line(conn)
    line.declare(ledger=["orders.#"])
    line.live()
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("redrive", "--since", "yesterday"), "--since"),
        (("redrive", "--since", "90"), "'90' is no moment"),
        (("redrive", "--until", "2030-01-31T09:00:00"), "with the offset from UTC"),
        (("redrive", "--since", "99999999999999999d"), "--since"),
        (("redrive", "--since", "40000d"), "at most 36500 days"),
        (("redrive", "--since", "1h", "--until", "2h"), "is not before"),
        (("redrive", "--all", "--rate", "0"), "rate of 0"),
        (("redrive", "--all", "--rate", "nan"), "rate of nan"),
        (("redrive", "--all", "--rate", "fast"), "--rate"),
        (("redrive", "--error", ""), "error ''"),
        (("redrive", "--error", "\udcff"), "stored"),
        (("redrive", "--topic", "a.b*"), "wildcard"),
        (("redrive", str(2**63)), "9223372036854775808 is no number of a dead letter"),
        (("discard", "0", "--yes"), "0 is no number of a dead letter"),
        (("show", str(10**30)), "is no number of a dead letter"),
        (("list", "--until", "soon"), "--until"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(on: Command, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = on("dead-letters", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("ledger", "--topic", "users.*"), 2, "known patterns: orders.#"),
        (("nope",), 1, "known queues: ledger"),
        (("ledger", "--resume", "7"), 1, "no replay 7"),
        (("ledger", "--resume", "7", "--since", "2h"), 2, "--since"),
        (("ledger", "--resume", "7", "--dry-run"), 2, "--dry-run"),
        (("ledger", "--resume", str(2**31)), 2, "no number of a replay"),
        (("ledger", "--rate", "-1"), 2, "rate"),
        (("ledger", "--since", "1h", "--until", "1h"), 2, "is not before"),
        (("led\udcffger",), 2, "queue"),
    ],
)
def test_a_replay_that_cannot_be_is_one_line(
    on: Command, line: Line, arguments: tuple[str, ...], code: int, words: str
) -> None:
    line.publish()
    line.relay()
    found, out, err = on("replay", *arguments)
    assert (found, out, len(err.splitlines())) == (code, "", 1), err
    assert words in err
    assert line.one("SELECT count(*) FROM eventbus.replays") == 0


def test_a_dry_run_shows_what_would_be_done_and_changes_nothing(on: Command, line: Line) -> None:
    line.kill("ledger", 3)
    tables = ("outbox", "deliveries", "exceptions", "dead_letters", "replays", "claims", "ticks")
    content = {
        table: line.conn.execute(f"SELECT t::text FROM eventbus.{table} t".encode()).fetchall() for table in tables
    }
    code, out, err = on("dead-letters", "redrive", "--error", "NO SUCH", "--dry-run")
    assert (code, out.splitlines()[1]) == (0, "ledger\torders.created\tgave up\t3\t0")
    assert err == "3 dead letters would be redriven; nothing was changed\n"
    code, out, err = on("dead-letters", "discard", 1, 999, "--dry-run", "--json")
    assert (code, json.loads(out)["missing"], json.loads(out)["groups"][0]["letters"]) == (1, [999], 1)
    code, out, err = on("replay", "ledger", "--dry-run", "--since", "2h")
    assert (code, out.splitlines()[1].split("\t")[:2]) == (0, ["orders.created", "3"])
    assert err == "3 events would be played into ledger; nothing was changed\n"
    assert json.loads(on("replay", "ledger", "--dry-run", "--json")[1])[0]["events"] == 3
    for table in tables:
        assert line.conn.execute(f"SELECT t::text FROM eventbus.{table} t".encode()).fetchall() == content[table]


def test_filters_add_up(on: Command, line: Line) -> None:
    line.kill("ledger", 2)
    line.conn.execute("UPDATE eventbus.dead_letters SET died_at = died_at - interval '3 hours' WHERE id = 1")
    assert "nothing was redriven" in on("dead-letters", "redrive", 1, "--since", "2h")[1]
    assert on("dead-letters", "list", "--since", "2h", "--json")[1].count('"id"') == 1
    assert json.loads(on("dead-letters", "redrive", "--queue", "ledger", "--since", "2h", "--json")[1])["redriven"] == [
        2
    ]
    assert json.loads(on("dead-letters", "discard", "--until", "2h", "--yes", "--json")[1])["discarded"] == [1]


def test_a_letter_tells_what_it_was_and_what_it_blocks(on: Command, line: Line) -> None:
    line.kill("ledger", 1)
    line.conn.execute("UPDATE eventbus.dead_letters SET redriven_from = 17, blocks = true")
    shown = on("dead-letters", "show", 1)[1]
    assert "redriven from 17" in shown
    assert "later events of its key wait" in shown
