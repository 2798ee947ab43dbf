"""Stopping a consumer: what runs may finish, the rest is free at once, and it ends in time whatever handlers do."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from eventbus import Event
from tests.end_to_end.handlers import Json
from tests.end_to_end.scene import FAST_RETRY, NewScene, Scene, one_server
from tests.fixtures import NewCluster
from tests.waiting import wait_until

TASKS: Json = {"name": "tasks", "pattern": "#", "retry": FAST_RETRY}
THREADS: Json = {"name": "threads", "pattern": "#", "sync": True, "retry": FAST_RETRY}
BOOKS: Json = TASKS | {"name": "books", "transactional": True}
THREADED_BOOKS: Json = THREADS | {"name": "threaded-books", "transactional": True}
KEYS: Json = TASKS | {"name": "keys", "ordered": True}
ORDERED_BOOKS: Json = KEYS | {"name": "ordered-books", "transactional": True}
both_kinds = pytest.mark.parametrize("queue", [TASKS, THREADS], ids=["tasks", "threads"])
all_kinds = pytest.mark.parametrize("queue", [TASKS, THREADS, BOOKS, THREADED_BOOKS], ids=lambda queue: queue["name"])


@both_kinds
def test_prc_01_a_stop_lets_running_handlers_finish_and_hands_the_rest_to_a_peer_at_once(
    scene: Scene, queue: Json
) -> None:
    scene.prepare(queue)
    name = str(queue["name"])
    stopping = scene.consume(queue, concurrency=2, drain_timeout=20, lease=600, poll_interval=600)
    running = scene.publish("a", *[{"gate": "go"}] * 2)
    scene.wait_for(name, "start", 2)
    waiting = scene.publish("a", *[{}] * 20)
    wait_until(lambda: scene.check.standing(name).held > 2)
    peer = scene.consume(queue, lease=600, poll_interval=600)
    scene.wait_until_consuming(peer)
    stopping.send(signal.SIGTERM)
    wait_until(lambda: set(waiting) <= set(scene.check.successes(name)))
    assert stopping.exit_code() is None, "it did not wait for the running handlers"
    scene.open_gate("go")
    assert stopping.wait() == 0
    scene.check.verify(name)
    assert set(scene.check.runs(name).values()) == {1}
    assert {entry.event_id for entry in scene.check.entries(name) if entry.pid == stopping.pid} >= set(running)
    assert {entry.attempt for entry in scene.check.entries(name)} == {1}


@one_server
@pytest.mark.parametrize("queue", [KEYS, ORDERED_BOOKS], ids=["keys", "ordered-books"])
def test_prc_01_a_stop_hands_other_keys_to_a_peer_at_once_and_the_keys_that_run_when_they_are_done(
    scene: Scene, queue: Json
) -> None:
    scene.prepare(queue)
    name = queue["name"]
    stopping = scene.consume(queue, concurrency=2, drain_timeout=60, lease=600, poll_interval=600)
    running = [scene.publish_keyed(key, {"gate": "go"}, {}, {}) for key in "ab"]
    scene.wait_for(name, "start", 2)
    waiting = [scene.publish_keyed(f"k{number}", *[{}] * 4) for number in range(6)]
    peer = scene.consume(queue, lease=600, poll_interval=600)
    scene.wait_until_consuming(peer)
    stopping.send(signal.SIGTERM)
    wait_until(lambda: {one for ids in waiting for one in ids} <= set(scene.check.successes(name)), 60)
    assert stopping.exit_code() is None, "it did not wait for the running handlers"
    assert len(scene.check.entries(name, "start")) == 2 + 6 * 4, "a later event of a key that runs was started"
    scene.open_gate("go")
    assert stopping.wait() == 0
    scene.check.verify(name)
    assert set(scene.check.runs(name).values()) == {1}
    for ids in running + waiting:
        assert [entry.event_id for entry in scene.check.entries(name, "end") if entry.event_id in ids] == ids
    assert {entry.attempt for entry in scene.check.entries(name)} == {1}


@all_kinds
@one_server
def test_prc_01_a_handler_that_outlasts_the_drain_timeout_is_released_and_loses_no_attempt(
    scene: Scene, queue: Json
) -> None:
    scene.prepare(queue)
    name = str(queue["name"])
    stopping = scene.consume(queue, concurrency=2, drain_timeout=0.3, lease=600)
    held_up = scene.publish("a", *[{"gate": "go"}] * 2)
    scene.wait_for(name, "start", 2)
    began = time.monotonic()
    assert stopping.terminate() == 0
    assert time.monotonic() - began < 10
    scene.open_gate("go")
    scene.consume(queue, lease=600)
    scene.check.verify(name)
    assert scene.check.runs(name) == dict.fromkeys(held_up, 2)
    assert {entry.attempt for entry in scene.check.entries(name)} == {1}
    if queue.get("transactional"):
        assert scene.check.effects(name) == dict.fromkeys(held_up, 1), "what was cut short has left something"


@one_server
def test_a_handler_that_swallows_its_cancellation_does_not_keep_the_process_alive(scene: Scene) -> None:
    scene.prepare(TASKS)
    consumer = scene.consume(TASKS, concurrency=2, drain_timeout=0.2, lease=600)
    scene.publish("a", {"gate": "never", "stubborn": True}, {"gate": "never", "stubborn": True})
    scene.wait_for("tasks", "start", 2)
    assert consumer.terminate(8.0) == 0
    scene.open_gate("never")
    scene.consume(TASKS, lease=600)
    scene.check.verify("tasks")


@all_kinds
@one_server
def test_a_second_signal_ends_it_now_with_exit_code_1_and_releases_what_ran(scene: Scene, queue: Json) -> None:
    scene.prepare(queue)
    name = str(queue["name"])
    consumer = scene.consume(queue, concurrency=2, drain_timeout=60, lease=600)
    scene.publish("a", *[{"gate": "go"}] * 2)
    scene.wait_for(name, "start", 2)
    consumer.send(signal.SIGTERM)
    wait_until(lambda: not scene.check.standing(name).waiting)
    began = time.monotonic()
    consumer.send(signal.SIGINT)
    assert consumer.wait() == 1
    assert time.monotonic() - began < 10
    scene.open_gate("go")
    scene.consume(queue, lease=600)
    scene.check.verify(name)
    assert {entry.attempt for entry in scene.check.entries(name)} == {1}


@one_server
def test_an_idle_consumer_stops_at_once_and_leaves_no_worker_behind(scene: Scene) -> None:
    scene.prepare(TASKS, THREADS)
    consumers = [scene.consume(TASKS, THREADS, drain_timeout=60, poll_interval=600) for _ in range(4)]
    scene.wait_until_consuming(*consumers)
    began = time.monotonic()
    for consumer, number in zip(consumers, [signal.SIGTERM, signal.SIGINT] * 2, strict=True):
        consumer.send(number)
    assert [consumer.wait() for consumer in consumers] == [0] * 4
    assert time.monotonic() - began < 10
    assert scene.workers() == []
    assert "".join(consumer.log for consumer in consumers) == "", "a normal stop is nothing to warn about"


def test_a_stop_under_full_load_counts_nothing_and_loses_nothing(scene: Scene) -> None:
    scene.prepare(TASKS, THREADS)
    for _ in range(4):
        before = len(scene.check.entries("tasks", "end"))
        scene.publish("a", *[{"sleep": 0.005}] * 400)
        consumer = scene.consume(TASKS, THREADS, lease=600, batch=50)
        scene.wait_for("tasks", "end", before + 50)
        assert consumer.terminate() == 0
        assert scene.workers() == []
    assert not scene.query("SELECT FROM eventbus.exceptions WHERE crashes > 0"), "a stop was counted as a crash"
    scene.consume(TASKS, THREADS, lease=600)
    for name in ("tasks", "threads"):
        scene.check.verify(name)
        assert {entry.attempt for entry in scene.check.entries(name)} == {1}


@one_server
def test_a_stop_while_the_server_is_away_ends_in_time_and_what_ran_comes_back(
    new_cluster: NewCluster, new_scene: NewScene, major: int
) -> None:
    from tests.fixtures import migrated

    cluster = new_cluster(major)
    migrated(cluster.dsn())
    scene = new_scene(cluster.dsn())
    scene.prepare(TASKS)
    consumer = scene.consume(TASKS, concurrency=2)
    scene.publish("a", *[{"gate": "go"}] * 2)
    scene.wait_for("tasks", "start", 2)
    cluster.stop("immediate")
    consumer.wait_for_log("database trouble")
    scene.open_gate("go")
    scene.wait_for("tasks", "end", 2)
    began = time.monotonic()
    assert consumer.terminate(20) == 1, "it could not tell the database what was done"
    assert time.monotonic() - began < 12
    cluster.start()
    scene.consume(TASKS)
    scene.check.verify("tasks", most_repeated=2)
    assert {entry.attempt for entry in scene.check.entries("tasks")} == {1}


def test_a_stop_while_it_waits_for_a_server_at_the_start_ends_at_once(new_scene: NewScene) -> None:
    consumer = new_scene("host=127.0.0.1 port=1 dbname=nowhere").consume(TASKS)
    consumer.wait_for_log("database trouble")
    began = time.monotonic()
    assert consumer.terminate() == 0
    assert time.monotonic() - began < 5


@one_server
async def test_cancelling_the_task_that_runs_a_worker_gives_back_what_runs_and_leaves_nothing_running(
    scene: Scene,
) -> None:
    scene.prepare(TASKS)
    began = asyncio.Event()

    @scene.bus.subscribe("#", name="tasks", concurrency=1)
    async def handle(event: Event) -> None:
        began.set()
        await asyncio.Event().wait()

    scene.publish("a", *[{}] * 5)
    others = asyncio.all_tasks()
    worker = asyncio.create_task(scene.bus.worker().run())
    await began.wait()
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
    assert asyncio.all_tasks() == others
    assert scene.workers() == []
    assert scene.check.standing("tasks").held == 0
    assert scene.query("SELECT max(crashes), max(attempts) FROM eventbus.exceptions") == [(0, 0)]


BLOCKED = """
import sys, time
from eventbus import Event, EventBus
from eventbus.settings import load

bus = EventBus(load({"dsn": sys.argv[1]}))

@bus.subscribe("#", name="tasks")
async def block(event: Event) -> None:
    print("blocked", flush=True)
    while True:
        time.sleep(0.1)  # in steps: a second signal right behind the first one may be given to another thread

sys.exit(bus.consume())
"""


@one_server
def test_a_second_signal_ends_a_process_whose_handler_blocks_the_event_loop(scene: Scene) -> None:
    scene.prepare(TASKS)
    scene.publish("a", {})
    with subprocess.Popen([sys.executable, "-c", BLOCKED, scene.dsn], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "blocked\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 1
