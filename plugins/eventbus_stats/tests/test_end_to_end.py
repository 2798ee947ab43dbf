"""Real workers in processes of their own: the figures agree with the queues, and trouble with them delays nobody."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest

from eventbus.event import OutboxEvent
from tests.end_to_end.processes import Process
from tests.end_to_end.scene import FAST_RETRY, NewScene, Scene
from tests.servers import Cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.parametrize("major", [18], indirect=True)

WORK = {"name": "work", "pattern": "#", "retry": FAST_RETRY | {"max_attempts": 3}}
ONCE = WORK | {"name": "once", "idempotent": True}
DROPPED, WRITTEN = "statistics are dropped until they can be written", "statistics are written again"
COLUMNS = "published, handled, failed, retried, dead, duplicates, discarded, released, lost_leases"


def consume(scene: Scene, *queues: dict[str, Any], interval: float = 0.5, **options: Any) -> Process:
    """A worker that counts."""
    counting = {"plugins": ["stats"], "plugin_settings": {"stats": {"interval": interval}}}
    return scene.consume(*queues, **counting, **options)


def figures(scene: Scene, queue: str) -> Counter[str]:
    """The sums of all minutes."""
    names = COLUMNS.split(", ")
    sums = ", ".join(f"coalesce(sum({name}), 0)" for name in names)
    [row] = scene.query(f"SELECT {sums} FROM eventbus.stats_minutes WHERE queue = %s", [queue])
    return Counter(dict(zip(names, map(int, row), strict=True)))


def called(scene: Scene, queue: str, times: str) -> int:
    """How many times are in the buckets."""
    [(number,)] = scene.query(
        f"SELECT coalesce(sum(b), 0) FROM eventbus.stats_minutes, unnest({times}_buckets) b WHERE queue = %s", [queue]
    )
    return int(number)


def test_the_figures_of_three_workers_add_up_to_what_is_in_the_queues(scene: Scene, table: psycopg.Connection) -> None:
    scene.prepare(WORK, ONCE)
    workers = [consume(scene, WORK, ONCE, concurrency=20) for _ in range(3)]
    scene.wait_until_consuming(*workers)
    ids = scene.publish("a", *[{}] * 1_850)
    scene.publish("a", *[{"fail": 1}] * 100, *[{"fail": 2}] * 49, {"fail": 99})
    for queue in ("work", "once"):
        scene.check.wait_until_quiet(queue)
    with psycopg.connect(scene.dsn) as connection:
        again = [OutboxEvent("a", {}, event_id=UUID(one)) for one in ids[:100]]
        scene.bus.outbox.publish_events(again, conn=connection)
    wait_until(lambda: all(scene.check.standing(queue).delivered == 2_100 for queue in ("work", "once")))
    for queue in ("work", "once"):
        scene.check.wait_until_quiet(queue)
    assert [worker.terminate() for worker in workers] == [0] * 3
    failed = {"failed": 100 + 2 * 49 + 3, "retried": 100 + 2 * 49 + 2, "dead": 1}
    assert figures(scene, "work") == Counter(published=2_100, handled=2_099, **failed)
    assert figures(scene, "once") == Counter(published=2_100, handled=1_999, duplicates=100, **failed)
    for queue, first in (("work", 2_100), ("once", 2_000)):
        assert len(scene.check.dead(queue)) == 1
        assert called(scene, queue, "seconds") == len(scene.check.entries(queue, "start"))
        assert called(scene, queue, "waited") == first
    [(longest,)] = scene.query("SELECT max(waited_max) FROM eventbus.stats_minutes")
    assert 0 < longest < 60


def test_a_killed_worker_loses_what_it_had_not_written_and_nothing_of_others(
    scene: Scene, table: psycopg.Connection
) -> None:
    scene.prepare(WORK)
    victim, heir = consume(scene, WORK, interval=300), consume(scene, WORK, interval=0.2)
    scene.wait_until_consuming(victim, heir)
    for _ in range(20):
        scene.publish("a", *[{}] * 20)
    scene.check.wait_until_quiet("work")
    victim.kill()
    assert heir.terminate() == 0
    by_heir = sum(entry.pid == heir.pid for entry in scene.check.entries("work", "end"))
    assert figures(scene, "work")["handled"] == by_heir


def test_a_worker_writes_while_it_works_and_not_only_at_its_end(scene: Scene, table: psycopg.Connection) -> None:
    scene.prepare(WORK)
    worker = consume(scene, WORK, interval=0.2)
    scene.publish("a", *[{}] * 50)
    wait_until(lambda: figures(scene, "work")["handled"] == 50)
    worker.kill()
    assert figures(scene, "work")["handled"] == 50


def test_a_lost_lease_is_counted(scene: Scene, table: psycopg.Connection) -> None:
    scene.prepare(WORK)
    sleeper = consume(scene, WORK, interval=0.2)
    scene.wait_until_consuming(sleeper)
    scene.publish("a", {"gate": "go"})
    scene.wait_for("work", "start", 1)
    sleeper.send(signal.SIGSTOP)
    heir = consume(scene, WORK, interval=0.2)
    scene.wait_for("work", "start", 2)
    sleeper.send(signal.SIGCONT)
    scene.open_gate("go")
    wait_until(lambda: figures(scene, "work")["lost_leases"] == 1)
    assert heir.terminate() == 0


def test_without_its_table_a_worker_says_so_once_delivers_as_ever_and_goes_on_when_it_is_back(
    scene: Scene, table: psycopg.Connection
) -> None:
    scene.prepare(WORK)
    worker = consume(scene, WORK, interval=0.1)
    scene.wait_until_consuming(worker)
    table.execute("ALTER TABLE eventbus.stats_minutes RENAME TO away")
    for _ in range(5):
        scene.publish("a", {}, {"fail": 1})
        scene.check.wait_until_quiet("work")
    worker.wait_for_log(DROPPED)
    table.execute("ALTER TABLE eventbus.away RENAME TO stats_minutes")
    scene.publish("a", {})
    scene.check.wait_until_quiet("work")
    worker.wait_for_log(WRITTEN)
    scene.check.verify("work")
    assert worker.terminate() == 0
    assert (worker.log.count(DROPPED), worker.log.count(WRITTEN)) == (1, 1), worker.log
    assert figures(scene, "work")["handled"] >= 1
    assert "INSERT" not in worker.log, "what failed is said, not the whole statement"


def test_an_outage_of_the_server_is_told_once_and_afterwards_all_is_delivered_and_counted(
    owned_cluster: Cluster, new_scene: NewScene, install: Callable[[str], None]
) -> None:
    install(owned_cluster.dsn())
    scene = new_scene(owned_cluster.dsn())
    scene.prepare(WORK)
    worker = consume(scene, WORK, interval=0.1)
    scene.wait_until_consuming(worker)
    scene.publish("a", *[{"sleep": 0.005}] * 400)
    scene.wait_for("work", "end", 50)
    owned_cluster.stop("immediate")
    worker.wait_for_log("database trouble")
    owned_cluster.start()
    scene.publish("a", {})
    scene.check.verify("work", most_repeated=400)
    worker.wait_for_log("the database is back")
    assert worker.terminate() == 0
    assert worker.log.count(DROPPED) == worker.log.count(WRITTEN) <= 1, worker.log
    assert 1 <= figures(scene, "work")["handled"] <= 401
