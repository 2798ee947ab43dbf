"""A queue is dropped whole while workers run, and nothing of it is handled again or confused with a later queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import psycopg
import pytest

from eventbus.postgres.admin import queues, topics
from eventbus.postgres.dropping import QueueInUse, _Drop, drop_queue
from tests.postgres.line import DEAD, RETRY, SCHEMA, Claim, Line

TABLES = (
    "bindings", "routes", "deliveries", "claims", "exceptions", "dead_letters", "processed_events", "layouts",
    "fillings", "replays",
)  # fmt: skip


@pytest.fixture
def line(conn: psycopg.Connection) -> Line:
    line = Line(conn)
    line.declare(ledger=["orders.#"], audit=["#"])
    line.live()
    return line


def rows_of(line: Line, queue: str) -> dict[str, int]:
    number = line.numbers[queue]
    counts = {table: line.one(f"SELECT count(*) FROM eventbus.{table} WHERE queue_id = %s", number) for table in TABLES}
    counts["queues"] = line.one("SELECT count(*) FROM eventbus.queues WHERE id = %s", number)
    for table in ("progress", "settlements"):
        counts[table] = line.one(
            f"SELECT count(*) FROM eventbus.{table} x WHERE NOT EXISTS"
            " (SELECT 1 FROM eventbus.claims c WHERE c.id = x.claim_id AND c.queue_id <> %s)",
            number,
        )
    return {table: count for table, count in counts.items() if count}


def fill(line: Line) -> None:
    """Something of the queue in every table: done, dead, retrying, given back, running and waiting."""
    for number in range(40):
        line.publish(payload=number)
    line.relay(limit=7)
    for _ in range(3):
        claim = line.claim("ledger", 10)
        first = claim[2][0]
        outcomes = {
            f"s{first}": DEAD,
            f"s{first + 1}": RETRY,
            f"s{first + 2}": {"outcome": "released", "hi": first + 5},
        }
        assert line.settle(claim, **outcomes)
    assert line.claim_due("ledger", 2)
    assert line.claim("ledger", 3)


def test_a_queue_is_dropped_with_everything_in_it_and_others_keep_theirs(line: Line) -> None:
    fill(line)
    before = line.queue("audit")
    drop_queue(line.conn, SCHEMA, "ledger", batch=2)
    assert rows_of(line, "ledger") == {}
    assert [queue.name for queue in queues(line.conn, SCHEMA)] == ["audit"]
    assert line.queue("audit").waiting == before.waiting == 40


def test_events_published_after_the_drop_reach_the_other_queues_only(line: Line) -> None:
    fill(line)
    drop_queue(line.conn, SCHEMA, "ledger")
    line.publish()
    line.relay()
    assert line.queue("audit").waiting == 41
    assert rows_of(line, "ledger") == {}


def test_a_worker_that_holds_events_of_a_dropped_queue_settles_nothing_and_gets_no_error(line: Line) -> None:
    fill(line)
    claim = line.claim("ledger", 2)
    for number in range(20):
        line.publish(payload=number)
    line.relay()
    [held, *_] = line.claim_due("ledger", 1)
    drop_queue(line.conn, SCHEMA, "ledger", batch=3)
    assert not line.settle(claim, **{f"s{claim[2][0]}": RETRY})
    assert not line.one("SELECT eventbus.record_progress(%s, %s, ARRAY[1::bigint], '[]')", *claim[:2])
    assert not line.settle_exception(held, outcome="dead", reason="x")
    assert line.claim("ledger")[2] == []
    assert line.claim_due("ledger") == []
    assert rows_of(line, "ledger") == {}


class Interrupted(Exception):
    pass


def drop_with(line: Line, steps: int, intervene: Callable[[], None]) -> bool:
    """Drop ``ledger`` and call ``intervene`` after that many of its transactions; false if it took fewer."""
    taken = 0

    def progress() -> None:
        nonlocal taken
        taken += 1
        if taken == steps:
            intervene()

    drop_queue(line.conn, SCHEMA, "ledger", batch=10, progress=progress)
    return taken >= steps


def test_a_drop_that_was_killed_leaves_nothing_to_claim_and_is_finished_by_the_next_one(line: Line) -> None:
    def kill() -> None:
        raise Interrupted

    for steps in count(1):
        line.declare(ledger=["orders.#"])
        fill(line)
        try:
            assert not drop_with(line, steps, kill)
            break
        except Interrupted:
            line.publish()
            line.relay()
            assert line.claim("ledger")[2] == [], "what was dropped is not handled again"
        drop_queue(line.conn, SCHEMA, "ledger", batch=10)
        assert rows_of(line, "ledger") == {}
    assert steps > 10


def test_a_queue_that_is_declared_again_during_its_drop_goes_on_and_loses_no_later_event(line: Line) -> None:
    def declare_again() -> None:
        line.declare(ledger=["orders.#"])
        line.publish(payload="later")
        line.relay()

    for steps in count(1):
        line.declare(ledger=["orders.#"])
        fill(line)
        try:
            assert not drop_with(line, steps, declare_again)
            break
        except QueueInUse as refused:
            assert "stop its consumers" in str(refused)  # noqa: PT017 - the drop that is not interrupted ends the loop
        line.publish(payload="much later")
        line.relay()
        assert [payload_of(line, seq) for seq in line.claim("ledger")[2]] == ['"later"', '"much later"']
        assert open_claims(line) == 1, "only the one that was just made"
        drop_queue(line.conn, SCHEMA, "ledger")
    assert steps > 10


def test_a_worker_may_settle_at_any_moment_of_the_drop_and_changes_nothing(line: Line) -> None:
    line.declare(ledger=["orders.#"])
    for steps in count(1):
        line.declare(ledger=["orders.#"])
        fill(line)
        claims = [line.claim("ledger", 2) for _ in range(3)]

        def settle_and_record(claims: list[Claim] = claims) -> None:
            for claim in claims:
                retry = json.dumps([{"seq": claim[2][1], **RETRY}])
                assert line.one("SELECT eventbus.record_progress(%s, %s, '{}', %s)", *claim[:2], retry) is False
                assert not line.settle(claim, **{f"s{claim[2][0]}": RETRY})

        if not drop_with(line, steps, settle_and_record):
            break
        assert rows_of(line, "ledger") == {}
    assert steps > 10


def test_progress_that_was_on_its_way_when_the_drop_began_is_ignored(line: Line) -> None:
    for number in range(4):
        line.publish(payload=number)
    line.relay()
    claim = line.claim("ledger", 2)

    def record() -> None:
        # the part of record_progress that comes after its check
        outcomes = json.dumps([{"seq": claim[2][0], **RETRY}])
        try:
            assert line.one("SELECT eventbus.record(%s, '{}', %s)", claim[0], outcomes) == 0
        except psycopg.errors.NoDataFound:
            assert not line.one("SELECT count(*) FROM eventbus.claims WHERE id = %s", claim[0])

    for steps in count(1):
        drop = drop_with(line, steps, record)
        if not drop:
            break
        line.declare(ledger=["orders.#"])
        for number in range(4):
            line.publish(payload=number)
        line.relay()
        claim = line.claim("ledger", 2)
    assert steps > 4


def test_topics_that_only_the_dropped_queue_wanted_count_as_unrouted_afterwards(line: Line) -> None:
    drop_queue(line.conn, SCHEMA, "audit")
    line.publish("orders.created")
    line.relay()
    version = line.one("SELECT bindings_version FROM eventbus.bus")
    routes = json.dumps({"orders.created": [line.numbers["ledger"]]})
    drop_queue(line.conn, SCHEMA, "ledger")
    assert line.one("SELECT eventbus.resolve_topics(%s, %s)", version, routes) is False, "a relay that is behind"
    line.publish("orders.created")
    line.relay()
    [topic] = topics(line.conn, SCHEMA)
    assert (topic.queues, topic.unrouted) == ([], 1)


def open_claims(line: Line) -> int:
    return int(
        line.one(
            "SELECT count(*) FROM eventbus.claims c WHERE c.queue_id = %s"
            " AND NOT EXISTS (SELECT 1 FROM eventbus.settlements s WHERE s.claim_id = c.id)",
            line.numbers["ledger"],
        )
    )


def payload_of(line: Line, seq: int) -> Any:
    return line.one(
        "SELECT o.payload::text FROM eventbus.deliveries d JOIN eventbus.outbox o ON o.id = d.outbox_id"
        " WHERE d.queue_id = %s AND d.seq = %s",
        line.numbers["ledger"],
        seq,
    )


def test_what_a_worker_brings_back_at_the_last_moment_is_removed_too(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(line)
    claim = line.claim("audit", 1)
    emptied = 0
    empty = _Drop.empty

    def empty_then_refill(self: _Drop) -> None:
        nonlocal emptied
        empty(self)
        emptied += 1
        if emptied == 1:
            line.conn.execute(
                "INSERT INTO eventbus.exceptions (due_at, seq, outbox_id, queue_id, lane) VALUES (now(), 1, 1, %s, 0)",
                [line.numbers["ledger"]],
            )

    monkeypatch.setattr(_Drop, "empty", empty_then_refill)
    drop_queue(line.conn, SCHEMA, "ledger")
    assert emptied == 2
    assert rows_of(line, "ledger") == {}
    assert line.settle(claim)


def test_a_name_that_is_used_again_is_a_new_queue(line: Line) -> None:
    fill(line)
    old = line.numbers["ledger"]
    drop_queue(line.conn, SCHEMA, "ledger")
    line.declare(ledger=["orders.#"])
    assert line.numbers["ledger"] != old
    assert line.queue("ledger").waiting == 0
    line.publish()
    line.relay()
    assert line.queue("ledger").waiting == 1


def keyed(line: Line, **options: object) -> None:
    """Make or change the queue ``keyed``."""
    wanted = {"name": "keyed", "patterns": ["orders.#"], **options}
    rows = line.conn.execute("SELECT name, id FROM eventbus.declare_queues(%s)", [json.dumps([wanted])])
    line.numbers |= dict(rows.fetchall())


def fill_keyed(line: Line) -> None:
    """An ordered queue that records executions, with two layouts, parked events and a replay."""
    keyed(line, kind="ordered", lanes=1, tracking="idempotent")
    for number in range(12):
        line.publish(payload=number, key=f"key{number % 5}")
    line.relay()
    claim = line.claim("keyed", 100)
    assert line.settle(claim, s1=RETRY, s2=DEAD, s6={"outcome": "parked"}, s7={"outcome": "parked"})
    keyed(line, kind="ordered", lanes=3)
    for number in range(12):
        line.publish(payload=number, key=f"key{number % 5}")
    line.relay()
    replay = line.one("SELECT eventbus.begin_replay(%s, NULL, NULL, ARRAY['orders.created'])", line.numbers["keyed"])
    line.conn.execute("SELECT eventbus.replay_step(%s, 5, 100)", [replay])


def test_a_queue_of_every_kind_leaves_nothing_behind_whoever_interrupts_the_drop(line: Line) -> None:
    def kill() -> None:
        raise Interrupted

    for steps in count(1):
        fill_keyed(line)
        taken = 0

        def progress(last: int = steps) -> None:
            nonlocal taken
            taken += 1
            if taken == last:
                kill()

        interrupted = False
        try:
            drop_queue(line.conn, SCHEMA, "keyed", batch=4, progress=progress)
        except Interrupted:
            interrupted = True
            line.publish()
            line.relay()
            assert line.claim("keyed")[2] == [], "what was dropped is not handled again"
            drop_queue(line.conn, SCHEMA, "keyed", batch=4)
        assert rows_of(line, "keyed") == {}
        if not interrupted:
            break
    assert steps > 10


def test_executions_of_other_queues_stay(line: Line) -> None:
    fill_keyed(line)
    line.conn.execute(
        "INSERT INTO eventbus.processed_events (queue_id, event_id) SELECT %s, event_id FROM eventbus.outbox",
        [line.numbers["audit"]],
    )
    drop_queue(line.conn, SCHEMA, "keyed", batch=3)
    assert rows_of(line, "keyed") == {}
    assert line.one("SELECT count(*) FROM eventbus.processed_events") == 24


def test_a_queue_that_is_dropped_while_it_is_filled_gets_nothing_more(line: Line) -> None:
    for number in range(20):
        line.publish(payload=number)
    line.relay()
    keyed(line, start="earliest")
    line.conn.execute("SELECT eventbus.fill(%s, 5)", [line.numbers["keyed"]])
    line.resolve(["orders.created"])
    line.conn.execute("SELECT eventbus.fill(%s, 5)", [line.numbers["keyed"]])
    states = []

    def fill_on() -> None:
        states.append(line.one("SELECT state FROM eventbus.fill(%s, 5)", line.numbers["keyed"]))

    drop_queue(line.conn, SCHEMA, "keyed", batch=2, progress=fill_on)
    assert set(states) == {"active"}
    assert rows_of(line, "keyed") == {}
    line.publish()
    line.relay()
    assert rows_of(line, "keyed") == {}


def test_a_filling_queue_that_is_declared_again_during_its_drop_is_fed_by_the_relay(line: Line) -> None:
    line.publish()
    line.relay()
    keyed(line, start="earliest")

    def declare_again() -> None:
        keyed(line, start="earliest")

    with pytest.raises(QueueInUse):
        drop_queue(line.conn, SCHEMA, "keyed", progress=declare_again)
    assert line.queue("keyed").state == "active"
    line.publish(payload="later")
    line.relay()
    assert line.queue("keyed").waiting == 1


def test_an_execution_that_is_recorded_at_the_last_moment_is_removed_too(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_keyed(line)
    emptied = 0
    empty = _Drop.empty

    def empty_then_record(self: _Drop) -> None:
        nonlocal emptied
        empty(self)
        emptied += 1
        if emptied == 1:
            line.conn.execute(
                "INSERT INTO eventbus.processed_events (queue_id, event_id) VALUES (%s, gen_random_uuid())",
                [line.numbers["keyed"]],
            )

    monkeypatch.setattr(_Drop, "empty", empty_then_record)
    drop_queue(line.conn, SCHEMA, "keyed")
    assert emptied == 2
    assert rows_of(line, "keyed") == {}
