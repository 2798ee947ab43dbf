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
