"""A dead letter is in exactly one place at any moment, whoever redrives it, and comes back as the same event."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any
from uuid import UUID

import psycopg
import pytest

from eventbus.postgres import dead_letters
from eventbus.postgres.admin import NotFound
from eventbus.postgres.dead_letters import Letter, Selection
from eventbus.postgres.explanation import explain
from eventbus.postgres.pacing import Pace
from tests.postgres.line import DEAD, RETRY, SCHEMA, Line
from tests.waiting import wait_until

ALL = Selection()


@pytest.fixture
def line(conn: psycopg.Connection) -> Line:
    line = Line(conn)
    line.declare(ledger=["orders.#"])
    line.live()
    return line


def letters(line: Line, selection: Selection = ALL) -> list[Letter]:
    return dead_letters.letters(line.conn, SCHEMA, selection, limit=10_000)


def redrive(line: Line, selection: Selection = ALL, batch: int = 500) -> list[int]:
    return dead_letters.redrive(line.conn, SCHEMA, selection, Pace(batch=batch))


def event_ids(line: Line) -> list[UUID]:
    return [event_id for (event_id,) in line.conn.execute("SELECT event_id FROM eventbus.outbox ORDER BY id")]


def test_a_dead_letter_shows_the_whole_event_as_it_was_published(line: Line) -> None:
    line.conn.execute(
        "SELECT eventbus.publish('orders.created', '{\"n\":  1.50, \"n\": 2}', 'k', '{\"tenant\": \"a\"}')"
    )
    line.relay()
    claim = line.claim("ledger")
    assert line.settle(claim, s1=DEAD)
    [letter] = letters(line)
    assert (letter.queue, letter.topic, letter.key, letter.reason) == ("ledger", "orders.created", "k", "gave up")
    assert letter.payload == '{"n":  1.50, "n": 2}'
    assert letter.headers == '{"tenant": "a"}'
    assert letter.event_id == event_ids(line)[0]
    assert letter.last_error["message"] == "no such order"


def test_a_redriven_event_is_due_now_with_all_its_attempts_and_its_old_id(line: Line) -> None:
    event_id = line.publish()
    line.relay()
    assert line.settle(line.claim("ledger"), s1=RETRY)
    line.conn.execute("UPDATE eventbus.exceptions SET due_at = clock_timestamp(), crashes = 0, attempts = 4")
    [held] = line.claim_due("ledger")
    assert line.settle_exception(held, **DEAD)
    assert redrive(line) == [1]
    assert letters(line) == []
    row = line.conn.execute(
        "SELECT e.attempts, e.crashes, e.state, e.due_at <= clock_timestamp(), o.event_id, e.last_error"
        " FROM eventbus.exceptions e JOIN eventbus.outbox o ON o.id = e.outbox_id"
    ).fetchall()
    assert row == [(0, 0, "waiting", True, event_id, None)]


def test_workers_that_wait_are_told_of_a_redrive(line: Line, dsn: str) -> None:
    line.kill("ledger", 1)
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute('LISTEN "eventbus.work"')
        redrive(line)
        assert [notice.payload for notice in listener.notifies(timeout=5, stop_after=1)] == ["*"]


def test_a_redriven_event_that_fails_again_makes_one_dead_letter(line: Line) -> None:
    line.kill("ledger", 1)
    for _ in range(3):
        redrive(line)
        [held] = line.claim_due("ledger")
        assert line.settle_exception(held, **DEAD)
        assert [letter.attempts for letter in letters(line)] == [1]
    assert len(event_ids(line)) == 1


def test_two_redrives_at_once_move_each_letter_once(line: Line, dsn: str) -> None:
    line.kill("ledger", 300)
    barrier = Barrier(3)

    def one(_: int) -> list[int]:
        with psycopg.connect(dsn, autocommit=True) as connection:
            barrier.wait(30)
            return dead_letters.redrive(connection, SCHEMA, ALL, Pace(batch=7))

    with ThreadPoolExecutor(3) as threads:
        moved = sorted(letter for part in threads.map(one, range(3)) for letter in part)
    assert moved == sorted(set(moved))
    assert len(moved) == 300
    assert letters(line) == []
    assert line.one("SELECT count(DISTINCT seq) FROM eventbus.exceptions") == 300
    assert line.one("SELECT count(*) FROM eventbus.exceptions") == 300


class Killed(Exception):
    pass


def test_a_redrive_that_is_killed_leaves_each_letter_in_exactly_one_place(line: Line) -> None:
    line.kill("ledger", 100)

    def kill(_: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        dead_letters.redrive(line.conn, SCHEMA, ALL, Pace(batch=30, progress=kill))
    places = line.conn.execute(
        "SELECT seq FROM eventbus.exceptions UNION ALL SELECT seq FROM eventbus.dead_letters ORDER BY 1"
    ).fetchall()
    assert places == [(seq,) for seq in range(1, 101)]
    assert len(letters(line)) == 70
    assert len(redrive(line)) == 70


def test_what_dies_again_during_a_redrive_of_everything_does_not_keep_it_going(line: Line) -> None:
    line.kill("ledger", 4)

    def fail_again(_: int) -> None:
        for held in line.claim_due("ledger"):
            assert line.settle_exception(held, **DEAD)

    assert len(dead_letters.redrive(line.conn, SCHEMA, ALL, Pace(batch=2, progress=fail_again))) == 4
    assert len(letters(line)) == 4


def test_an_event_that_retention_removed_returns_under_its_old_id_and_is_not_relayed_again(line: Line) -> None:
    line.declare(audit=["orders.#"])
    published = line.publish(payload={"kept": "byte for  byte"}, key="k")
    line.relay()
    for queue in ("ledger", "audit"):
        assert line.settle(line.claim(queue), s1=DEAD)
    before = line.conn.execute("SELECT id, event_id, topic, key, payload::text, size FROM eventbus.outbox").fetchall()
    line.conn.execute("DELETE FROM eventbus.outbox")
    assert len(redrive(line)) == 2
    after = line.conn.execute("SELECT id, event_id, topic, key, payload::text, size FROM eventbus.outbox").fetchall()
    assert after == before
    assert explain(line.conn, SCHEMA, published, lease=30).stage == "relayed"
    line.publish("other.topic")
    line.relay()
    assert line.one("SELECT count(*) FROM eventbus.deliveries") == 2, "no second copy for anybody"
    for queue in ("ledger", "audit"):
        assert len(line.claim_due(queue)) == 1


def test_an_event_that_returns_while_the_relay_has_a_window_open_is_not_relayed_again(line: Line) -> None:
    line.kill("ledger", 1)
    line.conn.execute("DELETE FROM eventbus.outbox")
    for _ in range(10):
        line.publish()
    line.conn.execute("SELECT eventbus.tick(3)")
    redrive(line)
    line.relay()
    assert line.one("SELECT count(*) FROM eventbus.deliveries") == 11


def test_a_letter_without_its_event_stays_and_is_counted(line: Line) -> None:
    line.publish()
    line.publish()
    line.relay()
    line.conn.execute("DELETE FROM eventbus.outbox WHERE id = (SELECT min(id) FROM eventbus.outbox)")
    assert line.settle(line.claim("ledger"), s1=DEAD, s2=DEAD)
    assert dead_letters.count(line.conn, SCHEMA, ALL) == (2, 1)
    assert len(redrive(line)) == 1
    assert [letter.event_id for letter in letters(line)] == [None]


def test_a_selection_takes_what_fits_all_its_parts_and_nothing_else(line: Line) -> None:
    line.declare(audit=["#"])
    for topic in ("orders.created", "orders.paid", "users.new"):
        line.publish(topic)
    line.relay()
    for queue, count in (("ledger", 2), ("audit", 3)):
        assert line.settle(line.claim(queue), **{f"s{seq}": DEAD for seq in range(1, count + 1)})

    def chosen(**parts: Any) -> set[tuple[str, str | None]]:
        selection = Selection(**parts)
        found = letters(line, selection)
        assert dead_letters.count(line.conn, SCHEMA, selection)[0] == len(found)
        return {(letter.queue, letter.topic) for letter in found}

    assert chosen(queue="ledger") == {("ledger", "orders.created"), ("ledger", "orders.paid")}
    assert chosen(topic="orders.paid") == {("ledger", "orders.paid"), ("audit", "orders.paid")}
    assert chosen(queue="audit", topic="orders.*") == {("audit", "orders.created"), ("audit", "orders.paid")}
    assert chosen(ids=(1, 999)) == {("ledger", "orders.created")}
    assert len(chosen()) == 5
    selection = Selection(queue="audit", topic="orders.paid")
    assert len(redrive(line, selection)) == 1
    assert len(dead_letters.discard(line.conn, SCHEMA, Selection(queue="audit"))) == 2
    assert chosen() == {("ledger", "orders.created"), ("ledger", "orders.paid")}


def test_an_unknown_topic_is_answered_with_the_topics_that_there_are(line: Line) -> None:
    line.kill("ledger", 1)
    with pytest.raises(NotFound, match=r"no topic matches 'order\.\*'; known topics: orders.created"):
        letters(line, Selection(topic="order.*"))


def test_a_discarded_letter_is_gone_and_nothing_is_handled(line: Line) -> None:
    ids = line.kill("ledger", 5)
    assert dead_letters.discard(line.conn, SCHEMA, Selection(ids=tuple(ids[:2])), Pace(batch=1)) == ids[:2]
    assert sorted(letter.id for letter in letters(line)) == ids[2:]
    assert line.claim_due("ledger") == []


def test_nothing_returns_while_retention_or_a_drop_decides_what_is_still_needed(line: Line, dsn: str) -> None:
    line.kill("ledger", 1)
    with psycopg.connect(dsn) as deciding, psycopg.connect(dsn, autocommit=True) as other:
        deciding.execute("SELECT pg_advisory_xact_lock(eventbus.lock_key('tick'))")
        with ThreadPoolExecutor(1) as thread:
            moved = thread.submit(dead_letters.redrive, other, SCHEMA, ALL)
            wait_until(lambda: line.one("SELECT cardinality(pg_blocking_pids(%s))", other.info.backend_pid))
            deciding.execute("DELETE FROM eventbus.outbox")
            deciding.commit()
            assert moved.result(30) == [1]
    assert len(event_ids(line)) == 1, "it saw that the event was gone, and brought it back"


def test_retries_are_listed_with_their_error_and_when_they_are_due(line: Line) -> None:
    line.publish()
    line.publish()
    line.relay()
    assert line.settle(line.claim("ledger"), s1=RETRY, s2={"outcome": "released"})
    [retrying] = dead_letters.retries(line.conn, SCHEMA, queue="ledger", limit=10)
    assert (retrying.queue, retrying.attempts, retrying.state) == ("ledger", 1, "waiting")
    assert retrying.last_error["message"] == "no such order"
    assert 50 < retrying.due_in <= 60
    line.conn.execute("UPDATE eventbus.exceptions SET due_at = clock_timestamp()")
    line.claim_due("ledger")
    [retrying] = dead_letters.retries(line.conn, SCHEMA, queue=None, limit=10)
    assert (retrying.state, retrying.host, retrying.pid) == ("claimed", "box", 42)
