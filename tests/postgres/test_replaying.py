"""A replay plays what was relayed, once each and in order, whatever kills it, and leaves everything else alone."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Any

import psycopg
import pytest

from eventbus.errors import BusPaused
from eventbus.postgres import replaying
from eventbus.postgres.admin import NotFound
from eventbus.postgres.choosing import InvalidChoice, Period
from eventbus.postgres.dropping import drop_queue
from eventbus.postgres.pacing import Pace
from eventbus.postgres.replaying import Replay, Wanted
from tests.postgres.line import SCHEMA, Line
from tests.waiting import wait_until

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
TABLES = (
    "bus", "outbox", "scheduled", "ticks", "queues", "layouts", "bindings", "topics", "routes", "deliveries", "claims",
    "progress", "settlements", "exceptions", "dead_letters", "replays", "processed_events",
)  # fmt: skip


@pytest.fixture
def line(conn: psycopg.Connection) -> Line:
    line = Line(conn)
    line.declare(ledger=["orders.#"])
    line.live()
    return line


def declare(line: Line, name: str, *patterns: str, **rules: Any) -> None:
    wanted = json.dumps([{"name": name, "patterns": patterns, **rules}])
    [(found, number)] = line.conn.execute("SELECT name, id FROM eventbus.declare_queues(%s)", [wanted]).fetchall()
    line.numbers[found] = number


def replay(line: Line, queue: str = "ledger", pace: Pace | None = None, **wanted: Any) -> Replay:
    started = replaying.begin(line.conn, SCHEMA, Wanted(queue, **wanted))
    return replaying.play(line.conn, SCHEMA, started, pace)


def played(line: Line, replay_id: int) -> list[int]:
    """The outbox ids that a replay played, in the order of its deliveries."""
    rows = line.conn.execute("SELECT outbox_id FROM eventbus.deliveries WHERE replay_id = %s ORDER BY seq", [replay_id])
    return [outbox_id for (outbox_id,) in rows]


def outbox_ids(line: Line, condition: str = "true") -> list[int]:
    rows = line.conn.execute(f"SELECT id FROM eventbus.outbox WHERE {condition} ORDER BY id".encode())
    return [outbox_id for (outbox_id,) in rows]


def content(line: Line) -> dict[str, list[Any]]:
    return {
        table: line.conn.execute(f"SELECT t::text FROM eventbus.{table} t ORDER BY 1".encode()).fetchall()
        for table in TABLES
    }


def published_at(line: Line, *moments: datetime) -> None:
    """Publish and relay one event at each of these moments."""
    for moment in moments:
        event_id = line.publish()
        line.conn.execute("UPDATE eventbus.outbox SET published_at = %s WHERE event_id = %s", [moment, event_id])
    line.relay()


@pytest.fixture
def busy(line: Line) -> Line:
    """The same, after 25 events of two topics that the queue gets, and five that it does not."""
    for number in range(30):
        line.publish("users.new" if number % 6 == 5 else ("orders.created", "orders.paid")[number % 2])
    line.relay()
    assert line.settle(line.claim("ledger"))
    return line


def test_every_event_that_the_queue_subscribes_to_comes_once_more_in_its_order(busy: Line) -> None:
    ended = replay(busy, pace=Pace(batch=7))
    assert (ended.state, ended.deliveries, ended.topics) == ("finished", 25, ["orders.created", "orders.paid"])
    assert played(busy, ended.id) == outbox_ids(busy, "topic LIKE 'orders.%'")
    assert busy.claim("ledger")[2] == list(range(26, 51))


def test_only_the_named_queue_gets_the_events(busy: Line) -> None:
    busy.declare(audit=["#"])
    replay(busy)
    assert busy.claim("audit")[2] == []


def test_a_topic_narrows_and_one_that_the_queue_does_not_get_is_refused_with_its_patterns(busy: Line) -> None:
    ended = replay(busy, topic="*.paid")
    assert played(busy, ended.id) == outbox_ids(busy, "topic = 'orders.paid'")
    for topic in ("users.new", "users.*", "order.created"):
        with pytest.raises(InvalidChoice, match=f"'{topic.replace('*', '.')}'.*known patterns: orders.#"):
            replay(busy, topic=topic)
    with pytest.raises(NotFound, match="no queue 'nope'; known queues: ledger"):
        replay(busy, "nope")
    assert busy.one("SELECT count(*) FROM eventbus.replays") == 1


def test_a_period_has_its_beginning_and_not_its_end(line: Line) -> None:
    hours = [NOON + timedelta(hours=hour) for hour in range(6)]
    published_at(line, *hours)
    ids = outbox_ids(line)
    for period, expected in (
        (Period(hours[2], hours[4]), ids[2:4]),
        (Period(since=hours[4]), ids[4:]),
        (Period(until=hours[1]), ids[:1]),
        (Period(NOON + timedelta(days=900)), []),
        (Period(until=NOON - timedelta(days=900)), []),
    ):
        ended = replay(line, published=period)
        assert played(line, ended.id) == expected, period
        counted = replaying.preview(line.conn, SCHEMA, Wanted("ledger", published=period))
        assert sum(item.events for item in counted) == len(expected), period


def test_an_age_goes_by_the_clock_of_the_database(line: Line) -> None:
    now = line.one("SELECT clock_timestamp()")
    published_at(line, *(now - timedelta(hours=hours) for hours in (50, 30, 3, 1)))
    ids = outbox_ids(line)
    ended = replay(line, published=Period(timedelta(hours=40), timedelta(hours=2)))
    assert played(line, ended.id) == ids[1:3]


def test_clocks_that_were_set_back_by_hours_lose_no_event(line: Line) -> None:
    shuffled = [NOON + timedelta(hours=hours) for hours in (0, 9, 3, 30, 26, 14, 31, 60, 52, 49, 70, 200, 190)]
    published_at(line, *shuffled)
    for since in shuffled:
        for until in shuffled:
            if since < until:
                ended = replay(line, published=Period(since, until))
                expected = [moment for moment in shuffled if since <= moment < until]
                assert len(played(line, ended.id)) == len(expected), (since, until)


def test_a_period_that_cannot_be_is_refused_before_anything_happens(line: Line) -> None:
    with pytest.raises(InvalidChoice, match="is not before"):
        replay(line, published=Period(NOON, NOON))
    with pytest.raises(InvalidChoice, match="is not before"):
        replay(line, published=Period(timedelta(hours=1), timedelta(hours=2)))
    with pytest.raises(InvalidChoice, match="offset"):
        Period(datetime(2026, 1, 1))  # noqa: DTZ001 - what is refused
    for age in (timedelta(seconds=-1), timedelta(days=99_999)):
        with pytest.raises(InvalidChoice, match="age"):
            Period(age)
    assert line.one("SELECT count(*) FROM eventbus.replays") == 0


def test_the_first_and_the_last_moment_there_are_can_be_named(line: Line) -> None:
    published_at(line, NOON)
    ended = replay(line, published=Period(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)))
    assert len(played(line, ended.id)) == 1


@pytest.mark.parametrize("committed", ["during the replay", "after it"])
def test_what_the_relay_has_not_relayed_is_not_played_before_its_time(line: Line, dsn: str, committed: str) -> None:
    with psycopg.connect(dsn) as slow:
        slow.execute("SELECT eventbus.publish('orders.slow', '1')")
        for _ in range(4):
            line.publish("orders.slow")
        line.relay()
        line.publish("orders.slow")
        started = replaying.begin(line.conn, SCHEMA, Wanted("ledger"))
        if committed == "during the replay":
            slow.commit()
        ended = replaying.play(line.conn, SCHEMA, started)
        assert len(played(line, ended.id)) == 4
    line.relay()
    assert len(played(line, ended.id)) == 4
    assert line.claim("ledger")[2] == list(range(1, 11))


def test_of_an_open_window_of_the_relay_only_the_relayed_part_is_played(line: Line, dsn: str) -> None:
    line.publish()
    line.relay()
    with psycopg.connect(dsn) as slow:
        slow.execute("SELECT eventbus.publish('orders.created', '1')")
        line.publish()
        line.relay()
        slow.commit()
    for _ in range(9):
        line.publish()
    line.conn.execute("SELECT eventbus.tick(4)")
    assert line.one("SELECT last_id IS NOT NULL FROM eventbus.ticks ORDER BY id DESC LIMIT 1")
    relayed = {outbox_id for (outbox_id,) in line.conn.execute("SELECT outbox_id FROM eventbus.deliveries")}
    ended = replay(line)
    assert played(line, ended.id) == sorted(relayed)
    line.relay()
    assert line.one("SELECT count(*) FROM eventbus.deliveries WHERE replay_id = 0") == 12


class Killed(Exception):
    pass


def kill(_: int) -> None:
    raise Killed


def test_a_replay_that_was_killed_goes_on_and_plays_each_event_once(busy: Line) -> None:
    started = replaying.begin(busy.conn, SCHEMA, Wanted("ledger"))
    for _ in range(2):
        with pytest.raises(Killed):
            replaying.play(busy.conn, SCHEMA, started, Pace(batch=7, progress=kill))
    started = replaying.resume(busy.conn, SCHEMA, "ledger", started.id)
    assert (started.state, started.deliveries) == ("running", 14)
    ended = replaying.play(busy.conn, SCHEMA, started, Pace(batch=7))
    assert (ended.state, ended.deliveries) == ("finished", 25)
    assert played(busy, ended.id) == outbox_ids(busy, "topic LIKE 'orders.%'")


def test_two_who_go_on_with_the_same_replay_share_it(line: Line, dsn: str) -> None:
    for _ in range(400):
        line.publish()
    line.relay()
    started = replaying.begin(line.conn, SCHEMA, Wanted("ledger"))

    def one(_: int) -> Replay:
        with psycopg.connect(dsn, autocommit=True) as connection:
            return replaying.play(connection, SCHEMA, started, Pace(batch=9))

    with ThreadPoolExecutor(3) as threads:
        ended = list(threads.map(one, range(3)))
    assert {(item.state, item.deliveries) for item in ended} == {("finished", 400)}
    assert played(line, started.id) == outbox_ids(line)


def test_what_was_finished_or_belongs_to_others_cannot_be_resumed(busy: Line) -> None:
    busy.declare(audit=["#"])
    ended = replay(busy)
    open_one = replaying.begin(busy.conn, SCHEMA, Wanted("ledger"))
    with pytest.raises(InvalidChoice, match="come to its end"):
        replaying.resume(busy.conn, SCHEMA, "ledger", ended.id)
    with pytest.raises(NotFound, match=f"replay {open_one.id} is one of queue 'ledger'; there are no unfinished"):
        replaying.resume(busy.conn, SCHEMA, "audit", open_one.id)
    with pytest.raises(NotFound, match=f"no replay 77; known unfinished replays: {open_one.id}"):
        replaying.resume(busy.conn, SCHEMA, "ledger", 77)
    for number in (0, -1, 2**31, 2**70):
        with pytest.raises(InvalidChoice, match="no number of a replay"):
            replaying.resume(busy.conn, SCHEMA, "ledger", number)


def test_a_replay_that_is_stopped_ends_after_its_step(busy: Line) -> None:
    stopped = Event()
    ended = replay(busy, pace=Pace(batch=7, progress=lambda _: stopped.set(), stopped=stopped))
    assert (ended.state, ended.deliveries) == ("running", 7)


def test_a_preview_changes_nothing_and_says_what_would_be_played(line: Line) -> None:
    published_at(line, NOON, NOON + timedelta(hours=1))
    line.publish("orders.paid")
    line.publish("users.new")
    line.relay()
    line.publish("orders.created")
    before = content(line)
    counts = replaying.preview(line.conn, SCHEMA, Wanted("ledger", published=Period(until=timedelta())))
    assert [(item.topic, item.events) for item in counts] == [("orders.created", 2), ("orders.paid", 1)]
    assert (counts[0].first, counts[0].last) == (NOON, NOON + timedelta(hours=1))
    assert content(line) == before


def test_moments_that_programs_cannot_hold_do_not_break_a_preview(line: Line) -> None:
    line.publish()
    line.publish()
    line.conn.execute("UPDATE eventbus.outbox SET published_at = '20000-01-01' WHERE id = 1")
    line.conn.execute("UPDATE eventbus.outbox SET published_at = '4000-01-01 BC' WHERE id = 2")
    line.relay()
    [count] = replaying.preview(line.conn, SCHEMA, Wanted("ledger"))
    assert (count.first.year, count.last.year) == (1, 9999)


def test_the_keys_of_an_ordered_queue_keep_their_order(line: Line) -> None:
    declare(line, "book", "orders.#", kind="ordered", lanes=4)
    for number in range(60):
        line.publish(key=f"k{number % 7}", payload=number)
    line.relay(limit=13)
    ended = replay(line, "book", Pace(batch=11))
    rows = line.conn.execute(
        "SELECT o.key, d.replay_id, d.lane, d.seq, o.id FROM eventbus.deliveries d JOIN eventbus.outbox o"
        " ON o.id = d.outbox_id WHERE d.queue_id = %s ORDER BY d.lane, d.seq",
        [line.numbers["book"]],
    ).fetchall()
    for key in {row[0] for row in rows}:
        mine = [row for row in rows if row[0] == key]
        assert len({row[2] for row in mine}) == 1, "one lane"
        assert [row[1] for row in mine] == sorted(row[1] for row in mine), "the replay after the first time"
        replayed = [row[4] for row in mine if row[1] == ended.id]
        assert replayed == sorted(replayed) == [row[4] for row in mine if row[1] == 0]
    for lane in {row[2] for row in rows}:
        seqs = [row[3] for row in rows if row[2] == lane]
        assert seqs == list(range(1, len(seqs) + 1)), "without gaps"


def test_a_replay_into_a_queue_whose_lanes_changed_goes_where_new_events_go(line: Line) -> None:
    declare(line, "book", "orders.#", kind="ordered", lanes=2)
    for number in range(20):
        line.publish(key=f"k{number}")
    line.relay()
    declare(line, "book", "orders.#", kind="ordered", lanes=3)
    ended = replay(line, "book")
    line.publish(key="k1")
    line.relay()
    lanes = line.conn.execute(
        "SELECT DISTINCT lane FROM eventbus.deliveries WHERE replay_id = %s ORDER BY 1", [ended.id]
    ).fetchall()
    assert lanes == [(2,), (3,), (4,)]
    assert (
        line.one(
            "SELECT count(*) FROM eventbus.deliveries d WHERE queue_id = %s AND lane > 1 AND seq <= ("
            " SELECT max(hi) FROM eventbus.claims c WHERE c.queue_id = d.queue_id AND c.lane = d.lane)",
            line.numbers["book"],
        )
        == 0
    )


def test_urgent_events_stay_urgent(line: Line) -> None:
    declare(line, "mail", "orders.#", kind="prioritized", lanes=3)
    for _ in range(20):
        line.publish()
    line.conn.execute("UPDATE eventbus.outbox SET priority = id % 10")
    line.relay()
    ended = replay(line, "mail", Pace(batch=3))
    lanes = "SELECT outbox_id, lane FROM eventbus.deliveries WHERE queue_id = %s AND replay_id = %s ORDER BY 1"
    before = line.conn.execute(lanes, [line.numbers["mail"], 0]).fetchall()
    assert line.conn.execute(lanes, [line.numbers["mail"], ended.id]).fetchall() == before
    assert len({lane for _, lane in before}) == 3


def test_workers_that_wait_are_told(busy: Line, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute('LISTEN "eventbus.work"')
        replay(busy)
        [notice] = listener.notifies(timeout=5, stop_after=1)
        assert notice.payload == str(busy.numbers["ledger"])


def test_nothing_is_appended_while_the_relay_numbers(busy: Line, dsn: str) -> None:
    started = replaying.begin(busy.conn, SCHEMA, Wanted("ledger"))
    with psycopg.connect(dsn) as relay, psycopg.connect(dsn, autocommit=True) as other:
        relay.execute("SELECT pg_advisory_xact_lock(eventbus.lock_key('tick'))")
        with ThreadPoolExecutor(1) as thread:
            ended = thread.submit(replaying.play, other, SCHEMA, started)
            wait_until(lambda: busy.one("SELECT cardinality(pg_blocking_pids(%s))", other.info.backend_pid), 30)
            relay.execute(
                "INSERT INTO eventbus.deliveries (queue_id, lane, seq, outbox_id, size) VALUES (%s, 0, 26, 1, 1)",
                [busy.numbers["ledger"]],
            )
            relay.commit()
            assert ended.result(30).deliveries == 25
    assert busy.claim("ledger")[2] == list(range(26, 52))


def test_a_replay_stops_with_a_paused_or_restored_bus_and_ends_with_its_queue(busy: Line, dsn: str) -> None:
    started = replaying.begin(busy.conn, SCHEMA, Wanted("ledger"))
    busy.conn.execute("UPDATE eventbus.bus SET state = 'paused'")
    with pytest.raises(BusPaused, match="eventbus resume"):
        replaying.play(busy.conn, SCHEMA, started)
    busy.conn.execute("UPDATE eventbus.bus SET state = 'running'")
    here = busy.one("SELECT system_identifier FROM eventbus.ticks ORDER BY id DESC LIMIT 1")
    busy.conn.execute("UPDATE eventbus.ticks SET system_identifier = 1")
    with pytest.raises(BusPaused, match="eventbus resume"):
        replaying.play(busy.conn, SCHEMA, started)
    assert busy.one("SELECT count(*) FROM eventbus.deliveries WHERE replay_id > 0") == 0
    busy.conn.execute("UPDATE eventbus.ticks SET system_identifier = %s", [here])

    def drop(_: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as other:
            drop_queue(other, SCHEMA, "ledger")

    with pytest.raises(NotFound, match="was dropped"):
        replaying.play(busy.conn, SCHEMA, started, Pace(batch=5, progress=drop))
    assert busy.one("SELECT count(*) FROM eventbus.deliveries") == 0
    assert busy.one("SELECT count(*) FROM eventbus.replays") == 0


def test_a_queue_that_is_being_dropped_gets_nothing_more(busy: Line) -> None:
    started = replaying.begin(busy.conn, SCHEMA, Wanted("ledger"))
    busy.conn.execute("DELETE FROM eventbus.bindings")
    with pytest.raises(NotFound, match="was dropped"):
        replaying.play(busy.conn, SCHEMA, started)
    with pytest.raises(NotFound, match="being dropped"):
        replaying.begin(busy.conn, SCHEMA, Wanted("ledger"))
    assert busy.one("SELECT count(*) FROM eventbus.deliveries WHERE replay_id <> 0") == 0


def test_an_execution_that_was_completed_runs_once_more_per_replay(line: Line) -> None:
    declare(line, "receipts", "orders.#", tracking="idempotent")
    line.publish()
    line.relay()
    assert line.settle(line.claim("receipts"))
    twins = []
    for _ in range(2):
        replay(line, "receipts")
        token = uuid.uuid4()
        rows = line.conn.execute(
            "SELECT claim_id, replay_id, twin FROM eventbus.claim(%s, %s, %s, ARRAY[10], 1000000)",
            [line.worker, token, [line.numbers["receipts"]]],
        ).fetchall()
        twins += [row[1:] for row in rows]
        assert line.settle((rows[0][0], token, []))
    assert twins == [(1, None), (2, None)]
    assert line.one("SELECT count(*) FROM eventbus.processed_events WHERE completed_at IS NOT NULL") == 3


def test_a_step_reads_no_more_than_its_share_of_a_large_outbox(line: Line) -> None:
    line.conn.execute(
        "INSERT INTO eventbus.outbox (event_id, topic, payload, size)"
        " SELECT gen_random_uuid(), CASE WHEN g % 1000 = 0 THEN 'orders.created' ELSE 'other' END, '1', 1"
        " FROM generate_series(1, 20000) g"
    )
    line.relay(limit=5000)
    started = replaying.begin(line.conn, SCHEMA, Wanted("ledger", published=Period(since=timedelta(days=3))))
    before = line.rows_read("outbox")
    row = line.conn.execute("SELECT * FROM eventbus.replay_step(%s, 5, 1000)", [started.id]).fetchone()
    assert row == ("running", 1, 1000)
    assert line.rows_read("outbox") - before <= 1100
    before = line.rows_read("outbox")
    later = replaying.begin(line.conn, SCHEMA, Wanted("ledger", published=Period(since=NOON + timedelta(days=9000))))
    assert line.rows_read("outbox") - before <= 60
    assert later.last_id >= 20000
    assert replaying.play(line.conn, SCHEMA, later).state == "finished"
