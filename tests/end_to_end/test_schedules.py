"""Delayed events with real processes: in time, once, whoever dies meanwhile, and never if they were taken back."""

from __future__ import annotations

import random
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg

from eventbus.event import OutboxEvent
from tests.end_to_end.scene import FAST_RETRY, NewScene, Scene, one_server
from tests.fixtures import migrated
from tests.servers import Cluster
from tests.waiting import wait_until

QUEUE = {"name": "all", "pattern": "#", "retry": FAST_RETRY}
IN_TIME = 3.0
"""Seconds: the promise is one, on a machine with time to spare. A relay that was not woken looks after five."""


def schedule(scene: Scene, *delays: float) -> list[str]:
    """Delayed events in one transaction, each with its business row; the ids."""
    with psycopg.connect(scene.dsn) as connection:
        events = [OutboxEvent("late", {}, delay=delay) for delay in delays]
        ids = scene.bus.outbox.publish_events(events, conn=connection)
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO business (event_id, topic) VALUES (%s, 'late')", [(one,) for one in ids])
    return [str(one) for one in ids]


def due_times(scene: Scene) -> dict[str, float]:
    """When the waiting events are due, in seconds since 1970 by the database's clock."""
    found = scene.query("SELECT event_id::text, EXTRACT(EPOCH FROM due_at)::float8 FROM eventbus.scheduled")
    return {event_id: due for event_id, due in found}  # noqa: C416 - rows are tuples of any length


def fired(scene: Scene) -> list[tuple[str, float]]:
    """The events that a relay has moved to the outbox, and when, by the database's clock."""
    found = scene.query("SELECT event_id::text, EXTRACT(EPOCH FROM published_at)::float8 FROM eventbus.outbox")
    return [(event_id, at) for event_id, at in found]


def verify_each_fired_once(scene: Scene, ids: list[str]) -> None:
    scene.check.wait_until_quiet("all", timeout=30)
    scene.check.verify("all")
    assert sorted(event_id for event_id, _ in fired(scene)) == sorted(ids)
    assert set(scene.check.runs("all").values()) == {1}


def test_a_delayed_event_is_handled_when_it_is_due_and_at_most_a_second_later(scene: Scene) -> None:
    scene.prepare(QUEUE)
    consumer = scene.consume(QUEUE, poll_interval=600)
    scene.wait_until_consuming(consumer)
    scene.publish("warm", {})
    scene.check.wait_until_quiet("all", ["warm"])
    chance = random.Random(3)
    ids = schedule(scene, *[chance.uniform(0.3, 4.0) for _ in range(40)])
    due = due_times(scene)
    assert sorted(due) == sorted(ids)
    scene.wait_for("all", "end", 41)
    late = {event_id: at - due[event_id] for event_id, at in fired(scene) if event_id in due}
    assert sorted(late) == sorted(ids)
    assert min(late.values()) >= 0, "fired before its time"
    assert max(late.values()) < IN_TIME
    started = {entry.event_id: entry.at for entry in scene.check.entries("all", "start")}
    assert max(started[one] - due[one] for one in ids) < IN_TIME
    scene.check.verify("all")


@one_server
def test_an_earlier_event_that_is_scheduled_later_wakes_a_relay_that_sleeps_until_the_next_one(scene: Scene) -> None:
    scene.prepare(QUEUE)
    consumer = scene.consume(QUEUE, poll_interval=600)
    scene.wait_until_consuming(consumer)
    schedule(scene, 600)
    [(began,)] = scene.query("SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8")
    wait_until(lambda: scene.query("SELECT 1 FROM eventbus.relay_sleep WHERE last_value > 0"))
    [soon] = schedule(scene, 1)
    due = due_times(scene)[soon]
    assert due - began < 10
    scene.wait_for("all", "end", 1, timeout=8)
    [(event_id, at)] = fired(scene)
    assert (event_id, 0 <= at - due < IN_TIME) == (soon, True)


def wait_until_more_fire(scene: Scene, than: int) -> None:
    wait_until(lambda: len(fired(scene)) > than or not due_times(scene))


@one_server
def test_relays_that_are_killed_again_and_again_fire_every_delayed_event_once(scene: Scene) -> None:
    scene.prepare(QUEUE)
    chance = random.Random(5)
    ids = schedule(scene, *[chance.uniform(0.1, 6.0) for _ in range(3_000)])
    while due_times(scene):
        relay = scene.start("relay", settings=scene.settings(relay_batch=50))
        wait_until_more_fire(scene, len(fired(scene)))
        relay.kill()
    scene.consume(QUEUE)
    verify_each_fired_once(scene, ids)


@one_server
def test_what_became_due_while_nothing_ran_fires_as_soon_as_a_worker_starts(scene: Scene) -> None:
    scene.prepare(QUEUE)
    victim = scene.consume(QUEUE)
    scene.wait_until_consuming(victim)
    ids = schedule(scene, *[0.8] * 20, 60)
    victim.kill()
    wait_until(lambda: min(due_times(scene).values()) < time.time() - 0.2)
    assert fired(scene) == []
    consumer = scene.consume(QUEUE)
    scene.wait_until_consuming(consumer)
    scene.wait_for("all", "end", 20, timeout=5)
    assert sorted(event_id for event_id, _ in fired(scene)) == sorted(ids[:20])
    assert list(due_times(scene)) == [ids[20]]


def test_delayed_events_survive_a_crash_of_the_server_and_fire_once(
    owned_cluster: Cluster, new_scene: NewScene
) -> None:
    migrated(owned_cluster.dsn())
    scene = new_scene(owned_cluster.dsn())
    scene.prepare(QUEUE)
    consumer = scene.consume(QUEUE, poll_interval=600)
    scene.wait_until_consuming(consumer)
    ids = schedule(scene, *[0.05 * number for number in range(1, 60)])
    scene.wait_for("all", "end", 10)
    owned_cluster.stop("immediate")
    consumer.wait_for_log("WARNING database trouble")
    owned_cluster.start()
    scene.check.wait_until_quiet("all", timeout=30)
    scene.check.verify("all", most_repeated=59)
    assert sorted(event_id for event_id, _ in fired(scene)) == sorted(ids)


@one_server
def test_an_event_that_was_taken_back_beside_running_relays_is_never_handled_and_every_other_one_is(
    scene: Scene,
) -> None:
    scene.prepare(QUEUE)
    consumers = [scene.consume(QUEUE) for _ in range(2)]
    scene.wait_until_consuming(*consumers)
    ids = schedule(scene, *[0.5 + 0.01 * number for number in range(500)])
    outbox = scene.bus.outbox

    def take_back(mine: list[str]) -> list[str]:
        """Two thirds for good, the rest rolled back, some of them about when they are due."""
        gone = []
        with psycopg.connect(scene.dsn) as connection:
            for number, one in enumerate(mine):
                taken = outbox.cancel_event(uuid.UUID(one), conn=connection)
                connection.execute("DELETE FROM business WHERE event_id = %s", (one,)) if taken else None
                if taken and number % 3:
                    connection.commit()
                    gone.append(one)
                else:
                    connection.rollback()
        return gone

    wait_until(lambda: len(fired(scene)) > 20)
    with ThreadPoolExecutor(2) as threads:
        cancelled = {one for part in threads.map(take_back, (ids[0::2], ids[-1::-2])) for one in part}
    wait_until(lambda: not due_times(scene), timeout=20)
    assert cancelled
    verify_each_fired_once(scene, [one for one in ids if one not in cancelled])


@one_server
def test_an_event_whose_taking_back_is_rolled_back_after_it_was_due_is_still_handled(scene: Scene) -> None:
    scene.prepare(QUEUE)
    consumer = scene.consume(QUEUE)
    scene.wait_until_consuming(consumer)
    [held, other] = schedule(scene, 0.5, 0.6)
    with psycopg.connect(scene.dsn) as connection:
        assert scene.bus.outbox.cancel_event(uuid.UUID(held), conn=connection)
        scene.wait_for("all", "end", 1)
        assert [event_id for event_id, _ in fired(scene)] == [other], "a cancel that is not decided holds up the others"
        connection.rollback()
    verify_each_fired_once(scene, [held, other])
