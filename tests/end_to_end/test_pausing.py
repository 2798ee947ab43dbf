"""Paused queues, with real processes: nothing starts, nothing is lost, one probe at a time."""

from __future__ import annotations

import time

import psycopg

from eventbus.postgres.pausing import pause, resume
from tests.end_to_end.processes import Process
from tests.end_to_end.scene import FAST_RETRY, Scene, one_server
from tests.waiting import wait_until

QUEUE = {"name": "all", "pattern": "#", "retry": FAST_RETRY}


def paused(scene: Scene, seconds: float | None = None) -> float:
    """Pause the queue by hand; when that had returned."""
    with psycopg.connect(scene.dsn, autocommit=True) as connection:
        pause(connection, "eventbus", "all", "tests", seconds)
    return time.time()


def resumed(scene: Scene, *, every: bool = False) -> None:
    """Let the queue go on."""
    with psycopg.connect(scene.dsn, autocommit=True) as connection:
        assert resume(connection, "eventbus", "all", every=every)


def broken(scene: Scene, seconds: float, probe_seconds: float) -> None:
    """Pause the queue as a circuit breaker does."""
    scene.query("SELECT eventbus.pause_queue(id, 'breaker', 'tests', %s, %s) FROM eventbus.queues",
                (seconds, probe_seconds))  # fmt: skip


def wait_a_moment(seconds: float = 1.0) -> None:
    """Time in which something could happen that must not."""
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > seconds)


def delivered(scene: Scene, count: int) -> None:
    """Wait until the relay has brought so many events to the queue."""
    wait_until(lambda: scene.check.standing("all").delivered >= count)


def test_while_5000_events_flow_through_three_processes_a_pause_stops_all_of_them_and_costs_nothing(
    scene: Scene,
) -> None:
    scene.prepare(QUEUE)
    three = [scene.consume(QUEUE, concurrency=4) for _ in range(3)]
    scene.wait_until_consuming(*three)
    for _ in range(4):
        scene.publish("a", *[{"sleep": 0.02}] * 500)
    scene.wait_for("all", "end", 300)
    returned_at = paused(scene)
    for _ in range(6):
        scene.publish("a", *[{}] * 500)
    delivered(scene, 5_000)
    wait_a_moment()
    starts = [entry.at for entry in scene.check.entries("all", "start")]
    late = [at - returned_at for at in starts if at > returned_at + 1]
    assert len(starts) < 5_000, "all was done before the pause came"
    assert not late, f"{len(late)} events started up to {max(late):.1f} s after the pause"
    wait_until(lambda: scene.check.standing("all").held == 0)
    resumed(scene)
    scene.check.verify("all")
    assert {entry.attempt for entry in scene.check.entries("all")} == {1}, "a pause cost an attempt"
    assert {process.terminate() for process in three} == {0}


@one_server
def test_a_pause_by_hand_outlives_every_worker(scene: Scene) -> None:
    scene.prepare(QUEUE)
    paused(scene)
    for killed in (True, False):
        worker = scene.consume(QUEUE)
        scene.publish("a", *[{}] * 20)
        delivered(scene, 20 if killed else 40)
        wait_a_moment(0.5)
        if killed:
            worker.kill()
        else:
            assert worker.terminate() == 0
    assert not scene.check.entries("all"), "a restart has ended the pause"
    scene.consume(QUEUE)
    resumed(scene)
    scene.check.verify("all")


@one_server
def test_a_pause_with_a_time_ends_by_itself(scene: Scene) -> None:
    scene.prepare(QUEUE)
    returned_at = paused(scene, 1.0)
    scene.publish("a", *[{}] * 20)
    scene.consume(QUEUE, poll_interval=600)
    scene.check.verify("all")
    assert min(entry.at for entry in scene.check.entries("all")) > returned_at + 0.9


@one_server
def test_until_idle_says_which_queue_is_paused_instead_of_waiting_for_ever(scene: Scene) -> None:
    scene.prepare(QUEUE)
    paused(scene)
    assert scene.consume(QUEUE, until_idle=True).wait() == 0, "nothing is left to do in an empty queue"
    scene.publish("a", {})
    worker = scene.consume(QUEUE, until_idle=True)
    assert worker.wait() == 1
    assert "paused with work left: all" in worker.log
    assert "Traceback" not in worker.log
    resumed(scene)
    assert scene.consume(QUEUE, until_idle=True).wait() == 0
    scene.check.verify_now("all")


@one_server
def test_until_idle_waits_for_the_end_of_an_automatic_pause(scene: Scene) -> None:
    scene.prepare(QUEUE)
    broken(scene, 600, 600)
    scene.publish("a", {}, {})
    worker = scene.consume(QUEUE, until_idle=True)
    delivered(scene, 2)
    wait_a_moment()
    assert worker.exit_code() is None
    resumed(scene, every=True)
    assert worker.wait() == 0
    scene.check.verify_now("all")


@one_server
def test_ext_04_of_200_events_and_three_processes_one_is_let_through_and_the_rest_waits_without_an_attempt(
    scene: Scene,
) -> None:
    scene.prepare(QUEUE)
    broken(scene, 0.5, 600)
    scene.publish("a", *[{"gate": "probe"}] * 200)
    three = [scene.consume(QUEUE, concurrency=20) for _ in range(3)]
    scene.wait_for("all", "start", 1)
    wait_a_moment()
    assert len(scene.check.entries("all", "start")) == 1
    scene.open_gate("probe")
    scene.check.verify("all")  # nobody resumes it: whoever has paused it may not be there any more
    assert {entry.attempt for entry in scene.check.entries("all")} == {1}
    assert {process.terminate() for process in three} == {0}


@one_server
def test_a_worker_that_is_killed_with_the_probe_opens_the_pause_again_and_a_later_probe_ends_it(scene: Scene) -> None:
    scene.prepare(QUEUE)
    broken(scene, 0.5, 1.0)
    scene.publish("a", {"gate": "never"}, *[{}] * 20)
    victim: Process = scene.consume(QUEUE)
    scene.wait_for("all", "start", 1)
    heir = scene.consume(QUEUE)
    scene.wait_until_consuming(heir)
    victim.kill()
    killed_at = time.time()
    scene.wait_for("all", "end", 1)
    first = next(entry for entry in scene.check.entries("all", "end"))
    assert first.pid == heir.pid
    began = next(entry.at for entry in scene.check.entries("all", "start"))
    assert first.at > max(killed_at, began + 1.4), "the pause did not begin again"
    scene.open_gate("never")
    resumed(scene, every=True)
    scene.check.verify("all")
    runs = scene.check.runs("all")
    assert sorted(runs.values())[-2:] == [1, 2], "only what the victim had begun ran again"
