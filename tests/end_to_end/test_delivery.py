"""From the commit to the handler: exactly what was committed, soon, whatever publishers and peers do."""

from __future__ import annotations

import json
import time
import uuid

import psycopg

from tests.end_to_end.scene import FAST_RETRY, Scene
from tests.waiting import wait_until

QUEUE = {"name": "all", "pattern": "#", "retry": FAST_RETRY}
OTHER = {"name": "other", "pattern": "#", "sync": True, "retry": FAST_RETRY}


def test_a_retry_that_a_peer_stored_late_is_not_left_to_the_next_poll(scene: Scene) -> None:
    scene.prepare(QUEUE)
    with psycopg.connect(scene.dsn) as peer:
        [late] = scene.publish("a", {})
        scene.start("relay", settings=scene.settings())
        wait_until(lambda: scene.check.standing("all").waiting == 1)
        worker, token = uuid.uuid4(), uuid.uuid4()
        peer.execute("SELECT eventbus.register_worker(%s, 'peer', 1)", (worker,))
        claimed = peer.execute(
            "SELECT c.claim_id, c.seq FROM eventbus.claim(%s, %s, ARRAY(SELECT id FROM eventbus.queues), '{1}', 1000) c"
            " WHERE c.claim_id IS NOT NULL",
            (worker, token),
        ).fetchone()
        peer.commit()
        assert claimed is not None
        consumer = scene.consume(QUEUE, poll_interval=600, lease=600)
        scene.publish("a", {"fail": 1})
        scene.wait_for("all", "start", 1)
        outcomes = [{"claim": claimed[0], "outcomes": [{"seq": claimed[1], "outcome": "retry", "delay": 0}]}]
        peer.execute("SELECT eventbus.settle(%s, %s, %s)", ([claimed[0]], [token], json.dumps(outcomes)))
        scene.publish("a", {"fail": 1})
        scene.wait_for("all", "end", 2)
        peer.execute("SELECT eventbus.unregister_worker(%s)", (worker,))
        peer.commit()
        scene.wait_for("all", "end", 3, timeout=6)
    assert late in scene.check.successes("all")
    scene.check.verify("all")
    assert consumer.terminate() == 0


def test_until_idle_waits_for_retries_that_are_not_due_yet(scene: Scene) -> None:
    queue = QUEUE | {"retry": {"first": 0.7, "factor": 1.0, "jitter": False}}
    scene.prepare(queue)
    scene.publish("a", *[{"fail": number % 3} for number in range(12)])
    assert scene.consume(queue, until_idle=True).wait() == 0
    scene.check.verify("all")
    scene.check.verify_attempts("all")


def test_until_idle_waits_for_a_publisher_that_commits_late(scene: Scene) -> None:
    scene.prepare(QUEUE)
    with psycopg.connect(scene.dsn) as publisher:
        [late] = scene.publish_on(publisher, "a", {})
        scene.publish("a", {})
        consumer = scene.consume(QUEUE, until_idle=True)
        scene.wait_for("all", "end", 1)
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 1)
        assert consumer.exit_code() is None, "it left before the publisher had decided"
        publisher.commit()
    assert consumer.wait() == 0
    scene.check.verify("all")
    assert late in scene.check.successes("all")


def test_until_idle_waits_for_what_a_killed_peer_has_left_and_for_what_a_living_one_is_doing(scene: Scene) -> None:
    scene.prepare(QUEUE, OTHER)
    killed = scene.consume(QUEUE, concurrency=2)
    scene.publish("a", {"gate": "go"}, {"gate": "go"})
    scene.wait_for("all", "start", 2)
    killed.kill()
    peer = scene.consume(OTHER)
    scene.wait_for("other", "start", 2)
    consumer = scene.consume(QUEUE, OTHER, until_idle=True)
    scene.wait_for("all", "start", 3)  # what was running when a worker died runs alone
    scene.open_gate("go")
    assert consumer.wait() == 0
    for queue in ("all", "other"):
        scene.check.verify(queue)
    assert {entry.pid for entry in scene.check.entries("other")} == {peer.pid}


def test_until_idle_ends_at_once_when_there_is_nothing(scene: Scene) -> None:
    scene.prepare(QUEUE)
    began = time.monotonic()
    assert scene.consume(QUEUE, until_idle=True).wait() == 0
    assert time.monotonic() - began < 2
