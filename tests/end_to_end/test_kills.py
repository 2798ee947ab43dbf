"""Consumers, publishers and relays that die at any moment: what was committed is handled, and nothing else."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter

import psycopg
import pytest

from tests.end_to_end.handlers import Json
from tests.end_to_end.scene import FAST_RETRY, LEASE, Scene, one_server
from tests.waiting import wait_until

QUEUE: Json = {"name": "all", "pattern": "#", "retry": FAST_RETRY}
THREADS: Json = {"name": "threads", "pattern": "#", "sync": True, "retry": FAST_RETRY}
IN_FLIGHT = 10 + 1_000
"""Most events that one consumer of one queue can have handled without having said so."""


def test_no_event_is_lost_when_consumers_are_killed_again_and_again(scene: Scene) -> None:
    scene.prepare(QUEUE, THREADS)
    chance = random.Random(7)
    rounds = 5
    survivor = scene.consume(QUEUE, THREADS, max_crashes=100)
    for _ in range(rounds):
        victim = scene.consume(QUEUE, THREADS, max_crashes=100)
        scene.wait_until_consuming(victim)
        before = len(scene.check.entries("all", "end"))
        for _ in range(4):
            scene.publish("a.b", *[{"sleep": 0.001} for _ in range(200)])
        scene.wait_for("all", "end", before + chance.randrange(300))
        victim.kill()
    for queue in ("all", "threads"):
        scene.check.wait_until_quiet(queue, timeout=30)
        scene.check.verify(queue, most_repeated=rounds * IN_FLIGHT)
        assert set(Counter(entry.attempt for entry in scene.check.entries(queue))) == {1}, "a crash cost an attempt"
        assert not scene.check.dead(queue)
    assert survivor.terminate() == 0


@one_server
def test_a_kill_repeats_no_event_that_was_already_told_to_the_database(scene: Scene) -> None:
    scene.prepare(QUEUE)
    victim = scene.consume(QUEUE, concurrency=2)
    done = scene.publish("a", *[{}] * 300)
    scene.check.wait_until_quiet("all")
    running = scene.publish("a", *[{"gate": "never"}] * 2)
    scene.wait_for("all", "start", 302)
    victim.kill()
    heir = scene.consume(QUEUE, concurrency=2)
    scene.wait_for("all", "start", 303)
    scene.open_gate("never")
    scene.check.verify("all")
    runs = scene.check.runs("all")
    assert {runs[event_id] for event_id in done} == {1}
    assert {runs[event_id] for event_id in running} == {2}
    assert heir.terminate() == 0


@one_server
def test_an_event_of_a_publisher_killed_before_its_commit_is_never_handled(scene: Scene) -> None:
    scene.prepare(QUEUE)
    scene.consume(QUEUE)
    publisher = scene.start(
        "publish_and_hang", journal=str(scene.journal), settings=scene.settings(), topic="killed", commit=False
    )
    wait_until((scene.folder / f"published-{publisher.pid}").exists)
    publisher.kill()
    scene.publish("fine", {})
    scene.check.wait_until_quiet("all")
    hanging = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
    wait_until(lambda: not scene.query(hanging))
    scene.publish("fine", {})
    scene.check.verify("all")
    assert [entry.topic for entry in scene.check.entries("all", "end")] == ["fine", "fine"]


@one_server
def test_an_event_of_a_publisher_killed_right_after_its_commit_is_handled_once(scene: Scene) -> None:
    scene.prepare(QUEUE)
    scene.consume(QUEUE)
    publisher = scene.start(
        "publish_and_hang", journal=str(scene.journal), settings=scene.settings(), topic="killed", commit=True
    )
    wait_until((scene.folder / f"published-{publisher.pid}").exists)
    publisher.kill()
    scene.check.wait_until_quiet("all", ["killed"])
    scene.check.verify("all")
    assert [entry.topic for entry in scene.check.entries("all", "end")] == ["killed"]


def test_txn_09_no_event_is_lost_or_relayed_twice_when_the_relay_is_killed_fifty_times(scene: Scene) -> None:
    scene.prepare(QUEUE)
    chance = random.Random(9)
    for _ in range(50):
        wanted = scene.check.standing("all").delivered + chance.randrange(200)
        scene.publish("a", *[{}] * 200)
        relay = scene.start("relay", settings=scene.settings(relay_batch=50))
        wait_until(lambda: scene.check.standing("all").delivered >= wanted)  # noqa: B023 - awaited at once
        relay.kill()
    began = time.monotonic()
    consumer = scene.consume(QUEUE)
    scene.check.wait_until_quiet("all")
    assert time.monotonic() - began < 10, "the backlog did not move again"
    scene.check.verify("all")
    assert len(scene.check.committed()) == 10_000
    assert consumer.terminate() == 0


def test_prc_02_what_ran_when_a_consumer_was_killed_runs_again_at_its_peer_within_the_lease(scene: Scene) -> None:
    scene.prepare(QUEUE)
    victim = scene.consume(QUEUE, concurrency=5)
    scene.publish("a", *[{"gate": "go"}] * 5)
    scene.wait_for("all", "start", 5)
    peer = scene.consume(QUEUE, concurrency=5)
    scene.wait_until_consuming(peer)
    victim.kill()
    died = time.time()
    scene.open_gate("go")
    scene.check.verify("all", most_repeated=5)
    again = [entry for entry in scene.check.entries("all", "start") if entry.pid == peer.pid]
    assert len({entry.event_id for entry in again}) == 5
    assert max(entry.at for entry in again) - died < 3 * LEASE + 1
    assert {entry.attempt for entry in again} == {1}, "a crash is not a failed attempt"


@one_server
def test_prc_02_what_ran_when_the_only_consumer_was_killed_runs_again_after_a_restart(scene: Scene) -> None:
    scene.prepare(THREADS)
    victim = scene.consume(THREADS, concurrency=5)
    scene.publish("a", *[{"gate": "go"}] * 5)
    scene.wait_for("threads", "start", 5)
    victim.kill()
    scene.open_gate("go")
    scene.consume(THREADS, concurrency=5)
    scene.check.verify("threads")
    assert set(scene.check.runs("threads").values()) == {2}


def test_a_consumer_that_was_frozen_past_its_lease_settles_nothing_and_goes_on_under_a_new_name(scene: Scene) -> None:
    queues = [queue | {"retry": FAST_RETRY | {"max_attempts": 2}} for queue in (QUEUE, THREADS)]
    scene.prepare(*queues)
    zombie = scene.consume(*queues, concurrency=3)
    scene.publish("a", *[{"gate": "go", "fail_at_end": 1}] * 6)
    scene.wait_for("all", "start", 3)
    scene.wait_for("threads", "start", 3)
    [[incarnation]] = scene.query("SELECT id FROM eventbus.workers")
    zombie.freeze()
    scene.open_gate("go")
    peer = scene.consume(*queues)
    for queue in ("all", "threads"):
        scene.check.wait_until_quiet(queue)
    settled = scene.query("SELECT count(*), max(settled_at) FROM eventbus.settlements")
    assert scene.query("SELECT state FROM eventbus.workers WHERE id = %s", [incarnation]) == [("dead",)]
    peer.terminate()
    zombie.send(signal.SIGCONT)
    zombie.wait_for_log("lost its lease")
    wait_until(lambda: scene.workers() == [zombie.pid])
    assert scene.query("SELECT count(*), max(settled_at) FROM eventbus.settlements") == settled
    for queue in ("all", "threads"):
        scene.check.verify(queue, most_repeated=6)
        assert not scene.check.dead(queue), "a failure of the zombie was counted"
    scene.publish("a", {})
    for queue in ("all", "threads"):
        scene.check.wait_until_quiet(queue)
        assert scene.check.entries(queue, "end")[-1].pid == zombie.pid
    assert zombie.terminate() == 0
    assert scene.workers() == []


def test_an_event_that_kills_every_process_becomes_a_dead_letter_and_takes_no_other_event_along(scene: Scene) -> None:
    scene.prepare(QUEUE)
    mates = scene.publish("a", *[{}] * 20)
    [poison] = scene.publish("a", {"die": "kill"})
    mates += scene.publish("a", *[{}] * 20)
    die_of(scene, QUEUE, poison)
    scene.check.verify("all", most_repeated=5 * len(mates))
    assert set(scene.check.successes("all")) == set(mates)


EFFECTS: Json = {"name": "effects", "pattern": "#", "retry": FAST_RETRY, "transactional": True}
KEYS: Json = {"name": "keys", "pattern": "#", "retry": FAST_RETRY, "ordered": True}
DEATHS = {
    "exit in a task": (QUEUE, {"die": "exit"}),
    "memory in a thread": (THREADS, {"die": "memory"}),
    "kill after the effect": (QUEUE | {"idempotent": True}, {"after": {"die": "kill"}}),
    "kill in a batch": (QUEUE | {"batch": 10}, {"die": "kill"}),
    "kill in a transaction": (EFFECTS, {"die": "kill"}),
    "exit in a thread with a transaction": (EFFECTS | {"sync": True}, {"after": {"die": "exit"}}),
    "kill in a batch of one transaction": (EFFECTS | {"batch": 10}, {"after": {"die": "kill"}}),
}


@one_server
@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS)
def test_whatever_kind_of_handler_an_event_kills_the_process_of_it_dies_alone_and_its_mates_lose_no_attempt(
    scene: Scene, death: tuple[Json, Json]
) -> None:
    queue, wish = death
    name = queue["name"]
    scene.prepare(queue)
    mates = scene.publish("a", *[{}] * 15)
    [poison] = scene.publish("a", wish)
    mates += scene.publish("a", *[{}] * 15)
    die_of(scene, queue, poison)
    scene.check.wait_until_quiet(name)
    assert set(scene.check.successes(name)) == set(mates)
    assert scene.check.standing(name).dead == 1
    if queue.get("transactional"):
        assert scene.check.effects(name) == dict.fromkeys(mates, 1)


@one_server
@pytest.mark.parametrize("when_exhausted", ["park", "skip"])
@pytest.mark.parametrize("kind", [KEYS, KEYS | EFFECTS, KEYS | {"batch": 10}], ids=["plain", "transactional", "batch"])
def test_an_event_that_kills_every_process_keeps_only_the_later_events_of_its_key_waiting(
    scene: Scene, kind: Json, when_exhausted: str
) -> None:
    queue = {**kind, "when_exhausted": when_exhausted}
    name = queue["name"]
    scene.prepare(queue)
    before = scene.publish_keyed("poisoned", {})
    poison, *behind = scene.publish_keyed("poisoned", {"die": "kill"}, {}, {})
    others = [scene.publish_keyed(f"k{number}", *[{}] * 3) for number in range(8)]
    die_of(scene, queue, poison)
    behind += scene.publish_keyed("poisoned", {})
    free = {*before, *(one for ids in others for one in ids), *(behind if when_exhausted == "skip" else ())}
    wait_until(lambda: set(scene.check.successes(name)) >= free, 60)
    if when_exhausted == "park":
        wait_until(lambda: scene.check.standing(name).parked == len(behind), 60)
        assert not scene.check.runs(name).keys() & set(behind)
    wait_until(lambda: scene.check.standing(name).undone == scene.check.standing(name).parked, 60)
    for ids in others:
        assert list(dict.fromkeys(e.event_id for e in scene.check.entries(name, "start") if e.event_id in ids)) == ids
    if queue.get("transactional"):
        assert scene.check.effects(name) == dict.fromkeys(free, 1)


def die_of(scene: Scene, queue: Json, poison: str) -> None:
    """Start consumers until one event is dead: at the third crash, in a process in which nothing else ran.

    Before these three there is one that was not counted, if a heartbeat came just before the event was started.
    """
    name, consumers = queue["name"], []
    while poison not in scene.check.dead(name):
        consumers.append(consumer := scene.consume(queue, max_crashes=3, concurrency=4))
        wait_until(lambda: consumer.exit_code() is not None or poison in scene.check.dead(name), 60)
        assert len(consumers) <= 5
    letter = scene.check.dead(name)[poison]
    assert (letter.reason, letter.attempts, letter.crashes) == ("worker died", 0, 3)
    assert {entry.attempt for entry in scene.check.entries(name)} == {1}, "a crash cost an attempt"
    runs = [entry for entry in scene.check.entries(name, "start") if entry.event_id == poison]
    killed = [entry.pid for entry in runs]
    assert len(killed) in (3, 4)
    assert killed == [consumer.pid for consumer in consumers[: len(killed)]]
    last = [entry for entry in scene.check.entries(name) if entry.pid == killed[-1] and entry.what != "effect"]
    beside = Counter(entry.event_id for entry in last if entry.event_id != poison)
    assert last[-1].event_id == poison, "something was started beside it"
    assert all(count % 2 == 0 for count in beside.values()), "something ran beside it"


@one_server
def test_a_handler_that_is_refused_memory_has_failed_and_its_process_goes_on(scene: Scene) -> None:
    few = QUEUE | {
        "retry": FAST_RETRY | {"max_attempts": 2}
    }  # in a thread it could take the memory of the bus's own loops
    name = QUEUE["name"]
    scene.prepare(few)
    consumer = scene.consume(few)
    scene.wait_until_consuming(consumer)
    [hungry] = scene.publish("a", {"exhaust": True})
    mates = scene.publish("a", *[{}] * 10)
    scene.check.verify(name)
    assert set(scene.check.successes(name)) == set(mates)
    letter = scene.check.dead(name)[hungry]
    assert (letter.reason, letter.attempts, letter.crashes) == ("gave up after 2 attempts", 2, 0)
    assert consumer.terminate() == 0


@one_server
def test_crashes_and_failures_are_counted_apart(scene: Scene) -> None:
    queue = QUEUE | {"retry": FAST_RETRY | {"max_attempts": 3}}
    scene.prepare(queue)
    [event_id] = scene.publish("a", {"fail": 2, "gate": "go"})
    for _ in range(2):  # each ends in a crash while the third attempt waits at the gate
        started = len(scene.check.entries("all", "start"))
        victim = scene.consume(queue, max_crashes=10)
        wait_until(lambda: [e.attempt for e in scene.check.entries("all", "start")][started:][-1:] == [3])  # noqa: B023
        victim.kill()
    scene.open_gate("go")
    scene.consume(queue, max_crashes=10)
    scene.check.wait_until_quiet("all")
    assert [entry.attempt for entry in scene.check.entries("all", "start")] == [1, 2, 3, 3, 3]
    assert set(scene.check.successes("all")) == {event_id}, "crashes used up the attempts"


@one_server
def test_dup_01_a_handler_that_blocks_its_process_for_longer_than_the_lease_runs_once(scene: Scene) -> None:
    scene.prepare(QUEUE, THREADS)
    consumers = [scene.consume(QUEUE, THREADS, concurrency=2) for _ in range(3)]
    scene.wait_until_consuming(*consumers)
    scene.publish("a", {"sleep": 3 * LEASE}, {"block": 3 * LEASE})
    for queue in ("all", "threads"):
        scene.check.verify(queue)
        assert set(scene.check.runs(queue).values()) == {1}
    assert not any("lost its lease" in consumer.log for consumer in consumers)


@one_server
def test_a_killed_consumer_holds_no_transaction_open(scene: Scene) -> None:
    scene.prepare(QUEUE)
    victim = scene.consume(QUEUE)
    scene.publish("a", *[{"gate": "never"}] * 5)
    scene.wait_for("all", "start", 5)
    victim.kill()

    def sessions() -> list[tuple[object, ...]]:
        with psycopg.connect(scene.dsn) as connection:
            return connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'eventbus %%'"
                " AND datname = current_database()"
            ).fetchall()

    wait_until(lambda: not sessions())
