"""What handlers are promised, tried from the outside: once, in one transaction, in order, whoever dies meanwhile.

The crash points are those of the table "The window" in docs/choosing.md.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import psycopg
import pytest

from eventbus.event import OutboxEvent
from tests.end_to_end.processes import Process
from tests.end_to_end.scene import FAST_RETRY, Scene, one_server
from tests.waiting import wait_until

Queue = dict[str, Any]

LEASE = 2.0
PLAIN: Queue = {"name": "plain", "pattern": "#", "retry": FAST_RETRY}
ONCE: Queue = {"name": "once", "pattern": "#", "retry": FAST_RETRY, "idempotent": True}
BOOKS: Queue = {"name": "books", "pattern": "#", "retry": FAST_RETRY, "transactional": True}
THREADED_BOOKS: Queue = BOOKS | {"name": "threaded-books", "sync": True}
KEYS: Queue = {"name": "keys", "pattern": "#", "retry": FAST_RETRY, "ordered": True}
ORDERED_BOOKS: Queue = KEYS | {"name": "ordered-books", "transactional": True}

pytestmark = one_server


def of(*queues: Queue) -> pytest.MarkDecorator:
    """Once for each of these queues."""
    return pytest.mark.parametrize("queue", queues, ids=[str(queue["name"]) for queue in queues])


def consume(scene: Scene, *queues: Queue, **settings: Any) -> Process:
    return scene.consume(*queues, **({"lease": LEASE} | settings))


def started(scene: Scene, queue: Queue, *ids: str) -> list[str]:
    """Which of these events the handler was started for, in the order of the starts."""
    return [entry.event_id for entry in scene.check.entries(queue["name"], "start") if entry.event_id in ids]


def tried(scene: Scene, queue: Queue, *ids: str) -> list[tuple[str, int]]:
    """The same with the number of the attempt. One that a failed batch and then the event alone had counts once."""
    entries = scene.check.entries(queue["name"], "start")
    return list(dict.fromkeys((entry.event_id, entry.attempt) for entry in entries if entry.event_id in ids))


# The window: how often a handler runs whose worker is killed


@of(PLAIN, PLAIN | {"sync": True, "name": "threads"}, ONCE, BOOKS, THREADED_BOOKS)
def test_dup_03_a_kill_at_any_point_repeats_what_the_page_says_and_nothing_else(scene: Scene, queue: Queue) -> None:
    name = queue["name"]
    scene.prepare(queue)
    first = consume(scene, queue)
    [settled] = scene.publish("a", {})
    scene.check.wait_until_quiet(name)
    first.kill()
    victim = consume(scene, queue, concurrency=1, batch=1, settle_interval=10)
    [ended] = scene.publish("a", {})
    scene.wait_for(name, "end", 2)
    if queue.get("transactional"):
        wait_until(lambda: scene.check.effects(name)[ended], 30)
    [after_effect] = scene.publish("a", {"after": {"gate": "go"}})
    scene.wait_for(name, "effect", 1)
    [claimed] = scene.publish("a", {})
    wait_until(lambda: scene.check.standing(name).waiting == 0, 30)
    victim.kill()
    scene.open_gate("go")
    consume(scene, queue)
    scene.check.wait_until_quiet(name)
    committed = queue.get("transactional", False)
    assert scene.check.runs(name) == {settled: 1, ended: 1 if committed else 2, after_effect: 2, claimed: 1}
    if committed:
        assert scene.check.effects(name) == dict.fromkeys([settled, ended, after_effect, claimed], 1)
    assert {entry.attempt for entry in scene.check.entries(name)} == {1}


@of(ONCE, BOOKS)
def test_dup_03_a_kill_before_the_effect_of_a_retry_costs_a_run_and_no_attempt(scene: Scene, queue: Queue) -> None:
    name = queue["name"]
    scene.prepare(queue)
    victim = consume(scene, queue)
    [event_id] = scene.publish("a", {"fail": 1, "gate": "go"})
    scene.wait_for(name, "start", 2)
    victim.kill()
    scene.open_gate("go")
    consume(scene, queue)
    scene.check.wait_until_quiet(name)
    assert [entry.attempt for entry in scene.check.entries(name, "start")] == [1, 2, 2]
    assert set(scene.check.successes(name)) == {event_id}


@of(BOOKS, THREADED_BOOKS, ORDERED_BOOKS)
def test_a_retry_whose_transaction_has_committed_is_done_although_its_worker_never_said_so(
    scene: Scene, queue: Queue
) -> None:
    slow = queue | {"retry": FAST_RETRY | {"first": 3.0}}
    name = queue["name"]
    scene.prepare(slow)
    first = consume(scene, slow)
    [event_id, follower] = scene.publish_keyed("k", {"fail": 1}, {})
    wait_until(lambda: scene.check.standing(name).retrying, 30)
    assert first.terminate() == 0
    victim = consume(scene, slow, settle_interval=10)
    wait_until(lambda: scene.check.effects(name)[event_id], 30)
    if "ordered" not in queue:
        assert scene.check.standing(name).running == 1
    victim.kill()
    consume(scene, slow)
    scene.check.wait_until_quiet(name)
    assert scene.check.effects(name) == {event_id: 1, follower: 1}
    assert scene.check.runs(name)[event_id] == 2
    assert scene.query("SELECT count(*), count(completed_at) FROM eventbus.processed_events") == [(2, 2)]


@of(ONCE, BOOKS, THREADED_BOOKS, ORDERED_BOOKS)
def test_what_a_frozen_worker_ran_takes_effect_once_although_it_goes_on_after_another_one_ran_it(
    scene: Scene, queue: Queue
) -> None:
    name = queue["name"]
    scene.prepare(queue)
    zombie = consume(scene, queue, concurrency=4)
    ids = [scene.publish_keyed(key, {"gate": "go"})[0] for key in "ab"]
    ids += [scene.publish_keyed(key, {"after": {"gate": "go"}})[0] for key in "cd"]
    scene.wait_for(name, "start", 4)
    scene.wait_for(name, "effect", 2)
    zombie.freeze()
    scene.open_gate("go")
    peer = consume(scene, queue)
    scene.check.wait_until_quiet(name)
    assert set(scene.check.runs(name).values()) == {2}
    assert peer.terminate() == 0
    settled = scene.query("SELECT count(*), max(settled_at) FROM eventbus.settlements")
    completed = scene.query("SELECT event_id::text, completed_at FROM eventbus.processed_events ORDER BY 1")
    assert {event_id for event_id, _ in completed} == set(ids)
    zombie.send(signal.SIGCONT)
    zombie.wait_for_log("lost its lease")
    wait_until(lambda: scene.workers() == [zombie.pid], 30)
    assert zombie.terminate() == 0
    assert scene.query("SELECT count(*), max(settled_at) FROM eventbus.settlements") == settled
    assert scene.query("SELECT event_id::text, completed_at FROM eventbus.processed_events ORDER BY 1") == completed
    if queue.get("transactional"):
        assert scene.check.effects(name) == dict.fromkeys(ids, 1)
    assert not scene.check.dead(name)


@of(PLAIN, ONCE, BOOKS, ORDERED_BOOKS)
def test_an_event_id_that_is_published_twice_runs_as_often_as_the_page_says(scene: Scene, queue: Queue) -> None:
    name = queue["name"]
    scene.prepare(queue)
    consumers = [consume(scene, queue) for _ in range(2)]
    scene.wait_until_consuming(*consumers)
    ids = scene.publish("a", *[{"sleep": 0.01}] * 30)
    events = [OutboxEvent("a", {"sleep": 0.01}, event_id=UUID(one)) for one in ids]
    for _ in range(2):
        with psycopg.connect(scene.dsn) as connection:
            scene.bus.outbox.publish_events(events, conn=connection)
    wait_until(lambda: scene.check.standing(name).delivered == 90 and not scene.check.standing(name).undone, 60)
    if queue.get("transactional"):  # two may run at the same time, and one of them is rolled back
        assert scene.check.effects(name) == dict.fromkeys(ids, 1)
    else:
        assert scene.check.runs(name) == dict.fromkeys(ids, 3 if queue is PLAIN else 1)
    completed = "SELECT count(*) FROM eventbus.processed_events WHERE completed_at IS NOT NULL AND owner IS NULL"
    assert scene.query(completed) == [(0 if queue is PLAIN else 30,)]
    assert {entry.attempt for entry in scene.check.entries(name)} == {1}


# Longer than the lease


@of(ONCE, BOOKS, THREADED_BOOKS, KEYS, ORDERED_BOOKS, KEYS | {"name": "batches", "batch": 2})
def test_dup_01_a_handler_that_takes_longer_than_two_leases_runs_once_whatever_it_was_promised(
    scene: Scene, queue: Queue
) -> None:
    name = queue["name"]
    scene.prepare(queue)
    consumers = [consume(scene, queue, concurrency=2, lease=2.0) for _ in range(3)]
    scene.wait_until_consuming(*consumers)
    long = scene.publish_keyed("long", {"sleep": 4.5})
    long += scene.publish_keyed("longer", {"block": 4.5})
    behind = scene.publish_keyed("long", {})
    scene.check.verify(name)
    assert scene.check.runs(name) == dict.fromkeys(long + behind, 1)
    assert not any("lost its lease" in consumer.log for consumer in consumers)
    if queue.get("ordered"):
        ends = [entry.event_id for entry in scene.check.entries(name, "end")]
        assert ends.index(long[0]) < ends.index(behind[0])


# Retries of many at once


@of(ONCE, BOOKS)
def test_dup_10_executions_that_are_due_at_once_are_tried_once_each_by_consumers_that_start_together(
    scene: Scene, queue: Queue
) -> None:
    slow = queue | {"retry": {"first": 300.0, "factor": 1.0, "jitter": False, "max_attempts": 2}}
    name = queue["name"]
    scene.prepare(slow)
    ids = scene.publish("a", *[{"fail": 1}] * 200)
    first = consume(scene, slow)
    wait_until(lambda: scene.check.standing(name).retrying == 200, 60)
    first.kill()
    scene.query("UPDATE eventbus.exceptions SET due_at = clock_timestamp() + interval '2 s' RETURNING 1")
    relays = [scene.start("relay", settings=scene.settings()) for _ in range(2)]
    consumers = [consume(scene, slow) for _ in range(4)]
    scene.check.verify(name)
    assert scene.check.runs(name) == dict.fromkeys(ids, 2)
    assert Counter(entry.attempt for entry in scene.check.entries(name, "start")) == {1: 200, 2: 200}
    if queue.get("transactional"):
        assert scene.check.effects(name) == dict.fromkeys(ids, 1)
    assert all(process.exit_code() is None for process in relays + consumers)


# Order


@of(KEYS, KEYS | {"name": "ordered-once", "idempotent": True}, ORDERED_BOOKS)
def test_ord_01_no_event_of_a_key_overtakes_one_that_fails_and_no_other_key_waits_for_it(
    scene: Scene, queue: Queue
) -> None:
    name = queue["name"]
    scene.prepare(queue)
    failing = scene.publish_keyed("k1", {"fail": 2, "gate": "go"}, *[{}] * 4)
    healthy = [scene.publish_keyed(f"k{number}", *[{}] * 5) for number in range(2, 10)]
    consumers = [consume(scene, queue) for _ in range(2)]
    wait_until(lambda: {one for ids in healthy for one in ids} <= set(scene.check.successes(name)), 60)
    scene.wait_for(name, "start", 3)
    first = [(failing[0], attempt) for attempt in (1, 2, 3)]
    wait_until(lambda: tried(scene, queue, *failing) == first, 60)
    scene.open_gate("go")
    scene.check.verify(name)
    assert tried(scene, queue, *failing) == [*first, *((one, 1) for one in failing[1:])]
    for ids in healthy:
        assert tried(scene, queue, *ids) == [(one, 1) for one in ids]
    assert [consumer.terminate() for consumer in consumers] == [0, 0]


@of(KEYS | {"name": "batches", "batch": 4}, ORDERED_BOOKS | {"name": "ordered-batches-of-books", "batch": 4})
def test_ord_01_no_event_of_a_key_overtakes_one_that_fails_in_a_batch(scene: Scene, queue: Queue) -> None:
    name = queue["name"]
    scene.prepare(queue)
    keys = [scene.publish_keyed(f"k{number}", {"fail": number % 3}, *[{}] * 4) for number in range(9)]
    consumers = [consume(scene, queue) for _ in range(2)]
    scene.check.wait_until_quiet(name)
    for number, ids in enumerate(keys):
        first = [(ids[0], attempt) for attempt in range(1, number % 3 + 2)]
        assert tried(scene, queue, *ids) == [*first, *((one, 1) for one in ids[1:])]
    assert set(scene.check.successes(name)) == scene.check.committed()
    if queue.get("transactional"):
        assert set(scene.check.effects(name).values()) == {1}
    assert [consumer.terminate() for consumer in consumers] == [0, 0]


@of(KEYS, ORDERED_BOOKS)
def test_prc_02_the_events_of_each_key_run_in_order_after_their_consumer_was_killed(scene: Scene, queue: Queue) -> None:
    name = queue["name"]
    scene.prepare(queue)
    keys = [scene.publish_keyed(key, {"after": {"gate": "go"}}, *[{}] * 5) for key in "abcde"]
    victim = consume(scene, queue, concurrency=5)
    scene.wait_for(name, "effect", 5)
    later = [scene.publish_keyed(key, *[{}] * 3) for key in "abcde"]
    victim.kill()
    scene.open_gate("go")
    peer = consume(scene, queue)
    scene.check.verify(name)
    for before, after in zip(keys, later, strict=True):
        assert started(scene, queue, *before, *after) == [before[0], *before, *after]
        assert_one_at_a_time(scene, name, [*before, *after], peer)
    if queue.get("transactional"):
        assert set(scene.check.effects(name).values()) == {1}
    assert {entry.attempt for entry in scene.check.entries(name)} == {1}


def assert_one_at_a_time(scene: Scene, name: str, ids: Sequence[str], process: Process) -> None:
    """No event of a key starts in this process before the one before it has ended."""
    happened = [
        entry.what
        for entry in scene.check.entries(name)
        if entry.event_id in ids and entry.pid == process.pid and entry.what in ("start", "end")
    ]
    assert all(one != other for one, other in pairwise(happened)), happened


@of(BOOKS, THREADED_BOOKS)
def test_prc_02_what_a_killed_consumer_had_not_committed_leaves_no_trace_and_runs_again(
    scene: Scene, queue: Queue
) -> None:
    name = queue["name"]
    scene.prepare(queue)
    victim = consume(scene, queue, concurrency=5)
    ids = scene.publish("a", *[{"after": {"gate": "go"}}] * 5)
    scene.wait_for(name, "effect", 5)
    peer = consume(scene, queue, concurrency=5)
    scene.wait_until_consuming(peer)
    victim.kill()
    scene.open_gate("go")
    scene.check.wait_until_quiet(name)
    assert scene.check.effects(name) == dict.fromkeys(ids, 1)
    assert scene.check.runs(name) == dict.fromkeys(ids, 2)


# Processes and clocks


@of(BOOKS, THREADED_BOOKS, KEYS)
def test_prc_05_connections_of_a_parent_are_not_used_by_its_children(scene: Scene, queue: Queue) -> None:
    scene.prepare(queue)
    settings = scene.settings(lease=LEASE)
    parent = scene.start("fork", journal=str(scene.journal), queue=queue, settings=settings, children=4)
    assert parent.wait(60) == 0, parent.log
    assert len(scene.check.committed()) == 2 + 4
    scene.check.verify_now(queue["name"])
    if queue.get("transactional"):
        assert scene.check.effects(queue["name"]) == dict.fromkeys(scene.check.committed(), 1)
    assert "Traceback" not in parent.log


BERLIN = ZoneInfo("Europe/Berlin")
HOUR = timedelta(hours=1)
SPRING, AUTUMN = datetime(2027, 3, 28, tzinfo=BERLIN), datetime(2027, 10, 31, tzinfo=BERLIN)
LOCAL_TIMES = {
    "before the jump": (SPRING.replace(hour=1, minute=30), "2027-03-28T00:30"),
    "in the hour that is skipped": (SPRING.replace(hour=2, minute=30), "2027-03-28T01:30"),
    "the same, as the clocks before the jump would call it": (
        SPRING.replace(hour=2, minute=30, fold=1),
        "2027-03-28T00:30",
    ),
    "after the jump": (SPRING.replace(hour=3, minute=30), "2027-03-28T01:30"),
    "the first time": (AUTUMN.replace(hour=2, minute=30), "2027-10-31T00:30"),
    "the second time": (AUTUMN.replace(hour=2, minute=30, fold=1), "2027-10-31T01:30"),
    "after the hour that is repeated": (AUTUMN.replace(hour=3, minute=30), "2027-10-31T02:30"),
}


def test_prc_07_a_local_time_on_a_day_when_the_clocks_change_is_one_moment_and_its_event_runs_once(
    scene: Scene,
) -> None:
    scene.prepare(PLAIN)
    with psycopg.connect(scene.dsn) as connection:
        events = [OutboxEvent("late", {}, at=at, headers={"case": case}) for case, (at, _) in LOCAL_TIMES.items()]
        ids = scene.bus.outbox.publish_events(events, conn=connection)
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO business (event_id, topic) VALUES (%s, 'late')", [(one,) for one in ids])
    due = dict(scene.query("SELECT headers ->> 'case', due_at FROM eventbus.scheduled"))
    assert due == {case: datetime.fromisoformat(f"{moment}+00:00") for case, (_, moment) in LOCAL_TIMES.items()}, (
        "an hour was shifted"
    )
    scene.query("UPDATE eventbus.scheduled SET due_at = due_at - interval '3 years' RETURNING 1")
    consume(scene, PLAIN)
    scene.check.verify("plain")
    assert scene.check.runs("plain") == dict.fromkeys(map(str, ids), 1)


def test_prc_07_a_length_of_time_passes_by_the_clock_of_the_database_whatever_is_done_to_the_clocks_on_the_wall(
    scene: Scene,
) -> None:
    scene.prepare(PLAIN)
    with psycopg.connect(scene.dsn) as connection:
        connection.execute("SET LOCAL TimeZone = 'Europe/Berlin'")
        scene.bus.outbox.publish_events([OutboxEvent("late", {}, delay=365 * 24 * HOUR)], conn=connection)
    [[waits]] = scene.query("SELECT due_at - created_at FROM eventbus.scheduled")
    assert abs(waits - 365 * 24 * HOUR) < timedelta(seconds=5), "two changes of the clocks lie between"
