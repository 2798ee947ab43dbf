"""What a transactional handler writes, what it publishes, and that its event is done: together or not at all."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from eventbus import DeadLetter, Discard, Event, Retry, RetryPolicy, station
from eventbus.bus import EventBus
from eventbus.postgres.admin import resume
from eventbus.postgres.privileges import CONSUME, grants
from eventbus.postgres.sessions import Sessions
from eventbus.settings import load
from eventbus.testing.wire import Wire
from tests.documents import ROOT
from tests.waiting import wait_until

one_server = pytest.mark.parametrize("major", [18], indirect=True)
Work = Generator[Any, None, Any]
FAST = RetryPolicy(max_attempts=3, first=0.01, factor=1.0, jitter=False)


class Scene:
    """One bus with one transactional queue, ``books``, that writes into the table ``effects``."""

    def __init__(self, dsn: str, conn: psycopg.Connection) -> None:
        self.dsn = dsn
        self.conn = conn
        self.bus = EventBus(load({"dsn": dsn, "lease": 5, "plugins": ()}, environment={}))
        resume(conn, "eventbus")
        conn.execute("CREATE TABLE effects (event_id uuid, at int, note text)")
        self.declare("books")

    def declare(self, name: str, pattern: str = "orders.#", **options: Any) -> None:
        wanted = {"name": name, "patterns": [pattern], "tracking": "transactional"} | options
        self.conn.execute("SELECT eventbus.declare_queues(%s)", [json.dumps([wanted])])

    def subscribe(self, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        defaults: dict[str, Any] = {"name": "books", "transactional": True, "retry": FAST, "concurrency": 4}
        return self.bus.subscribe("orders.#", **(defaults | options))

    def publish(self, count: int = 1, **options: Any) -> list[str]:
        return [
            str(self.bus.outbox.publish_event("orders.created", n, conn=self.conn, autocommit=True, **options))
            for n in range(count)
        ]

    def publish_one(self, payload: Any, **options: Any) -> str:
        """Publish one event."""
        return str(self.bus.outbox.publish_event("orders.created", payload, conn=self.conn, autocommit=True, **options))

    async def run(self) -> None:
        assert await self.bus.worker(until_idle=True).run() == 0

    def query(self, statement: str, *parameters: Any) -> list[Any]:
        rows = self.conn.execute(statement.encode(), parameters or None).fetchall()
        return [row[0] if len(row) == 1 else row for row in rows]

    @property
    def effects(self) -> list[str]:
        return self.query("SELECT event_id::text FROM effects ORDER BY at")

    @property
    def completed(self) -> set[str]:
        done = "SELECT event_id::text FROM eventbus.processed_events WHERE completed_at IS NOT NULL AND owner IS NULL"
        return set(self.query(done))

    @property
    def dead(self) -> list[str]:
        return self.query("SELECT event_id::text FROM eventbus.dead_letters ORDER BY id")


@pytest.fixture
def scene(dsn: str, conn: psycopg.Connection) -> Scene:
    return Scene(dsn, conn)


def write(conn: psycopg.Connection, event: Event, note: str = "") -> None:
    conn.execute(
        "INSERT INTO effects VALUES (%s, %s, %s)",
        (event.event_id, event.payload if isinstance(event.payload, int) else 0, note),
    )


async def awrite(conn: psycopg.AsyncConnection, event: Event, note: str = "") -> None:
    await conn.execute(
        "INSERT INTO effects VALUES (%s, %s, %s)",
        (event.event_id, event.payload if isinstance(event.payload, int) else 0, note),
    )


def insert(event: Event, note: str = "") -> tuple[str, tuple[Any, ...]]:
    return "INSERT INTO effects VALUES (%s, %s, %s)", (
        event.event_id,
        event.payload if isinstance(event.payload, int) else 0,
        note,
    )


def drive(steps: Work) -> Any:
    """Carry out the steps of a plain handler."""
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        return stop.value


async def adrive(steps: Work) -> Any:
    """Carry out the steps of an async handler, and wait for what has to be waited for."""
    failure: BaseException | None = None
    try:
        while True:
            step = next(steps) if failure is None else steps.throw(failure)
            failure = None
            try:
                if inspect.isawaitable(step):
                    await step
            except psycopg.Error as error:
                failure = error
    except StopIteration as stop:
        return stop.value


async def until(condition: Callable[[], object]) -> None:
    """As ``wait_until``, on the event loop."""
    await asyncio.to_thread(wait_until, condition, 20)


def subscribe(scene: Scene, kind: str, work: Callable[[Event, Any], Work], **options: Any) -> None:
    """Subscribe a plain or an async handler made of one generator: what it yields is awaited if need be."""

    def plain(event: Event, conn: psycopg.Connection) -> Any:
        return drive(work(event, conn))

    async def awaiting(event: Event, conn: psycopg.AsyncConnection) -> Any:
        return await adrive(work(event, conn))

    scene.subscribe(**options)(awaiting if kind == "async" else plain)


class Meeting:
    """A place where so many handlers of one kind wait for each other."""

    def __init__(self, parties: int, kind: str) -> None:
        self._threads = threading.Barrier(parties)
        self._tasks = asyncio.Barrier(parties)
        self._kind = kind

    def wait(self) -> Any:
        if self._kind == "async":
            return asyncio.wait_for(self._tasks.wait(), 10)
        return self._threads.wait(10)


each_kind = pytest.mark.parametrize("kind", ["plain", "async"])

# Together or not at all


@each_kind
async def test_effects_completion_and_follow_up_events_are_there_together(scene: Scene, kind: str) -> None:
    def work(event: Event, conn: Any) -> Work:
        yield conn.execute(*insert(event))
        outbox = scene.bus.outbox
        yield (outbox.apublish_event if kind == "async" else outbox.publish_event)("booked", str(event.event_id))
        if event.payload == 1 and event.attempt < 3:
            raise ValueError("not yet")

    subscribe(scene, kind, work)
    ids = scene.publish(3)
    await scene.run()
    assert sorted(scene.effects) == sorted(ids)
    assert scene.completed == set(ids)
    assert sorted(scene.query("SELECT payload #>> '{}' FROM eventbus.outbox WHERE topic = 'booked'")) == sorted(ids)
    assert scene.query("SELECT count(*) FROM eventbus.exceptions") == [0]


@one_server
@each_kind
async def test_a_result_that_is_not_done_leaves_no_effects_and_a_discarded_event_keeps_them(
    scene: Scene, kind: str
) -> None:
    def work(event: Event, conn: Any) -> Work:
        yield conn.execute(*insert(event))
        return [Discard("enough"), DeadLetter("no"), Retry(0.01) if event.attempt == 1 else None][event.payload]

    subscribe(scene, kind, work)
    ids = scene.publish(3)
    await scene.run()
    assert scene.effects == [ids[0], ids[2]]
    assert scene.dead == [ids[1]]
    assert scene.completed == {ids[0], ids[2]}


@one_server
async def test_an_event_that_was_published_twice_takes_effect_once(scene: Scene) -> None:
    together = threading.Barrier(2)
    calls = []

    @scene.subscribe(retry=RetryPolicy(max_attempts=1))
    def book(event: Event, conn: psycopg.Connection) -> None:
        write(conn, event)
        calls.append(event.event_id)
        if event.payload == "a":
            together.wait(10)

    twice = uuid.uuid4()
    for payload in ("a", "a", "b"):
        scene.publish_one(payload, event_id=twice if payload == "a" else None)
    await scene.run()
    assert calls.count(twice) == 2
    assert sorted(Counter(scene.effects).values()) == [1, 1]
    scene.publish_one("c", event_id=twice)
    await scene.run()
    assert calls.count(twice) == 2
    assert scene.dead == []
    assert scene.query("SELECT count(*) FROM eventbus.exceptions") == [0]


@one_server
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_second_copy_in_a_batch_does_not_make_its_neighbours_run_again(
    scene: Scene, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def plain(events: list[Event], conn: psycopg.Connection) -> None:
        calls.append(len(events))
        for event in events:
            write(conn, event)

    async def on_the_loop(events: list[Event], conn: psycopg.AsyncConnection) -> None:
        calls.append(len(events))
        for event in events:
            await awrite(conn, event)

    scene.subscribe(batch=3, batch_wait=1.0)(plain if kind == "plain" else on_the_loop)
    twice = uuid.uuid4()
    ids = [scene.publish_one(n, event_id=each) for n, each in enumerate((twice, twice, None))]
    await scene.run()
    assert calls == [2]
    assert sorted(scene.effects) == sorted(set(ids))
    assert scene.completed == set(ids)
    assert "batch" not in caplog.text


# What handlers should not do

MISUSES: dict[str, tuple[Sequence[str], str]] = {
    "commit": ([".commit"], "commit"),
    "rollback": ([".rollback"], "rollback"),
    "COMMIT": (["COMMIT"], "the handler ended the transaction"),
    "ROLLBACK": (["ROLLBACK"], "the handler ended the transaction"),
    "COMMIT and BEGIN": (["COMMIT", "BEGIN"], "the handler ended the transaction"),
    "COMMIT AND CHAIN": (["COMMIT AND CHAIN"], "the handler ended the transaction"),
    "RESET ALL": (["RESET ALL"], "the handler ended the transaction"),
    "aborted": (["!SELECT 1/0"], "left its transaction aborted"),
    "closed": ([".close"], "closed the connection"),
    "READ ONLY": (["SET TRANSACTION READ ONLY"], "made its transaction read-only"),
    "a pipeline": (["pipeline"], "pipeline"),
    "a transaction block": (["transaction"], "nesting level"),
}


@one_server
@each_kind
@pytest.mark.parametrize("misuse", MISUSES)
async def test_a_handler_that_breaks_its_transaction_has_failed_and_harms_nobody_else(
    scene: Scene, kind: str, misuse: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps, message = MISUSES[misuse]
    left_open = []

    def work(event: Event, conn: Any) -> Work:
        if event.payload != 1:
            yield conn.execute(*insert(event))
            return
        for step in steps:
            if step.startswith("."):
                yield getattr(conn, step[1:])()
            elif step in ("pipeline", "transaction"):
                block = getattr(conn, step)()
                left_open.append(block)
                yield block.__aenter__() if kind == "async" else block.__enter__()
            elif step.startswith("!"):
                with suppress(psycopg.Error):
                    yield conn.execute(step[1:])
            else:
                yield conn.execute(step)

    subscribe(scene, kind, work, concurrency=1, retry=RetryPolicy(max_attempts=2, first=0.01, jitter=False))
    ids = scene.publish(3)
    await scene.run()
    assert sorted(scene.effects) == sorted([ids[0], ids[2]])
    assert scene.completed == {ids[0], ids[2]}
    assert scene.dead == [ids[1]]
    assert message in scene.query("SELECT last_error->>'message' FROM eventbus.dead_letters")[0]
    assert scene.query("SELECT attempts FROM eventbus.dead_letters") == [2]
    assert "database trouble" not in caplog.text


LEFTOVERS = """
SET search_path = nowhere; SET lock_timeout = '1ms'; SET idle_in_transaction_session_timeout = '1min';
SET synchronous_commit = off; SET TIME ZONE 'Pacific/Niue'; SET session_replication_role = replica;
SET default_transaction_isolation = serializable; SET default_transaction_read_only = on; SET my.setting = 'x';
SET statement_timeout = '1s'; SET ROLE pg_monitor
"""
STATE = """
SELECT pg_backend_pid(), current_user, current_setting('search_path'), current_setting('statement_timeout'),
    current_setting('lock_timeout'), current_setting('synchronous_commit'), current_setting('TimeZone'),
    current_setting('session_replication_role'), current_setting('transaction_isolation'),
    current_setting('transaction_read_only'), coalesce(current_setting('my.setting', true), ''),
    current_setting('idle_in_transaction_session_timeout'),
    (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),
    (SELECT count(*) FROM pg_listening_channels()), (SELECT count(*) FROM pg_cursors),
    (SELECT count(*) FROM pg_prepared_statements WHERE from_sql), to_regclass('pg_temp.mine')
"""


@each_kind
@pytest.mark.parametrize("end", ["done", "failed"])
async def test_nothing_that_a_handler_does_to_its_session_reaches_the_next_one(
    scene: Scene, kind: str, end: str
) -> None:
    states: dict[int, Any] = {}
    left: list[int] = []

    def work(event: Event, conn: Any) -> Work:
        if event.payload == 1 and event.attempt == 1:
            for statement in (
                "CREATE TEMP TABLE mine ()",
                "SELECT pg_advisory_lock(1), pg_advisory_lock_shared(2)",
                "LISTEN somebody",
                "DECLARE rows CURSOR WITH HOLD FOR SELECT 1",
                "PREPARE mine AS SELECT 1",
                LEFTOVERS,
            ):
                yield conn.execute(statement)
            conn.row_factory = dict_row
            conn.prepare_threshold = None
            left.append(event.attempt)
            if end == "failed":
                raise ValueError("on purpose")
            return
        cursor = conn.execute(STATE)
        if inspect.isawaitable(cursor):
            task = asyncio.ensure_future(cursor)
            yield task
            cursor = task.result()
            task = asyncio.ensure_future(cursor.fetchone())
            yield task
            states[event.payload] = task.result()
        else:
            states[event.payload] = cursor.fetchone()
        yield conn.execute(*insert(event))

    subscribe(scene, kind, work, concurrency=1)
    ids = scene.publish(3)
    await scene.run()
    assert scene.completed == set(ids)
    assert left == [1]
    assert states[0] == states[2]
    assert (1 in states) == (end == "failed"), "its own completion was disturbed"
    assert states[0] == states.get(1, states[0])


@one_server
@each_kind
async def test_an_event_is_completed_synchronously_and_as_the_bus_whatever_the_handler_has_set(
    scene: Scene, kind: str
) -> None:
    scene.conn.execute("CREATE TABLE commits (setting text)")
    scene.conn.execute(
        """
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO public.commits VALUES (concat_ws(' ', current_setting('synchronous_commit'), current_user,
                current_setting('statement_timeout'), current_setting('lock_timeout'))); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER note AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION note();
        """
    )

    def work(event: Event, conn: Any) -> Work:
        yield conn.execute(*insert(event))
        yield conn.execute("SET synchronous_commit = off; SET statement_timeout = '1s'; SET lock_timeout = '1s'")
        yield conn.execute("SET ROLE pg_monitor")

    subscribe(scene, kind, work)
    scene.publish()
    await scene.run()
    assert scene.query("SELECT setting FROM commits") == ["on postgres 0 5s"]
    assert scene.query("SELECT count(*) FROM eventbus.exceptions") == [0]


@one_server
@each_kind
async def test_a_constraint_that_fails_at_the_commit_is_a_failed_attempt(scene: Scene, kind: str) -> None:
    scene.conn.execute("ALTER TABLE effects ADD UNIQUE (at) DEFERRABLE INITIALLY DEFERRED")
    scene.conn.execute("INSERT INTO effects VALUES (NULL, 1)")

    def work(event: Event, conn: Any) -> Work:
        yield conn.execute(*insert(event))

    subscribe(scene, kind, work)
    ids = scene.publish(3)
    await scene.run()
    assert scene.completed == {ids[0], ids[2]}
    assert scene.dead == [ids[1]]
    assert scene.query("SELECT attempts FROM eventbus.dead_letters") == [3]
    assert "duplicate key" in scene.query("SELECT last_error->>'message' FROM eventbus.dead_letters")[0]


# Conflicts between transactions


@one_server
@each_kind
async def test_serializable_handlers_do_not_fail_because_of_each_others_bookkeeping(scene: Scene, kind: str) -> None:
    calls: list[int] = []
    together = Meeting(4, kind)

    def work(event: Event, conn: Any) -> Work:
        calls.append(event.attempt)
        yield conn.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        yield conn.execute(*insert(event))
        publish = scene.bus.outbox.apublish_event if kind == "async" else scene.bus.outbox.publish_event
        yield publish("booked", 1)
        yield together.wait()
        if event.attempt < 4:
            raise ValueError("first as part of a claim, then as exceptions")

    subscribe(scene, kind, work, retry=RetryPolicy(max_attempts=4, first=0.2, factor=1, jitter=False))
    ids = scene.publish(20)
    await scene.run()
    assert scene.completed == set(ids)
    assert sorted(scene.effects) == sorted(ids)
    assert Counter(calls) == {1: 20, 2: 20, 3: 20, 4: 20}, "one of them was run again because of the bus"


@one_server
@each_kind
async def test_a_conflict_with_another_transaction_costs_no_attempt(scene: Scene, kind: str) -> None:
    attempts: list[int] = []
    together = Meeting(2, kind)

    def work(event: Event, conn: Any) -> Work:
        attempts.append(event.attempt)
        yield conn.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        yield conn.execute("SELECT count(*) FROM effects")
        yield conn.execute(*insert(event))
        if len(attempts) <= 2:
            yield together.wait()

    subscribe(scene, kind, work, retry=RetryPolicy(max_attempts=1))
    ids = scene.publish(2)
    await scene.run()
    assert scene.completed == set(ids)
    assert len(attempts) == 3
    assert set(attempts) == {1}
    assert sorted(scene.effects) == sorted(ids)


class Wrapped(Exception):
    """What a library makes of an error of the driver."""


@one_server
@each_kind
@pytest.mark.parametrize("error", [psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected])
async def test_an_event_that_conflicts_again_and_again_waits_and_keeps_its_attempts(
    scene: Scene, kind: str, error: type[psycopg.Error]
) -> None:
    attempts: list[int] = []
    waited: list[int] = []

    def work(event: Event, conn: Any) -> Work:
        attempts.append(event.attempt)
        waited.extend(scene.query("SELECT count(*) FROM eventbus.exceptions"))
        yield conn.execute(*insert(event))
        if len(attempts) <= 5:
            raise Wrapped("something went wrong") from error("on purpose")

    subscribe(scene, kind, work, retry=RetryPolicy(max_attempts=1))
    ids = scene.publish()
    await scene.run()
    assert scene.effects == ids
    assert attempts == [1] * 6
    assert waited == [0] * 4 + [1] * 2


# Connections that break


@each_kind
async def test_a_lost_connection_costs_no_attempt_and_is_two_lines_in_the_log(
    scene: Scene, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "eventbus")
    calls: list[int] = []

    def work(event: Event, conn: Any) -> Work:
        calls.append(event.attempt)
        yield conn.execute(*insert(event))
        if len(calls) <= 2:
            scene.conn.execute("SELECT pg_terminate_backend(%s)", [conn.info.backend_pid])
            try:
                yield conn.execute("SELECT 1")
            except psycopg.Error:
                raise RuntimeError("the handler's own error says nothing of the connection") from None

    subscribe(scene, kind, work, retry=RetryPolicy(max_attempts=1), concurrency=1)
    ids = scene.publish()
    await scene.run()
    assert scene.effects == ids
    assert calls == [1, 1, 1]
    assert caplog.text.count("database trouble") == caplog.text.count("the database is back") == 2


@one_server
@each_kind
async def test_an_event_that_breaks_its_connection_each_time_ends_as_a_dead_letter(scene: Scene, kind: str) -> None:
    def work(event: Event, conn: Any) -> Work:
        scene.conn.execute("SELECT pg_terminate_backend(%s)", [conn.info.backend_pid])
        yield conn.execute("SELECT 1")

    subscribe(scene, kind, work, retry=RetryPolicy(max_attempts=1))
    ids = scene.publish()
    await scene.run()
    assert scene.dead == ids


@each_kind
@pytest.mark.parametrize("attempt", [1, 2], ids=["of a claim", "of an exception"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_whose_answer_is_lost_is_neither_lost_nor_repeated(
    scene: Scene, kind: str, attempt: int, when: Any
) -> None:
    calls: list[int] = []
    with Wire(scene.dsn) as wire:
        scene.bus = EventBus(load({"dsn": wire.dsn, "lease": 5, "plugins": ()}, environment={}))

        def work(event: Event, conn: Any) -> Work:
            calls.append(event.attempt)
            yield conn.execute(*insert(event))
            if event.attempt < attempt:
                raise ValueError("not yet")
            if len(calls) == attempt:
                wire.cut_next(when)

        subscribe(scene, kind, work)
        ids = scene.publish()
        await scene.run()
    assert wire.cuts == 1
    assert scene.effects == ids
    assert scene.completed == set(ids)
    again = [attempt] if when == "before" else []
    assert calls == [*range(1, attempt + 1), *again]
    assert scene.query("SELECT count(*) FROM eventbus.exceptions") == [0]


@one_server
@each_kind
async def test_while_no_connection_can_be_made_nothing_counts_as_an_attempt(
    scene: Scene, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "eventbus")
    attempts: list[int] = []
    with Wire(scene.dsn) as wire:
        scene.bus = EventBus(load({"dsn": wire.dsn, "lease": 5, "plugins": ()}, environment={}))

        def work(event: Event, conn: Any) -> Work:
            attempts.append(event.attempt)
            yield conn.execute(*insert(event))
            if len(attempts) == 1:
                wire.refusing = True
                scene.conn.execute("SELECT pg_terminate_backend(%s)", [conn.info.backend_pid])

        subscribe(scene, kind, work, retry=RetryPolicy(max_attempts=1))
        ids = scene.publish()
        running = asyncio.create_task(scene.run())
        await until(lambda: wire.refusals >= 2)
        wire.refusing = False
        await running
    assert scene.effects == ids
    assert attempts == [1, 1]
    assert caplog.text.count("database trouble") == caplog.text.count("the database is back") == 1


@one_server
@each_kind
@pytest.mark.parametrize(("limit", "shown"), [(None, "3605s"), (2.5, "7500ms")])
async def test_a_handler_may_rest_for_as_long_as_its_timeout_and_a_lease(
    scene: Scene, kind: str, limit: float | None, shown: str
) -> None:
    def work(event: Event, conn: Any) -> Work:
        yield conn.execute("CREATE TABLE found AS SELECT current_setting('idle_in_transaction_session_timeout')")

    subscribe(scene, kind, work, timeout=limit)
    scene.publish()
    await scene.run()
    assert scene.query("SELECT * FROM found") == [shown]


@one_server
@each_kind
async def test_a_handler_that_rests_for_longer_loses_its_transaction_and_has_failed(
    scene: Scene, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(station, "_LONGEST_SILENCE", -4.9)

    def work(event: Event, conn: Any) -> Work:
        yield conn.execute(*insert(event))
        gone = functools.partial(is_gone, scene, conn.info.backend_pid)
        if kind == "async":
            yield until(gone)
        else:
            wait_until(gone)
        yield conn.execute("SELECT 1")

    subscribe(scene, kind, work, retry=RetryPolicy(max_attempts=1))
    ids = scene.publish()
    await scene.run()
    assert scene.effects == []
    assert scene.dead == ids
    assert "idle-in-transaction timeout" in scene.query("SELECT last_error->>'message' FROM eventbus.dead_letters")[0]


def is_gone(scene: Scene, pid: int) -> bool:
    return not scene.query("SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid)


@each_kind
async def test_a_role_with_the_rights_of_a_consumer_is_enough(scene: Scene, kind: str, run: str) -> None:
    role = f"eventbus_test_{run}_{uuid.uuid4().hex[:8]}"
    scene.conn.execute(f"CREATE ROLE {role}")
    try:
        for grant in (*grants(CONSUME, "eventbus", role), f"GRANT INSERT ON effects TO {role}"):
            scene.conn.execute(grant.encode())
        dsn = make_conninfo(scene.dsn, options=f"-c role={role}")
        scene.bus = EventBus(load({"dsn": dsn, "lease": 5, "plugins": ()}, environment={}))

        def work(event: Event, conn: Any) -> Work:
            yield conn.execute(*insert(event, str(conn.info.parameter_status("is_superuser"))))
            if event.attempt == 1:
                raise ValueError("the next one is an exception")

        subscribe(scene, kind, work)
        ids = scene.publish(2)
        await scene.run()
        assert scene.completed == set(ids)
        assert scene.query("SELECT DISTINCT note FROM effects") == ["off"]
    finally:
        scene.conn.execute(f"DROP OWNED BY {role}")
        scene.conn.execute(f"DROP ROLE {role}")


# Workers that die, or freeze

FALLS = [(kind, point) for point in ("handler", "complete", "commit") for kind in ("plain", "async")]


@contextmanager
def fallen(scene: Scene, kind: str, point: str, number: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process of its own, once it has died or is frozen at this point."""
    arguments = [sys.executable, "-m", "tests.postgres.mortals", scene.dsn, kind, point, number]
    with subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.DEVNULL) as child:
        try:
            state = psutil.STATUS_ZOMBIE if number == "SIGKILL" else psutil.STATUS_STOPPED
            wait_until(lambda: psutil.Process(child.pid).status() == state, 20)
            yield child
        finally:
            child.kill()


@one_server
@pytest.mark.parametrize(("kind", "point"), FALLS)
async def test_a_worker_that_is_killed_at_any_point_leaves_every_effect_exactly_once(
    scene: Scene, kind: str, point: str
) -> None:
    scene.bus = EventBus(load({"dsn": scene.dsn, "lease": 1, "plugins": ()}, environment={}))
    ids = scene.publish(3)
    with fallen(scene, kind, point, "SIGKILL"):

        def work(event: Event, conn: Any) -> Work:
            yield conn.execute(*insert(event))

        subscribe(scene, kind, work)
        await scene.run()
    assert sorted(scene.effects) == sorted(ids)
    assert scene.completed == set(ids)


@one_server
@pytest.mark.parametrize(("kind", "point"), FALLS)
async def test_a_worker_that_was_frozen_commits_nothing_that_others_have_taken_over_and_goes_on(
    scene: Scene, kind: str, point: str
) -> None:
    scene.bus = EventBus(load({"dsn": scene.dsn, "lease": 1, "plugins": ()}, environment={}))
    [first] = scene.publish()
    with fallen(scene, kind, point, "SIGSTOP") as child:

        def work(event: Event, conn: Any) -> Work:
            yield conn.execute(*insert(event))

        subscribe(scene, kind, work)
        await scene.run()
        assert scene.effects == [first]
        child.send_signal(signal.SIGCONT)
        [second] = scene.publish()
        wait_until(lambda: second in scene.effects, 20)
    assert sorted(scene.effects) == sorted([first, second])
    assert scene.completed == {first, second}


# Handlers that last


@one_server
@each_kind
async def test_a_handler_that_outlasts_its_timeout_leaves_no_effects(scene: Scene, kind: str) -> None:
    def work(event: Event, conn: Any) -> Work:
        yield conn.execute(*insert(event))
        yield conn.execute("SELECT pg_sleep(0.4)")

    subscribe(scene, kind, work, timeout=0.2, retry=RetryPolicy(max_attempts=1))
    ids = scene.publish()
    await scene.run()
    assert scene.effects == []
    assert scene.dead == ids


@one_server
@each_kind
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "SERIALIZABLE"])
async def test_a_slow_handler_of_an_ordered_queue_commits_under_the_lease_that_it_was_given_meanwhile(
    scene: Scene, kind: str, isolation: str
) -> None:
    attempts: list[int] = []

    def work(event: Event, conn: Any) -> Work:
        attempts.append(event.attempt)
        yield conn.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        yield conn.execute(*insert(event))
        detached = "SELECT 1 FROM eventbus.exceptions WHERE state = 'claimed'"
        if len(attempts) == 1 and kind == "async":
            yield until(lambda: scene.query(detached))
        elif len(attempts) == 1:
            wait_until(lambda: scene.query(detached))

    scene.declare("books", kind="ordered", lanes=2)
    subscribe(scene, kind, work, ordered=True)
    ids = scene.publish(3, key="k")
    await scene.run()
    assert scene.effects == ids
    assert scene.completed == set(ids)
    assert set(attempts) == {1}
    assert len(attempts) <= 4


@one_server
@each_kind
async def test_what_a_stop_cuts_short_is_rolled_back_and_costs_no_attempt(scene: Scene, kind: str) -> None:
    scene.bus = EventBus(load({"dsn": scene.dsn, "lease": 5, "drain_timeout": 0.1}, environment={}))
    attempts: list[int] = []
    started, ended = threading.Event(), threading.Event()

    def work(event: Event, conn: Any) -> Work:
        attempts.append(event.attempt)
        yield conn.execute(*insert(event))
        started.set()
        if len(attempts) == 1:
            yield until(ended.is_set) if kind == "async" else ended.wait(20)

    subscribe(scene, kind, work)
    ids = scene.publish()
    worker = scene.bus.worker()
    running = asyncio.create_task(worker.run())
    await until(started.is_set)
    worker.stop()
    await running
    assert scene.effects == []
    ended.set()
    await scene.run()
    assert scene.effects == ids
    assert attempts == [1, 1]


# Batches


def subscribe_batch(scene: Scene, kind: str, work: Callable[[list[Event], Any], Work], **options: Any) -> None:
    def plain(events: list[Event], conn: psycopg.Connection) -> Any:
        return drive(work(events, conn))

    async def awaiting(events: list[Event], conn: psycopg.AsyncConnection) -> Any:
        return await adrive(work(events, conn))

    scene.subscribe(batch=10, batch_wait=0.05, concurrency=1, **options)(awaiting if kind == "async" else plain)


@one_server
@each_kind
async def test_a_batch_is_one_transaction(scene: Scene, kind: str) -> None:
    sizes: list[int] = []

    def work(events: list[Event], conn: Any) -> Work:
        sizes.append(len(events))
        for event in events:
            yield conn.execute(*insert(event))

    scene.conn.execute("ALTER TABLE effects ADD COLUMN xid xid8 DEFAULT pg_current_xact_id()")
    subscribe_batch(scene, kind, work)
    ids = scene.publish(20)
    await scene.run()
    assert scene.effects == ids
    assert scene.completed == set(ids)
    assert max(sizes) > 1
    assert scene.query("SELECT count(*) FROM effects GROUP BY xid ORDER BY min(at)") == sizes


@one_server
@each_kind
@pytest.mark.parametrize("how", ["raised", "returned", "twice"])
async def test_a_batch_that_fails_leaves_nothing_and_its_events_run_one_by_one(
    scene: Scene, kind: str, how: str
) -> None:
    sizes: list[int] = []

    def work(events: list[Event], conn: Any) -> Work:
        sizes.append(len(events))
        for event in events:
            yield conn.execute(*insert(event))
        bad = [event.payload == 3 for event in events]
        if how == "raised" and any(bad):
            raise ValueError("on purpose")
        if how == "returned":
            return [DeadLetter("on purpose") if each else None for each in bad]

    subscribe_batch(scene, kind, work, retry=RetryPolicy(max_attempts=1))
    ids = scene.publish(9)
    extra = scene.publish_one(9, event_id=uuid.UUID(ids[0]) if how == "twice" else None)
    await scene.run()
    good = [*ids, extra]
    if how != "twice":
        assert scene.dead == [good.pop(3)]
    assert sorted(scene.effects) == sorted(set(good))
    assert scene.completed == set(good)
    assert max(sizes) > 1


# Connections


@one_server
@each_kind
async def test_handlers_that_run_one_after_the_other_share_a_connection_and_all_are_closed_at_the_end(
    scene: Scene, kind: str
) -> None:
    pids: set[int] = set()

    def work(event: Event, conn: Any) -> Work:
        pids.add(conn.info.backend_pid)
        yield conn.execute(*insert(event))

    open_now = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'eventbus handler'"
    subscribe(scene, kind, work, concurrency=1)
    ids = scene.publish(20)
    await scene.run()
    assert len(scene.effects) == len(ids)
    assert len(pids) == 1
    wait_until(lambda: scene.query(f"{open_now} AND datname = current_database()") == [0])


def test_connections_that_nobody_needs_are_closed_except_one(dsn: str) -> None:
    now = [0.0]
    sessions: Sessions[psycopg.Connection[Any]] = Sessions(lambda: now[0])
    made = [psycopg.connect(dsn, autocommit=True) for _ in range(4)]
    for number, session in enumerate(made):
        now[0] = number
        sessions.give(session)
    now[0] = 62.5
    sessions.trim()
    assert [session.closed for session in made] == [True, True, True, False]
    now[0] = 600.0
    sessions.trim()
    assert not made[3].closed
    assert sessions.take() is made[3]
    assert sessions.take() is None
    sessions.close()
    sessions.give(made[3])
    assert made[3].closed
