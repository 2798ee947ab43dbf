"""A worker whose database is away knocks softly: one attempt at a time, a handful in ten seconds, and all come back."""

from __future__ import annotations

import signal
import socket
import threading
import time

from eventbus.testing.wire import Wire
from tests.end_to_end.processes import Process
from tests.end_to_end.scene import FAST_RETRY, NewScene, Scene, one_server
from tests.fixtures import migrated
from tests.servers import Cluster
from tests.waiting import wait_until

PLAIN = {"name": "plain", "pattern": "#", "retry": FAST_RETRY}
IN_TASKS = {"name": "in_tasks", "pattern": "#", "retry": FAST_RETRY, "transactional": True}
IN_THREADS = IN_TASKS | {"name": "in_threads", "sync": True}
LINKS = {f"eventbus {name}" for name in ("relay", "claim", "settle", "heartbeat", "listener")}
TROUBLE, BACK = "WARNING database trouble", "INFO the database is back"
HELD = 0.2
"""Seconds for which a connection is held before it is refused, so that a second one would meet it."""


class Porch(Wire):
    """A wire that notes when somebody knocks; while ``shut``, it lets everybody wait for a moment and then refuses."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.shut = False
        self.knocks: list[float] = []
        self.most_at_once = 0
        self._waiting = 0
        self._gone = threading.Event()

    def __exit__(self, *exception: object) -> None:
        self._gone.set()
        super().__exit__(*exception)

    def _forward(self, client: socket.socket) -> None:
        self.knocks.append(time.monotonic())
        if not self.shut:
            super()._forward(client)
            return
        with client:
            self._waiting += 1
            self.most_at_once = max(self.most_at_once, self._waiting)
            self._gone.wait(HELD)
            self._waiting -= 1


def outages(consumer: Process) -> list[str]:
    """The beginnings of the lines of its log."""
    return [line[: len(mark)] for line in consumer.log.splitlines() for mark in (TROUBLE, BACK) if mark in line]


def backends(scene: Scene, name: str = "%") -> dict[str, int]:
    """The bus's connections to the server, with their processes there."""
    rows = scene.query(
        "SELECT application_name, pid FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'eventbus ' || %s",
        [name],
    )
    return {str(found): int(pid) for found, pid in rows}


def end(scene: Scene, name: str) -> int:
    """Terminate one of the bus's connections; the process that served it."""
    pid = backends(scene, name)[f"eventbus {name}"]
    scene.query("SELECT pg_terminate_backend(%s)", [pid])
    return pid


def has_returned(scene: Scene, name: str, before: int) -> bool:
    """Whether this connection is served by another process than ``before``."""
    return backends(scene, name).get(f"eventbus {name}", before) != before


def let_connect(scene: Scene) -> None:
    """Wait until every connection has been needed once."""
    scene.publish("a", {})
    scene.check.wait_until_quiet("plain")
    wait_until(lambda: set(backends(scene)) >= LINKS)


def let_pass(seconds: float) -> None:
    """Let an outage last; nothing announces that it has lasted."""
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > seconds, 2 * seconds)


@one_server
def test_in_ten_seconds_of_outage_a_worker_makes_a_handful_of_attempts_and_then_all_comes_back(
    owned_cluster: Cluster, new_scene: NewScene
) -> None:
    migrated(owned_cluster.dsn())
    scene = new_scene(owned_cluster.dsn())
    queues = PLAIN, IN_TASKS, IN_THREADS
    scene.prepare(*queues)
    with Porch(scene.dsn) as porch:
        consumer = scene.consume(*queues, dsn=porch.dsn, lease=15, concurrency=4)
        ids = scene.publish("a", *[{"sleep": 0.05}] * 300)
        for queue in queues:
            scene.wait_for(str(queue["name"]), "end", 20)
        porch.shut = True
        owned_cluster.stop()
        porch.knocks.clear()
        let_pass(10)
        attempts = len(porch.knocks)
        assert 4 <= attempts <= 12, porch.knocks
        assert porch.most_at_once == 1
        owned_cluster.start()
        porch.knocks.clear()
        porch.shut = False
        wait_until(lambda: porch.knocks)
        wait_until(lambda: set(backends(scene)) >= LINKS, 2)
        wait_until(lambda: "eventbus handler" in backends(scene), 2)
        for queue in queues:
            scene.check.wait_until_quiet(str(queue["name"]))
        for queue in (IN_TASKS, IN_THREADS):
            assert scene.check.effects(str(queue["name"])) == dict.fromkeys(ids, 1)
        assert outages(consumer) == [TROUBLE, BACK], consumer.log
        assert consumer.terminate() == 0


@one_server
def test_a_worker_stops_at_once_although_it_waits_for_the_database(scene: Scene) -> None:
    scene.prepare(PLAIN)
    with Porch(scene.dsn) as porch:
        consumer = scene.consume(PLAIN, dsn=porch.dsn)
        let_connect(scene)
        porch.shut = True
        for name in ("relay", "claim", "settle", "heartbeat", "listener"):
            end(scene, name)
        consumer.wait_for_log(TROUBLE)
        let_pass(1)  # so that the heartbeat is among those that wait
        began = time.monotonic()
        consumer.send(signal.SIGTERM)
        consumer.wait()
        assert time.monotonic() - began < 10, "it waited for the database"


@one_server
def test_one_connection_that_is_killed_is_back_at_once_and_the_others_work_on(scene: Scene) -> None:
    scene.prepare(PLAIN)
    consumer = scene.consume(PLAIN)
    let_connect(scene)
    others = {name: pid for name, pid in backends(scene).items() if name != "eventbus relay"}
    before = end(scene, "relay")
    began = time.monotonic()
    scene.publish("a", {})
    scene.wait_for("plain", "end", 2)
    assert time.monotonic() - began < 1
    assert has_returned(scene, "relay", before)
    assert {name: pid for name, pid in backends(scene).items() if name != "eventbus relay"} == others
    consumer.wait_for_log(BACK)
    assert outages(consumer) == [TROUBLE, BACK], consumer.log


@one_server
def test_a_listener_that_cannot_reach_its_own_dsn_keeps_no_other_connection_from_coming_back(scene: Scene) -> None:
    scene.prepare(PLAIN)
    with Porch(scene.dsn) as porch:
        porch.shut = True
        consumer = scene.consume(PLAIN, listen_dsn=porch.dsn, poll_interval_without_listen=0.1)
        wait_until(lambda: len(porch.knocks) >= 4)  # its pauses are longer than a second soon
        for name in ("claim", "relay"):
            before = end(scene, name)
            began = time.monotonic()
            wait_until(lambda: has_returned(scene, name, before), 5)  # noqa: B023 - awaited at once
            assert time.monotonic() - began < 1
        scene.publish("a", {})
        scene.wait_for("plain", "end", 1)
        porch.shut = False
        consumer.wait_for_log(BACK)
        assert outages(consumer) == [TROUBLE, BACK], consumer.log


@one_server
def test_a_dsn_that_cannot_be_reached_keeps_no_listener_with_another_one_from_coming_back(scene: Scene) -> None:
    scene.prepare(PLAIN)
    with Porch(scene.dsn) as porch:
        consumer = scene.consume(PLAIN, dsn=porch.dsn, listen_dsn=scene.dsn, lease=30)
        let_connect(scene)
        porch.shut = True
        porch.knocks.clear()
        for name in ("relay", "claim", "settle", "heartbeat"):
            end(scene, name)
        wait_until(lambda: len(porch.knocks) >= 4)
        before = end(scene, "listener")
        began = time.monotonic()
        wait_until(lambda: has_returned(scene, "listener", before), 5)
        assert time.monotonic() - began < 1
        porch.shut = False
        scene.publish("a", {})
        scene.wait_for("plain", "end", 2)
        consumer.wait_for_log(BACK)
        assert outages(consumer) == [TROUBLE, BACK], consumer.log
