"""What operators see of the bus is what is there, at one moment, at a cost that does not grow with the backlog."""

from __future__ import annotations

from datetime import datetime

import psycopg
import pytest

from eventbus.postgres import admin, dead_letters
from eventbus.postgres.admin import NotFound, Queue
from eventbus.postgres.dropping import drop_queue
from tests.postgres.line import DEAD, RETRY, SCHEMA, Line


@pytest.fixture
def line(conn: psycopg.Connection) -> Line:
    line = Line(conn)
    line.declare(ledger=["orders.#"])
    line.live()
    return line


def figures(queue: Queue) -> tuple[int, int, int, int]:
    return queue.waiting, queue.running, queue.retrying, queue.dead


def test_every_delivery_is_counted_in_exactly_one_column_on_its_way(line: Line) -> None:
    assert figures(line.queue("ledger")) == (0, 0, 0, 0)
    assert line.queue("ledger").oldest_age is None
    for number in range(10):
        line.publish(payload=number)
    line.relay()
    assert figures(line.queue("ledger")) == (10, 0, 0, 0)
    claim = line.claim("ledger", 6)
    assert figures(line.queue("ledger")) == (4, 6, 0, 0)
    line.conn.execute("SELECT eventbus.record_progress(%s, %s, ARRAY[1::bigint], '[]')", claim[:2])
    assert figures(line.queue("ledger")) == (4, 5, 0, 0)
    assert line.settle(claim, s3=RETRY, s4=DEAD, s5={"outcome": "released", "hi": 6})
    assert figures(line.queue("ledger")) == (6, 0, 1, 1)
    line.conn.execute("UPDATE eventbus.exceptions SET due_at = clock_timestamp() WHERE attempts = 1")
    held = line.claim_due("ledger")
    assert figures(line.queue("ledger")) == (4, 3, 0, 1)
    assert [line.settle_exception(one, outcome="done") for one in held] == [True] * 3
    assert line.settle(line.claim("ledger"))
    assert figures(line.queue("ledger")) == (0, 0, 0, 1)
    assert line.queue("ledger").oldest_age is None


@pytest.mark.parametrize("kept", ["never claimed", "released alone", "released range", "redriven"])
def test_the_age_of_the_oldest_event_is_shown_wherever_it_waits(line: Line, kept: str) -> None:
    for hours in (2, 1):
        line.conn.execute(
            "UPDATE eventbus.outbox SET published_at = published_at - make_interval(hours => %s) WHERE event_id = %s",
            [hours, line.publish()],
        )
    line.relay()
    if kept != "never claimed":
        claim = line.claim("ledger")
        outcome = {"outcome": "released"} | ({"hi": 2} if kept == "released range" else {})
        assert line.settle(claim, s1=DEAD if kept == "redriven" else outcome)
        dead_letters.redrive(line.conn, SCHEMA, dead_letters.Selection())
    age = line.queue("ledger").oldest_age
    assert age is not None
    assert 7200 <= age < 7300


def test_depths_are_read_without_counting_the_deliveries(line: Line) -> None:
    line.publish()
    line.relay()
    line.conn.execute(
        "INSERT INTO eventbus.deliveries (queue_id, lane, seq, outbox_id, size) SELECT %s, 0, g, 1, 2"
        " FROM generate_series(2, 20000) g",
        [line.numbers["ledger"]],
    )
    before = line.rows_read("deliveries")
    assert line.queue("ledger").waiting == 20_000
    assert line.rows_read("deliveries") - before < 50


def test_an_unknown_queue_is_answered_with_the_queues_that_there_are(line: Line) -> None:
    line.declare(receipts=["a"])
    with pytest.raises(NotFound, match="no queue 'legder'; known queues: ledger, receipts"):
        drop_queue(line.conn, SCHEMA, "legder")
    with pytest.raises(NotFound, match="known queues: ledger, receipts"):
        dead_letters.retries(line.conn, SCHEMA, queue="nope", limit=1)


def test_topics_show_who_gets_them_now_and_what_nobody_got(line: Line) -> None:
    line.publish("orders.created")
    line.publish("lost.event")
    line.publish("lost.event")
    line.relay()
    line.declare(late=["lost.*"])
    found = {topic.topic: topic for topic in admin.topics(line.conn, SCHEMA, count=True)}
    assert (found["orders.created"].queues, found["orders.created"].unrouted) == (["ledger"], 0)
    assert (found["lost.event"].queues, found["lost.event"].unrouted, found["lost.event"].events) == (["late"], 2, 2)
    assert isinstance(found["lost.event"].first_seen_at, datetime)
    assert admin.topics(line.conn, SCHEMA)[0].events is None


@pytest.mark.parametrize("limit", [2, 1000])
def test_the_backlog_is_what_is_committed_and_not_relayed(line: Line, dsn: str, limit: int) -> None:
    line.conn.execute("SELECT eventbus.tick(1000)")
    line.resolve(["orders.created"])
    with psycopg.connect(dsn) as slow:
        slow.execute("SELECT eventbus.publish('orders.created', '0')")
        for _ in range(5):
            line.publish()
        assert admin.status(line.conn, SCHEMA).backlog.events == 5
        line.conn.execute("SELECT eventbus.tick(%s)", [limit])
        left = 5 - min(limit, 5)
        assert admin.status(line.conn, SCHEMA).backlog.events == left
        slow.commit()
    backlog = admin.status(line.conn, SCHEMA).backlog
    assert backlog.events == left + 1, "what committed late with a low number counts too"
    assert backlog.oldest_age is not None
    line.relay()
    assert admin.status(line.conn, SCHEMA).backlog == admin.Backlog(0, None)


def test_the_status_shows_workers_and_delayed_events(line: Line) -> None:
    line.conn.execute("SELECT eventbus.publish('orders.created', '1', delay => '1 hour')")
    status = admin.status(line.conn, SCHEMA)
    assert [(worker.host, worker.pid) for worker in status.workers] == [("box", 42)]
    assert status.workers[0].heartbeat_age is not None
    assert status.scheduled.events == 1
    assert status.scheduled.next_due_at is not None
    line.claim("ledger")
    line.conn.execute("UPDATE eventbus.workers SET heartbeat_at = '-infinity'")
    assert admin.status(line.conn, SCHEMA).workers[0].heartbeat_age is None, "it has signed off"


def test_a_paused_bus_goes_on_after_resume_and_waiting_workers_are_told(line: Line, dsn: str) -> None:
    line.conn.execute("UPDATE eventbus.bus SET state = 'paused', reason = 'copy'")
    assert admin.status(line.conn, SCHEMA).bus.reason == "copy"
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute('LISTEN "eventbus.work"')
        listener.execute('LISTEN "eventbus.relay"')
        assert admin.resume(line.conn, SCHEMA)
        heard = {notice.channel for notice in listener.notifies(timeout=5, stop_after=2)}
    assert heard == {"eventbus.work", "eventbus.relay"}
    status = admin.status(line.conn, SCHEMA).bus
    assert (status.state, status.reason) == ("running", None)
    assert not admin.resume(line.conn, SCHEMA)


def test_resume_takes_over_a_restored_copy_so_that_no_worker_pauses_it_again(line: Line) -> None:
    line.publish()
    line.relay()
    line.publish()
    line.conn.execute("UPDATE eventbus.ticks SET system_identifier = 1")
    assert admin.status(line.conn, SCHEMA).bus.foreign
    assert admin.resume(line.conn, SCHEMA)
    status = admin.status(line.conn, SCHEMA)
    assert (status.bus.foreign, status.bus.state) == (False, "running")
    line.relay()
    assert line.queue("ledger").waiting == 2, "each event once, the relayed and the other"


def test_names_with_quotes_and_percent_signs_are_only_text(line: Line) -> None:
    for name in ("a'; DROP TABLE eventbus.outbox; --", 'two "words"', "%s %(x)s", "\\", "two_words"):
        with pytest.raises(NotFound, match="no queue"):
            drop_queue(line.conn, SCHEMA, name)
    assert line.queue("ledger").state == "active"
