"""A consumer that starts with the earliest event handles every event once, whoever dies while its queue is filled."""

from __future__ import annotations

import json

from eventbus import Event
from tests.end_to_end.scene import Scene, one_server
from tests.waiting import wait_until

pytestmark = [one_server]
OLD = {"name": "old", "pattern": "#"}
LATE = {"name": "late", "pattern": "orders.#"}


def deliveries(scene: Scene) -> int:
    [(count,)] = scene.query(
        "SELECT count(*) FROM eventbus.deliveries d JOIN eventbus.queues q ON q.id = d.queue_id WHERE q.name = 'late'"
    )
    return int(count)


def test_a_worker_hands_its_new_consumer_everything_from_before_and_then_is_idle(scene: Scene) -> None:
    scene.prepare(OLD)
    before = scene.publish("orders.created", *[{}] * 50) + scene.publish("users.created", {})[:0]
    assert scene.consume(OLD, until_idle=True).wait() == 0
    handled: list[str] = []

    @scene.bus.subscribe("orders.#", name="late", start="earliest", concurrency=1)
    async def late(event: Event) -> None:
        handled.append(str(event.event_id))

    during = scene.publish("orders.created", {}, {})
    assert scene.bus.consume(until_idle=True) == 0
    assert handled == before + during


def test_the_filling_of_a_queue_goes_on_at_another_worker_when_its_worker_is_killed(scene: Scene) -> None:
    scene.prepare(OLD)
    events = scene.publish("orders.created", *[{}] * 3_000)
    assert scene.consume(OLD, until_idle=True).wait(80) == 0
    scene.query(
        "SELECT eventbus.declare_queues(%s)",
        [json.dumps([{"name": "late", "patterns": ["orders.#"], "start": "earliest"}])],
    )
    for _ in range(3):
        doomed = scene.consume(LATE, relay_batch=1)
        so_far = deliveries(scene)
        wait_until(lambda so_far=so_far: deliveries(scene) > so_far, 40)  # type: ignore[misc]
        doomed.kill()
    assert deliveries(scene) < 3_000, "it was over before anybody was killed"
    events += scene.publish("orders.created", *[{}] * 10)
    assert scene.consume(LATE, until_idle=True).wait(80) == 0
    assert deliveries(scene) == len(events)
    assert {entry.event_id for entry in scene.check.entries("late", "start")} == set(events)
