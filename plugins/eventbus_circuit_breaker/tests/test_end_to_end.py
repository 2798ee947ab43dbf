"""Real workers in processes of their own, with a service that is down, and comes back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import psycopg
import pytest

from eventbus.postgres.migrate import migrate
from eventbus_circuit_breaker.records import Breaker, breakers, migrations
from tests.end_to_end.processes import Process
from tests.end_to_end.scene import FAST_RETRY, Scene
from tests.waiting import wait_until

pytestmark = pytest.mark.parametrize("major", [18], indirect=True)

MAIL = {"name": "mail", "pattern": "#", "retry": FAST_RETRY}
DOWN = {"needs": "server"}
"""A payload whose handler fails until the server is there."""


def consume(scene: Scene, *queues: dict[str, Any], until_idle: bool = False, **settings: Any) -> Process:
    """A worker with a breaker whose pauses are short."""
    concurrency = settings.pop("concurrency", 10)
    breaker = {"first_pause": 1.0, "longest_pause": 2.0, "probe_timeout": 2.0} | settings
    return scene.consume(
        *queues,
        plugins=["circuit_breaker"],
        plugin_settings={"circuit_breaker": breaker},
        concurrency=concurrency,
        until_idle=until_idle,
    )


def breaker(scene: Scene, queue: str = "mail") -> Breaker:
    """What is known of the breaker of a queue."""
    with psycopg.connect(scene.dsn, autocommit=True) as connection:
        never = Breaker(queue, "closed", 0.0, 0, None, None, None, None, None)
        return next((each for each in breakers(connection, "eventbus") if each.queue == queue), never)


def state(scene: Scene, queue: str = "mail") -> str:
    return breaker(scene, queue).state


def wait_until_open(scene: Scene, trips: int = 1) -> None:
    """Wait until it has opened so often in a row."""
    wait_until(lambda: breaker(scene).trips >= trips, 30)


def highest_attempt(scene: Scene) -> int:
    return max(entry.attempt for entry in scene.check.entries("mail", "start"))


@pytest.fixture(autouse=True)
def tables(dsn: str) -> None:
    migrate(dsn, "eventbus", [("circuit_breaker", step) for step in migrations()])


@pytest.mark.parametrize(
    "kind", [{}, {"sync": True}, {"batch": 20}, {"idempotent": True}, {"transactional": True}], ids=str
)
def test_while_a_service_is_down_few_calls_are_made_and_when_it_is_back_everything_is_handled_without_help(
    scene: Scene, kind: dict[str, Any]
) -> None:
    queue = MAIL | kind
    scene.prepare(queue)
    scene.publish("a", *[DOWN] * 2_000)
    workers = [consume(scene, queue) for _ in range(3)]
    wait_until_open(scene, trips=3)
    calls, running = len(scene.check.entries("mail", "start")), 3 * 10
    most = running + 3 * 4 + 4  # in each process four slots go on before the fifth failure, and then there are probes
    assert calls <= (most if "batch" not in kind else most + 2 * 20 * running)
    assert scene.check.entries("mail", "end") == []
    scene.open_gate("server")
    scene.check.verify("mail")
    assert scene.check.dead("mail") == {}
    assert highest_attempt(scene) <= 2
    assert state(scene) == "closed"
    assert [worker.terminate() for worker in workers] == [0] * 3


def test_ext_04_when_the_pause_is_over_one_event_is_tried_and_the_rest_waits(scene: Scene) -> None:
    scene.prepare(MAIL)
    workers = [consume(scene, MAIL, concurrency=20, probe_timeout=30.0) for _ in range(3)]
    scene.wait_until_consuming(*workers)
    scene.publish("a", *[DOWN] * 20)
    wait_until_open(scene)
    scene.publish("a", *[{"gate": "go"}] * 200)
    before = len(scene.check.entries("mail", "start"))
    wait_until(lambda: state(scene) == "probing")
    wait_until(lambda: breaker(scene).seconds < 28)  # two seconds of the thirty of the probe are over
    assert len(scene.check.entries("mail", "start")) == before + 1
    scene.open_gate("go")
    scene.open_gate("server")
    scene.check.verify("mail")
    assert highest_attempt(scene) <= 2


def test_the_breaker_of_one_queue_leaves_others_alone(scene: Scene) -> None:
    mail, other = MAIL | {"pattern": "mail"}, MAIL | {"name": "other", "pattern": "other"}
    scene.prepare(mail, other)
    worker = consume(scene, mail, other, first_pause=60.0, longest_pause=60.0)
    scene.publish("mail", *[DOWN] * 500)
    wait_until_open(scene)
    scene.publish("other", *[{}] * 500)
    scene.check.verify("other", ["other"])
    assert (state(scene), state(scene, "other")) == ("open", "closed")
    assert worker.terminate() == 0


def test_a_worker_that_is_killed_with_the_probe_costs_a_pause_and_nothing_else(scene: Scene) -> None:
    scene.prepare(MAIL)
    workers = [consume(scene, MAIL) for _ in range(3)]
    scene.wait_until_consuming(*workers)
    scene.publish("a", *[DOWN] * 50)
    wait_until_open(scene)
    scene.publish("a", *[{"gate": "go"}] * 50)
    before = len(scene.check.entries("mail", "start"))
    wait_until(lambda: len(scene.check.entries("mail", "start")) == before + 1)
    holder = scene.check.entries("mail", "start")[-1].pid
    [victim] = [worker for worker in workers if worker.pid == holder]
    victim.kill()
    scene.open_gate("go")
    scene.open_gate("server")
    scene.check.verify("mail", most_repeated=1)
    assert scene.check.dead("mail") == {}
    assert state(scene) == "closed"


def test_an_event_that_always_fails_does_not_keep_a_healthy_queue_shut(scene: Scene) -> None:
    queue = MAIL | {"retry": FAST_RETRY | {"max_attempts": 2}}
    scene.prepare(queue)
    worker = consume(scene, queue, concurrency=1)
    scene.wait_until_consuming(worker)
    poison = scene.publish("a", *[{"fail": 99}] * 6)
    wait_until_open(scene)
    scene.publish("a", *[{}] * 100)
    scene.check.verify("mail")
    assert set(scene.check.dead("mail")) == set(poison)
    assert {letter.attempts for letter in scene.check.dead("mail").values()} == {2}


def test_no_event_dies_however_many_probes_have_failed_with_it(scene: Scene) -> None:
    queue = MAIL | {"retry": FAST_RETRY | {"max_attempts": 2}}
    scene.prepare(queue)
    scene.publish("a", *[DOWN] * 5)
    consume(scene, queue, first_pause=0.2, longest_pause=0.2)
    wait_until_open(scene, trips=12)
    scene.open_gate("server")
    scene.check.verify("mail")
    assert scene.check.dead("mail") == {}
    assert highest_attempt(scene) == 2


def test_ordered_queues_keep_the_order_of_each_key_through_pauses_and_probes(scene: Scene) -> None:
    queue = MAIL | {"ordered": True}
    scene.prepare(queue)
    published = {f"key{number}": scene.publish_keyed(f"key{number}", *[DOWN] * 20) for number in range(30)}
    workers = [consume(scene, queue) for _ in range(3)]
    wait_until_open(scene, trips=2)
    scene.open_gate("server")
    scene.check.verify("mail")
    ended: dict[str, list[str]] = {key: [] for key in published}
    for entry in scene.check.entries("mail", "end"):
        ended[entry.topic].append(entry.event_id)
    assert ended == published
    assert [worker.terminate() for worker in workers] == [0] * 3


def test_a_queue_of_which_every_third_event_fails_once_stays_closed(scene: Scene) -> None:
    scene.prepare(MAIL)
    scene.publish("a", *[{"fail": 1}, {"sleep": 0.02}, {"sleep": 0.02}] * 300)
    worker = consume(scene, MAIL)
    scene.check.verify("mail")
    assert breaker(scene).opened_at is None
    assert Counter(scene.check.runs("mail").values()) == {1: 600, 2: 300}
    assert worker.terminate() == 0


def test_a_pause_by_hand_outlasts_the_breaker(scene: Scene) -> None:
    scene.prepare(MAIL)
    worker = consume(scene, MAIL)
    scene.publish("a", *[DOWN] * 100)
    wait_until_open(scene)
    scene.query("SELECT eventbus.pause_queue(id, 'manual', 'repair', NULL, NULL) FROM eventbus.queues")
    scene.open_gate("server")
    before = len(scene.check.entries("mail", "start"))
    wait_until(lambda: state(scene) == "ready")
    assert len(scene.check.entries("mail", "start")) == before
    scene.query("SELECT eventbus.resume_queue(id, 'manual') FROM eventbus.queues")
    scene.check.verify("mail")
    assert worker.terminate() == 0


def test_a_worker_that_ends_when_nothing_is_left_waits_for_the_breaker(scene: Scene) -> None:
    scene.prepare(MAIL)
    scene.publish("a", *[DOWN] * 100)
    worker = consume(scene, MAIL, until_idle=True)
    wait_until_open(scene, trips=2)
    scene.open_gate("server")
    assert worker.wait() == 0
    scene.check.verify_now("mail")


def test_a_worker_without_the_breakers_tables_delivers_and_says_so_once(scene: Scene, conn: psycopg.Connection) -> None:
    conn.execute("DROP TABLE eventbus.circuit_breakers CASCADE")
    scene.prepare(MAIL)
    scene.publish("a", *[DOWN] * 100)
    worker = consume(scene, MAIL)
    worker.wait_for_log("circuit breakers work in this process only")
    scene.open_gate("server")
    scene.check.verify("mail")
    assert worker.log.count("circuit breakers work in this process only") == 1
