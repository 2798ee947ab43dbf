"""Servers that go away, come back, crash, or say no: consumers go on by themselves, and say so in two lines."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from eventbus.bus import EventBus
from eventbus.errors import Unavailable
from eventbus.settings import load
from tests.end_to_end.scene import FAST_RETRY, NewScene, Scene, one_server
from tests.fixtures import NewCluster, migrated
from tests.servers import Cluster
from tests.waiting import wait_until

QUEUE = {"name": "all", "pattern": "#", "retry": FAST_RETRY}
THREADS = {"name": "threads", "pattern": "#", "sync": True, "retry": FAST_RETRY}
TROUBLE, BACK = "WARNING database trouble", "INFO the database is back"
ONE_OUTAGE = [TROUBLE, BACK]


def outages(log: str) -> list[str]:
    """The lines that tell of outages, each cut to its fixed part."""
    return [part for line in log.splitlines() for part in (TROUBLE, BACK) if line.startswith(part)]


def end_backends(scene: Scene, name: str = "%") -> int:
    """Terminate the bus's connections to this database; how many."""
    return len(
        scene.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'eventbus ' || %s",
            [name],
        )
    )


def failed_statements(admin: psycopg.Connection) -> int:
    """How many transactions in this database were rolled back, as far as the statistics know yet."""
    row = admin.execute("SELECT xact_rollback FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def outage(owned_cluster: Cluster, new_scene: NewScene) -> tuple[Cluster, Scene]:
    """A scenario on a server that may be stopped."""
    migrated(owned_cluster.dsn())
    return owned_cluster, new_scene(owned_cluster.dsn())


def test_dbf_01_no_event_is_lost_or_repeated_when_all_connections_are_cut_while_handlers_run(scene: Scene) -> None:
    scene.prepare(QUEUE)
    consumer = scene.consume(QUEUE, concurrency=5, poll_interval=600)
    scene.publish("a", *[{}] * 200)  # so that it knows how fast it is, and claims ahead
    scene.check.wait_until_quiet("all")
    scene.publish("a", *[{"gate": "go"}] * 20)
    scene.wait_for("all", "start", 205)
    wait_until(lambda: scene.check.standing("all").held == 20)
    assert end_backends(scene) == 6
    consumer.wait_for_log(BACK)
    scene.open_gate("go")
    scene.check.verify("all")
    assert set(scene.check.runs("all").values()) == {1}
    scene.publish("a", {})
    scene.check.wait_until_quiet("all", timeout=5)
    assert outages(consumer.log) == ONE_OUTAGE, consumer.log
    assert len(consumer.log.splitlines()) == 2, consumer.log


@one_server
def test_an_outage_while_nothing_happens_is_told_once_and_not_again_by_each_connection(scene: Scene) -> None:
    scene.prepare(QUEUE)
    consumer = scene.consume(QUEUE, poll_interval=600)
    scene.publish("a", {"fail": 1})
    scene.check.wait_until_quiet("all")
    assert end_backends(scene) == 6
    consumer.wait_for_log(BACK)
    scene.publish("a", {"fail": 1})
    scene.check.wait_until_quiet("all")
    assert outages(consumer.log) == ONE_OUTAGE, consumer.log


def test_dbf_03_consumers_resume_by_themselves_after_a_stop_of_the_server_under_load(
    outage: tuple[Cluster, Scene],
) -> None:
    cluster, scene = outage
    scene.prepare(QUEUE, THREADS)
    consumers = [scene.consume(QUEUE, THREADS, poll_interval=600) for _ in range(2)]
    scene.wait_until_consuming(*consumers)
    scene.publish("a", *[{"sleep": 0.005}] * 600)
    scene.wait_for("all", "end", 50)
    cluster.stop("fast")
    for consumer in consumers:
        consumer.wait_for_log(TROUBLE)
    # longer than the lease: nobody may be taken over because the server was away
    wait_until(lambda: time.time() - scene.check.entries("all")[-1].at > 2.0)
    cluster.start()
    for queue in ("all", "threads"):
        scene.check.verify(queue)
    scene.publish("a", {})  # heard, not polled for
    for queue in ("all", "threads"):
        scene.check.wait_until_quiet(queue, timeout=8)
    for consumer in consumers:
        consumer.wait_for_log(BACK)
        assert outages(consumer.log) == ONE_OUTAGE, consumer.log
        assert "took over" not in consumer.log
        assert consumer.terminate() == 0


@one_server
def test_dbf_03_a_consumer_that_starts_before_the_server_waits_for_it(outage: tuple[Cluster, Scene]) -> None:
    cluster, scene = outage
    scene.prepare(QUEUE)
    cluster.stop()
    consumer = scene.consume(QUEUE)
    consumer.wait_for_log(TROUBLE)
    cluster.start()
    scene.publish("a", {})
    scene.check.wait_until_quiet("all")
    consumer.wait_for_log(BACK)
    assert outages(consumer.log) == ONE_OUTAGE, consumer.log


def test_a_consumer_that_is_told_not_to_wait_says_at_once_that_the_server_is_away(tmp_path: Path) -> None:
    settings = load({"dsn": "host=127.0.0.1 port=1 dbname=nowhere"}, environment={}, folder=tmp_path)
    bus = EventBus(settings)
    bus.subscribe("#", name="all")(lambda event: None)
    with pytest.raises(Unavailable, match="refused"):
        bus.consume(wait=False)


def test_a_server_crash_under_load_loses_nothing_that_was_committed(outage: tuple[Cluster, Scene]) -> None:
    cluster, scene = outage
    scene.prepare(QUEUE, THREADS)
    consumers = [scene.consume(QUEUE, THREADS) for _ in range(2)]
    scene.wait_until_consuming(*consumers)
    for crashes in (1, 2):
        with ThreadPoolExecutor(4) as publishers:
            before = len(scene.check.entries("all", "end"))
            publishing = [publishers.submit(publish_until_the_crash, scene) for _ in range(4)]
            scene.wait_for("all", "end", before + 100)
            cluster.stop("immediate")
            assert sum(publisher.result() for publisher in publishing) > 0
        cluster.start()
        for consumer in consumers:  # every connection is back, or the next crash would belong to the same outage
            wait_until(lambda: len(outages(consumer.log)) >= 2 * crashes, 30)  # noqa: B023 - awaited at once
    for queue in ("all", "threads"):
        scene.check.verify(queue, most_repeated=2 * 2 * 1_000)
        assert not scene.check.dead(queue)
    for consumer in consumers:
        assert outages(consumer.log) == ONE_OUTAGE * 2, consumer.log
        assert consumer.terminate() == 0


def publish_until_the_crash(scene: Scene) -> int:
    """Publish one event per transaction until the server is gone; how many."""
    published = 0
    try:
        while True:
            scene.publish("a", {"fail": published % 10 == 0})
            published += 1
    except psycopg.OperationalError:
        return published


@one_server
def test_dbf_05_a_claim_that_runs_into_a_timeout_is_a_warning_that_names_it(scene: Scene) -> None:
    scene.prepare(QUEUE)
    with role(scene.dsn, "SUPERUSER") as (name, dsn), psycopg.connect(scene.dsn, autocommit=True) as admin:
        admin.execute(f"ALTER ROLE {name} SET statement_timeout = '100ms'")
        consumer = scene.consume(QUEUE, dsn=dsn, lease=5)
        scene.wait_until_consuming(consumer)
        with slow_claims(admin):
            scene.publish("a", {})
            consumer.wait_for_log(TROUBLE)
            assert "statement timeout" in consumer.log
            assert '"eventbus".claim(' in consumer.log
            wait_until(lambda: attempts_to_claim(admin) >= 4)
            assert len(consumer.log.splitlines()) == 1, consumer.log
            began = time.monotonic()
            attempts = attempts_to_claim(admin)
            wait_until(lambda: time.monotonic() - began > 2)
            assert attempts_to_claim(admin) - attempts <= 3, "it does not back off"
        scene.check.verify("all")
        consumer.wait_for_log(BACK)
        assert outages(consumer.log) == ONE_OUTAGE, consumer.log
        assert consumer.terminate() == 0


@contextmanager
def slow_claims(admin: psycopg.Connection) -> Iterator[None]:
    """Make claims of fresh deliveries too slow, as a lost index would, and count them."""
    signature = "eventbus.claim(uuid, uuid, integer[], integer[], bigint, integer)"
    admin.execute(
        f"CREATE SEQUENCE public.claiming; ALTER FUNCTION {signature} RENAME TO fast_claim;"
        " CREATE FUNCTION eventbus.claim(uuid, uuid, integer[], integer[], bigint, integer)"
        " RETURNS TABLE (claim_id bigint, queue_id integer, lane integer, seq bigint, size integer, event_id text,"
        " topic text, key text, payload text, headers text, published_at timestamptz, replay_id integer,"
        " ordered boolean, twin text) LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM nextval('public.claiming'); PERFORM pg_sleep(1);"
        " RETURN QUERY SELECT * FROM eventbus.fast_claim($1, $2, $3, $4, $5, $6); END $$"
    )
    yield
    admin.execute(f"DROP FUNCTION {signature}; ALTER FUNCTION eventbus.fast_claim RENAME TO claim")


def attempts_to_claim(admin: psycopg.Connection) -> int:
    """How often a slow claim was begun."""
    row = admin.execute("SELECT last_value FROM public.claiming").fetchone()
    assert row is not None
    return int(row[0])


@one_server
def test_dbf_09_too_few_connections_are_told_with_the_number_that_is_needed_and_block_nothing(scene: Scene) -> None:
    scene.prepare(QUEUE)
    with role(scene.dsn, "CONNECTION LIMIT 3") as (name, dsn):
        consumer = scene.consume(QUEUE, dsn=dsn, concurrency=10)
        consumer.wait_for_log(TROUBLE)
        assert "needs 6 connections" in consumer.log
        with psycopg.connect(scene.dsn, autocommit=True) as admin:
            admin.execute(f"ALTER ROLE {name} CONNECTION LIMIT 16")
        scene.publish("a", *[{"publish": 2}] * 20)
        scene.check.wait_until_quiet("all")
        wait_until(lambda: len(scene.check.committed()) == 60)
        scene.check.verify("all")
        assert consumer.terminate() == 0


@one_server
def test_dbf_12_no_session_is_idle_in_a_transaction_while_waiting_or_while_a_handler_runs(scene: Scene) -> None:
    scene.prepare(QUEUE, THREADS)
    with psycopg.connect(scene.dsn, autocommit=True) as watcher:
        database = conninfo.conninfo_to_dict(scene.dsn)["dbname"]
        watcher.execute(f"ALTER DATABASE {database} SET idle_in_transaction_session_timeout = '200ms'")
        consumer = scene.consume(QUEUE, THREADS, poll_interval=0.3)
        scene.publish("a", {"sleep": 2.5})
        seen: set[str] = set()
        while not (scene.check.entries("all", "end") and scene.check.entries("threads", "end")):
            for name, state, age in watcher.execute(
                "SELECT application_name, state, extract(epoch FROM clock_timestamp() - state_change)"
                " FROM pg_stat_activity WHERE application_name LIKE 'eventbus %%' AND datname = current_database()"
            ):
                seen.add(name)
                assert not (state == "idle in transaction" and age > 0.1), name
        assert seen >= {f"eventbus {link}" for link in ("relay", "claim", "heartbeat", "listener")}
    for queue in ("all", "threads"):
        scene.check.verify(queue)
    assert consumer.log == ""


@one_server
def test_ntf_05_a_cut_listening_connection_comes_back_and_events_are_not_left_to_the_next_poll(scene: Scene) -> None:
    scene.prepare(QUEUE)
    consumer = scene.consume(QUEUE, poll_interval=600, poll_interval_without_listen=600)
    scene.wait_until_consuming(consumer)
    for _ in range(3):
        wait_until(lambda: end_backends(scene, "listener") == 1)
        wait_until(lambda: len(listening(scene)) == 1)
        before = len(scene.check.entries("all", "end"))
        scene.publish("a", {})
        scene.wait_for("all", "end", before + 1, timeout=20)
    assert consumer.terminate() == 0


@one_server
def test_ntf_05_a_listener_whose_first_reconnects_fail_listens_again_after_the_outage(
    outage: tuple[Cluster, Scene],
) -> None:
    cluster, scene = outage
    scene.prepare(QUEUE)
    consumer = scene.consume(QUEUE, poll_interval=600, poll_interval_without_listen=600)
    scene.wait_until_consuming(consumer)
    wait_until(lambda: len(listening(scene)) == 1)
    cluster.stop()
    consumer.wait_for_log(TROUBLE)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 1.5)
    cluster.start()
    wait_until(lambda: len(listening(scene)) == 1)
    consumer.wait_for_log(BACK)
    scene.publish("a", {})
    scene.wait_for("all", "end", 1, timeout=20)


def listening(scene: Scene) -> list[tuple[object, ...]]:
    """The connections that wait for notifications, when they do."""
    return scene.query(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'eventbus listener' AND state = 'idle'"
        " AND query LIKE 'LISTEN%%work%%' AND datname = current_database()"
    )


@contextmanager
def role(dsn: str, options: str) -> Iterator[tuple[str, str]]:
    """A role that may do everything with the bus's schema; its name and its connection string."""
    name = f"eventbus_test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {name} LOGIN {options}")
        try:
            for grant in ("USAGE ON SCHEMA eventbus", "ALL ON ALL TABLES IN SCHEMA eventbus, public",
                          "ALL ON ALL SEQUENCES IN SCHEMA eventbus"):  # fmt: skip
                admin.execute(f"GRANT {grant} TO {name}")
            yield name, conninfo.make_conninfo(dsn, user=name)
        finally:
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [name])
            admin.execute(f"DROP OWNED BY {name}")
            admin.execute(f"DROP ROLE {name}")


def fill_the_notification_queue(connection: psycopg.Connection) -> None:
    """Notify until the server refuses."""
    while True:
        connection.execute("SELECT pg_notify('other', repeat('x', 7000))")


def test_ntf_03_a_full_notification_queue_makes_no_publish_fail_and_loses_no_event(
    new_cluster: NewCluster, new_scene: NewScene
) -> None:
    cluster = new_cluster(18, max_notify_queue_pages=64)
    migrated(cluster.dsn())
    scene = new_scene(cluster.dsn())
    scene.prepare(QUEUE)
    consumer = scene.consume(QUEUE, concurrency=1, poll_interval=0.3)
    scene.publish("a", {})
    scene.wait_for("all", "end", 1)
    with psycopg.connect(scene.dsn, autocommit=True) as stuck, psycopg.connect(scene.dsn, autocommit=True) as other:
        stuck.execute("LISTEN other")
        stuck.execute("BEGIN")
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            fill_the_notification_queue(other)
        for _ in range(10):
            scene.publish("a", {"fail": 1}, {"sleep": 0.1})
        scene.check.wait_until_quiet("all")
        scene.publish("a", {"gate": "go"}, *[{}] * 5)
        scene.wait_for("all", "start", 32)
        consumer.send(signal.SIGTERM)
        wait_until(lambda: (now := scene.check.standing("all")).waiting + now.retrying == 5)
        scene.open_gate("go")
        assert consumer.wait() == 0
        heir = scene.consume(QUEUE, poll_interval=0.3)
        scene.check.wait_until_quiet("all")
    scene.check.verify("all")
    assert TROUBLE not in consumer.log + heir.log


@one_server
def test_a_consumer_that_waited_for_the_server_does_not_wait_on_for_a_schema_that_is_not_there(
    owned_cluster: Cluster, new_scene: NewScene
) -> None:
    scene = new_scene(owned_cluster.dsn())
    owned_cluster.stop()
    consumer = scene.consume(QUEUE)
    consumer.wait_for_log(TROUBLE)
    owned_cluster.start()
    assert consumer.wait() == 1
    assert "SchemaMissing" in consumer.log
    assert "run: eventbus migrate" in consumer.log


def test_a_server_that_became_read_only_is_left_and_used_again_once_it_takes_writes(scene: Scene) -> None:
    scene.prepare(QUEUE)
    consumer = scene.consume(QUEUE)
    scene.publish("a", {})
    scene.check.wait_until_quiet("all")
    writable = conninfo.make_conninfo(scene.dsn, options="-c default_transaction_read_only=off")
    with psycopg.connect(writable, autocommit=True) as admin:
        consumer.freeze()  # so that the event is there when it comes back, and nothing works meanwhile
        admin.execute(f'ALTER DATABASE "{admin.info.dbname}" SET default_transaction_read_only = on')
        end_backends(scene)
        with admin.transaction():
            scene.publish_on(admin, "a", {})
        before = failed_statements(admin)
        consumer.send(signal.SIGCONT)
        wait_until(lambda: failed_statements(admin) >= before + 3, timeout=40)
        admin.execute(f'ALTER DATABASE "{admin.info.dbname}" SET default_transaction_read_only = off')
    scene.wait_for("all", "end", 2)
    assert consumer.exit_code() is None
    links = 5  # each may have connected while the server was read-only, and finds out when it writes
    assert len(outages(consumer.log)) <= 2 * (1 + links), consumer.log


def test_until_idle_ends_with_an_error_when_the_bus_is_paused_instead_of_waiting_for_ever(scene: Scene) -> None:
    scene.prepare(QUEUE)
    scene.publish("a", {})
    with psycopg.connect(scene.dsn) as admin:
        admin.execute("UPDATE eventbus.bus SET state = 'paused', reason = 'a test'")
    consumer = scene.consume(QUEUE, until_idle=True)
    assert consumer.wait() == 1
    assert "eventbus resume" in consumer.log
    with psycopg.connect(scene.dsn) as admin:
        admin.execute("UPDATE eventbus.bus SET state = 'running', reason = NULL")
    assert scene.consume(QUEUE, until_idle=True).wait() == 0
