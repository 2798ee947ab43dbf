"""What operators see of the bus is what is there, at one moment, at a cost that does not grow with the backlog."""

from __future__ import annotations

import json
from datetime import datetime

import psycopg
import pytest

from eventbus.postgres import admin, dead_letters
from eventbus.postgres.admin import NotFound, Queue
from eventbus.postgres.dropping import drop_queue
from eventbus.postgres.lanes import NotOrdered, blocked, change_lanes
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


def keyed(line: Line, **options: object) -> None:
    """Make the queue ``keyed``, ordered with one lane."""
    wanted = {"name": "keyed", "patterns": ["orders.#"], "kind": "ordered", "lanes": 1, **options}
    rows = line.conn.execute("SELECT name, id FROM eventbus.declare_queues(%s)", [json.dumps([wanted])])
    line.numbers |= dict(rows.fetchall())


def test_every_delivery_of_an_ordered_queue_is_counted_once_and_parked_ones_apart(line: Line) -> None:
    keyed(line)

    def all_figures() -> tuple[int, int, int, int, int]:
        queue = line.queue("keyed")
        return queue.waiting, queue.running, queue.retrying, queue.parked, queue.dead

    for key in ("a", "a", "a", "b", "b", "c"):
        line.publish(key=key)
    line.relay()
    assert all_figures() == (6, 0, 0, 0, 0)
    parked = {"outcome": "parked"}
    assert line.settle(line.claim("keyed", 5), s1=RETRY, s2=parked, s3=parked, s4=DEAD, s5=parked)
    assert all_figures() == (1, 0, 1, 3, 1)
    line.publish(key="a")
    line.publish(key="d")
    line.relay()
    assert all_figures() == (3, 0, 1, 3, 1)
    claim = line.claim("keyed")
    assert all_figures() == (0, 2, 1, 4, 1)
    assert line.settle(claim)
    line.conn.execute("UPDATE eventbus.exceptions SET due_at = clock_timestamp()")
    held = line.claim_due("keyed")
    assert all_figures() == (0, 4, 0, 1, 1)
    assert [line.settle_exception(one, outcome="done") for one in held] == [True] * 4
    assert all_figures() == (0, 0, 0, 1, 1)
    assert line.queue("keyed").oldest_age is not None, "what is parked waits"


def test_a_queue_shows_how_it_is_split_what_it_records_and_that_its_lanes_change(line: Line) -> None:
    queue = line.queue("ledger")
    assert (queue.kind, queue.lanes, queue.tracking, queue.changing) == ("plain", 1, "none", False)
    keyed(line, lanes=4, tracking="idempotent", when_exhausted="skip")
    queue = line.queue("keyed")
    assert (queue.kind, queue.lanes, queue.tracking, queue.when_exhausted) == ("ordered", 4, "idempotent", "skip")
    change_lanes(line.conn, SCHEMA, "keyed", 8)
    assert (line.queue("keyed").lanes, line.queue("keyed").changing) == (8, True)
    line.claim("keyed")
    assert (line.queue("keyed").lanes, line.queue("keyed").changing) == (8, False)


def test_a_queue_that_is_filled_shows_how_far_it_is(line: Line) -> None:
    for _ in range(4):
        line.publish()
    line.relay()
    keyed(line, kind="plain", lanes=None, start="earliest")
    assert (line.queue("keyed").state, line.queue("keyed").filled) == ("filling", 0.0)
    line.conn.execute("SELECT eventbus.fill(%s, 2)", [line.numbers["keyed"]])
    line.resolve(["orders.created"])
    line.conn.execute("SELECT eventbus.fill(%s, 2)", [line.numbers["keyed"]])
    assert line.queue("keyed").filled == 0.5
    for _ in range(2):
        line.conn.execute("SELECT eventbus.fill(%s, 2)", [line.numbers["keyed"]])
    assert (line.queue("keyed").state, line.queue("keyed").filled) == ("active", None)


def test_every_key_that_stands_still_says_what_it_waits_for_and_how_many_events_wait(line: Line) -> None:
    keyed(line)
    events = {label: line.publish(key=label[0]) for label in ("a1", "a2", "b1", "b2", "b3", "c1", "c2", "d1", "e1")}
    line.relay()
    parked = {"outcome": "parked"}
    outcomes = {"s1": RETRY, "s2": parked, "s3": DEAD, "s4": parked, "s5": parked, "s6": RETRY, "s7": parked,
                "s8": DEAD, "s9": RETRY}  # fmt: skip
    assert line.settle(line.claim("keyed"), **outcomes)
    line.conn.execute("UPDATE eventbus.exceptions SET due_at = clock_timestamp() WHERE key = 'c' AND state = 'waiting'")
    line.claim_due("keyed", 1)
    found = {item.key: item for item in blocked(line.conn, SCHEMA, limit=10)}
    assert [*found] == ["b", "a", "c", "d"], "nothing waits behind e"
    assert (found["b"].by, found["b"].event_id, found["b"].parked) == ("dead letter", events["b1"], 2)
    assert (found["b"].reason, found["b"].dead_letter is not None, found["b"].due_in) == ("gave up", True, None)
    assert (found["a"].by, found["a"].event_id, found["a"].parked, found["a"].attempts) == ("retry", events["a1"], 1, 1)
    assert 50 < (found["a"].due_in or 0) <= 60
    assert (found["c"].by, found["c"].event_id, found["c"].due_in) == ("running", events["c1"], None)
    assert (found["d"].by, found["d"].parked) == ("dead letter", 0)
    assert len(blocked(line.conn, SCHEMA, limit=2)) == 2
    assert {item.queue for item in found.values()} == {"keyed"}


def test_a_key_with_several_dead_letters_waits_for_the_earliest_thing_of_it(line: Line) -> None:
    keyed(line)
    events = [line.publish(key="a") for _ in range(3)]
    line.relay()
    assert line.settle(line.claim("keyed"), s1=DEAD, s2={"outcome": "parked"}, s3={"outcome": "parked"})
    line.conn.execute("SELECT eventbus.redrive(ARRAY[1::bigint])")
    [held] = line.claim_due("keyed", 1)
    line.conn.execute(
        "INSERT INTO eventbus.dead_letters (queue_id, lane, seq, outbox_id, attempts, crashes, blocks, key, reason)"
        " SELECT queue_id, lane, seq, outbox_id, 1, 0, true, key, 'later' FROM eventbus.exceptions WHERE seq = 2"
    )
    line.conn.execute("DELETE FROM eventbus.exceptions WHERE seq = 2")
    [found] = blocked(line.conn, SCHEMA, limit=10)
    assert (found.by, found.event_id) == ("running", events[0])
    assert line.settle_exception(held, outcome="done")
    [found] = blocked(line.conn, SCHEMA, limit=10)
    assert (found.by, found.reason) == ("dead letter", "later")


def test_the_lanes_of_a_queue_that_is_not_ordered_cannot_be_chosen(line: Line) -> None:
    with pytest.raises(NotOrdered, match="'ledger' is not ordered and has no lanes; subscribe it with ordered=True"):
        change_lanes(line.conn, SCHEMA, "ledger", 4)
    with pytest.raises(NotFound, match="no queue 'legder'"):
        change_lanes(line.conn, SCHEMA, "legder", 4)


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
