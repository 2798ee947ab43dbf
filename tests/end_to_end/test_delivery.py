"""From the commit to the handler: exactly what was committed, soon, whatever publishers and peers do."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psycopg

from tests.end_to_end.scene import FAST_RETRY, Scene, one_server
from tests.waiting import wait_until

QUEUE = {"name": "all", "pattern": "#", "retry": FAST_RETRY}
OTHER = {"name": "other", "pattern": "#", "sync": True, "retry": FAST_RETRY}


@one_server
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
        scene.wait_for("all", "end", 3, timeout=20)
    assert late in scene.check.successes("all")
    scene.check.verify("all")
    assert consumer.terminate() == 0


@one_server
def test_until_idle_waits_for_retries_that_are_not_due_yet(scene: Scene) -> None:
    queue = QUEUE | {"retry": {"first": 0.7, "factor": 1.0, "jitter": False}}
    scene.prepare(queue)
    scene.publish("a", *[{"fail": number % 3} for number in range(12)])
    assert scene.consume(queue, until_idle=True).wait() == 0
    scene.check.verify_now("all")
    scene.check.verify_attempts("all")


@one_server
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
    scene.check.verify_now("all")
    assert late in scene.check.successes("all")


@one_server
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
        scene.check.verify_now(queue)
    assert {entry.pid for entry in scene.check.entries("other")} == {peer.pid}


@one_server
def test_until_idle_ends_at_once_when_there_is_nothing(scene: Scene) -> None:
    scene.prepare(QUEUE)
    assert scene.consume(QUEUE, until_idle=True, poll_interval=600, poll_interval_without_listen=600).wait(20) == 0


@one_server
def test_txn_01_a_handler_starts_only_after_the_outer_commit_and_finds_the_rows(scene: Scene) -> None:
    scene.prepare(QUEUE)
    scene.consume(QUEUE)
    scene.publish("a", {})
    scene.wait_for("all", "end", 1)
    with psycopg.connect(scene.dsn) as publisher:
        [plain] = scene.publish_on(publisher, "a", {"needs_its_row": True})
        with publisher.transaction():
            [saved] = scene.publish_on(publisher, "a", {"needs_its_row": True})
        scene.publish("a", {})
        scene.wait_for("all", "end", 2)
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 0.5)
        assert not {plain, saved} & set(scene.check.runs("all")), "it was handled before the commit"
        publisher.commit()
    scene.check.verify("all")
    assert {plain, saved} <= set(scene.check.successes("all"))
    assert set(scene.check.runs("all").values()) == {1}, "the first attempt did not find its row"


@one_server
def test_txn_01_a_rolled_back_transaction_delivers_nothing(scene: Scene) -> None:
    scene.prepare(QUEUE)
    scene.consume(QUEUE)
    with psycopg.connect(scene.dsn) as publisher:
        scene.publish_on(publisher, "a", {})
        with publisher.transaction():
            scene.publish_on(publisher, "a", {})
        publisher.rollback()
    scene.publish("b", {})
    scene.check.verify("all")
    assert [entry.topic for entry in scene.check.entries("all", "end")] == ["b"]


def test_txn_02_what_was_published_in_a_rolled_back_savepoint_is_never_delivered(scene: Scene) -> None:
    scene.prepare(QUEUE)
    scene.consume(QUEUE)
    with psycopg.connect(scene.dsn) as publisher:
        scene.publish_on(publisher, "outer", {})
        with publisher.transaction(force_rollback=True):
            scene.publish_on(publisher, "undone", {})
        with publisher.transaction(force_rollback=True), publisher.transaction():
            scene.publish_on(publisher, "released-inside-undone", {})
    scene.publish("last", {})
    scene.check.verify("all")
    assert [entry.topic for entry in scene.check.entries("all", "end")] == ["outer", "last"]


async def test_txn_04_every_committed_event_of_concurrent_publishers_is_handled_once_per_queue(scene: Scene) -> None:
    scene.prepare(QUEUE, OTHER)
    consumers = [scene.consume(QUEUE, OTHER) for _ in range(2)] + [scene.consume(QUEUE), scene.consume(OTHER)]
    until = time.monotonic() + 4
    await asyncio.gather(*(publish_at_random(scene, random.Random(seed), until) for seed in range(20)))
    for queue in ("all", "other"):
        await asyncio.to_thread(scene.check.wait_until_quiet, queue)
        scene.check.verify(queue)
    assert len(scene.check.committed()) > 100
    assert [consumer.terminate() for consumer in consumers] == [0] * 4


async def publish_at_random(scene: Scene, chance: random.Random, until: float) -> None:
    """Publish 1 to 5 events, think for up to half a second in the transaction, then commit nine times out of ten."""
    async with await psycopg.AsyncConnection.connect(scene.dsn) as connection:
        while time.monotonic() < until:
            for _ in range(chance.randint(1, 5)):
                event_id = await scene.bus.outbox.apublish_event("a.b", {}, conn=connection)
                await connection.execute("INSERT INTO business VALUES (%s, 'a.b')", (event_id,))
                await asyncio.sleep(chance.uniform(0, 0.1))
            if chance.random() < 0.1:
                await connection.rollback()
            else:
                await connection.commit()


@one_server
def test_ntf_01_publishing_does_not_depend_on_the_size_of_events_or_on_how_many_there_are(scene: Scene) -> None:
    scene.prepare(QUEUE)
    scene.consume(QUEUE)
    sizes = [7_900, 8_000, 8_191, 100_000]
    scene.publish("a", *[{"text": "x" * size} for size in sizes], {"text": "é" * 4_000})
    scene.publish("a", *[{}] * 500)
    for number in range(60):
        scene.publish(f"topic-with-a-name-of-its-own.{number}", {})
    scene.check.verify("all")


@one_server  # of its own: the queue belongs to the whole server, and others may keep it from draining
def test_ntf_03_the_notification_queue_drains_and_the_listener_is_never_in_a_transaction(scene: Scene) -> None:
    scene.prepare(QUEUE)
    consumer = scene.consume(QUEUE, concurrency=4)
    scene.wait_until_consuming(consumer)
    with psycopg.connect(scene.dsn, autocommit=True) as publisher, psycopg.connect(scene.dsn, autocommit=True) as watch:
        publisher.execute("SET synchronous_commit = off")
        publisher.execute(
            "CREATE PROCEDURE burst(count integer) LANGUAGE plpgsql AS $$ BEGIN FOR n IN 1..count LOOP"
            " INSERT INTO business SELECT eventbus.publish('a', '{}'), 'a';"
            " PERFORM pg_notify('eventbus.relay', ''); COMMIT; END LOOP; END $$"
        )
        with ThreadPoolExecutor(1) as pool:
            burst = pool.submit(publisher.execute, "CALL burst(5000)")
            seen = set()
            while not burst.done():
                seen.update(
                    watch.execute(
                        "SELECT state FROM pg_stat_activity WHERE datname = current_database()"
                        " AND application_name = 'eventbus listener'"
                    ).fetchall()
                )
            burst.result()
    assert seen <= {("idle",), ("active",)}
    scene.check.wait_until_quiet("all", timeout=30)
    scene.check.verify("all")
    wait_until(lambda: scene.query("SELECT pg_notification_queue_usage()") == [(0.0,)])


@one_server
def test_ntf_08_no_event_waits_for_a_poll_while_claims_heartbeats_and_retries_run(scene: Scene) -> None:
    scene.prepare(QUEUE, OTHER)
    consumer = scene.consume(QUEUE, OTHER, poll_interval=600)
    scene.wait_until_consuming(consumer)
    for number in range(1, 16):
        for _ in range(10):
            scene.publish("a", {"fail": number % 2})
        scene.wait_for("all", "end", number * 10, timeout=20)
        scene.wait_for("other", "end", number * 10, timeout=20)
    for queue in ("all", "other"):
        scene.check.wait_until_quiet(queue, timeout=20)
        scene.check.verify(queue)


def test_dup_10_retries_that_are_due_at_once_are_tried_once_each_by_consumers_that_start_together(scene: Scene) -> None:
    queue = QUEUE | {"retry": {"first": 1.0, "factor": 1.0, "jitter": False, "max_attempts": 2}}
    scene.prepare(queue)
    scene.publish("a", *[{"fail": 1}] * 500)
    first = scene.consume(queue)
    wait_until(lambda: scene.check.standing("all").retrying == 500)
    first.kill()
    relays = [scene.start("relay", settings=scene.settings()) for _ in range(2)]
    consumers = [scene.consume(queue) for _ in range(5)]
    scene.check.verify("all")
    assert set(scene.check.runs("all").values()) == {2}
    assert Counter(entry.attempt for entry in scene.check.entries("all", "start")) == {1: 500, 2: 500}
    assert all(process.exit_code() is None for process in relays + consumers)


@one_server
def test_prc_05_a_bus_made_before_a_fork_publishes_and_consumes_in_parent_and_children(scene: Scene) -> None:
    scene.prepare(QUEUE)
    parent = scene.start("fork", journal=str(scene.journal), queue=QUEUE, settings=scene.settings(), children=6)
    assert parent.wait(30) == 0, parent.log
    assert len(scene.check.committed()) == 2 + 6
    scene.check.verify_now("all")
    assert "Traceback" not in parent.log


@one_server
def test_scl_01_idle_consumers_of_other_queues_and_other_relays_do_not_ask_for_every_event(scene: Scene) -> None:
    queues = [{"name": name, "pattern": f"{name}.#"} for name in ("a", "b", "c")]
    scene.prepare(*queues)
    consumers = [scene.consume(queue, lease=60, poll_interval=600) for queue in queues for _ in range(3)]
    scene.wait_until_consuming(*consumers)
    with psycopg.connect(scene.dsn, autocommit=True) as admin:
        for queue in "abc":
            scene.publish(queue, {})
            scene.check.wait_until_quiet(queue, [queue])
        count_calls(admin)
        wait_until(lambda: is_still(admin), timeout=60)
        before = calls(admin)
        for number in range(1, 31):
            scene.publish("a", {})
            scene.wait_for("a", "end", number + 1)
        wait_until(lambda: is_still(admin), timeout=60)
        ticks, claims, again = (after - earlier for after, earlier in zip(calls(admin), before, strict=True))
    # Each consumer of the queue asks once for each event. Whoever asks while another one is claiming it is told to ask
    # again, as often as it takes: how often that is depends on the machine.
    assert 30 <= claims - again <= 30 * 3, "claims do not grow with the consumers of the queue alone"
    assert 30 <= ticks <= 30 * 12, "every relay looks at every event"
    scene.check.verify("a", ["a"])


TICK_COLUMNS = """state text, more boolean, events integer, deliveries integer, fed integer[], unknown text[],
due_in double precision, counts integer[]"""
CLAIM_COLUMNS = """claim_id bigint, queue_id integer, lane integer, seq bigint, size integer, event_id text, topic text,
key text, payload text, headers text, published_at timestamptz, replay_id integer, ordered boolean, twin text"""


def count_calls(admin: psycopg.Connection) -> None:
    """Count ticks, claims, and claims that are told to ask again, in sequences: these are exact at once and need no
    transaction id.
    """
    admin.execute("CREATE UNLOGGED SEQUENCE public.again")
    again = "r.claim_id IS NOT NULL OR nextval('public.again') > 0"  # such an answer has one row without a claim
    for name, arguments, columns, call, kept in (
        ("tick", "integer, timestamptz", TICK_COLUMNS, "$1, $2", "true"),
        ("claim", "uuid, uuid, integer[], integer[], bigint, integer", CLAIM_COLUMNS, "$1, $2, $3, $4, $5, $6", again),
    ):
        admin.execute(
            f"CREATE UNLOGGED SEQUENCE public.{name}s; ALTER FUNCTION eventbus.{name} RENAME TO real_{name};"
            f" CREATE FUNCTION eventbus.{name}({arguments}) RETURNS TABLE ({columns}) LANGUAGE plpgsql AS $$ BEGIN"
            f" PERFORM nextval('public.{name}s'); RETURN QUERY"
            f" SELECT r.* FROM eventbus.real_{name}({call}) r WHERE {kept}; END $$;"
        )
    admin.execute("SELECT nextval('public.ticks'), nextval('public.claims'), nextval('public.again')")


def calls(admin: psycopg.Connection) -> tuple[int, ...]:
    """How many ticks, claims, and claims to be repeated there were."""
    row = admin.execute(
        "SELECT t.last_value, c.last_value, a.last_value FROM public.ticks t, public.claims c, public.again a"
    ).fetchone()
    assert row is not None
    return row


def is_still(admin: psycopg.Connection) -> bool:
    """Whether nobody ticks or claims for a second."""
    before, began = calls(admin), time.monotonic()
    wait_until(lambda: calls(admin) != before or time.monotonic() - began > 1)
    return calls(admin) == before
