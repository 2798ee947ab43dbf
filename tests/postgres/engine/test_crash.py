"""The server is killed. Publishers commit to disk; the engine's own commits are asynchronous and may be lost.

See "After a crash of the server" in docs/storage-engine.md.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import psycopg
import pytest

from eventbus.postgres.migrate import migrate
from tests.postgres.engine.driver import Engine
from tests.servers import Cluster, installed
from tests.waiting import wait_until

LAZY_DISK = {"fsync": "on", "wal_writer_delay": "10s", "bgwriter_lru_maxpages": 0, "autovacuum": "off"}
"""Little reaches the disk but what a commit asks for, so that a crash loses what it can lose."""
ROUNDS = 3
PUBLISHED_PER_ROUND = 40


class Crashing:
    """A bus on a server that can be killed; ``bus`` is a session that is new after every crash."""

    def __init__(self, cluster: Cluster, schema: str) -> None:
        self.cluster = cluster
        self._schema = schema
        self._sessions = ExitStack()
        self.bus = self._open()

    def _open(self) -> Engine:
        connection = psycopg.connect(self.cluster.dsn(), autocommit=True)
        self._sessions.callback(connection.close)
        return Engine(connection, self._schema)

    def risk_what_follows(self) -> None:
        """Begin a new page of the log: what does not fill it, and no commit asks for, will be lost."""
        self.bus.rows("SELECT pg_switch_wal()")

    def crash(self) -> Engine:
        """Kill the server and start it again; a new session."""
        self.cluster.kill()
        self.close()
        self.cluster.start()
        self.bus = self._open()
        return self.bus

    def close(self) -> None:
        self._sessions.close()


@pytest.fixture(scope="module")
def cluster(major: int, run: str) -> Iterator[Cluster]:
    programs = installed(major)
    if programs is None:
        pytest.skip(f"no programs of PostgreSQL {major} here")
    with Cluster(programs, **LAZY_DISK) as cluster:
        yield cluster


@pytest.fixture
def crashing(cluster: Cluster) -> Iterator[Crashing]:
    schema = f"bus-{uuid.uuid4().hex[:12]}"
    migrate(cluster.dsn(), schema)
    crashing = Crashing(cluster, schema)
    crashing.bus.declare(orders="#")
    crashing.bus.resolve(["orders.created"])
    yield crashing
    crashing.close()


def drain(bus: Engine) -> list[str | None]:
    """Everything that is still to be handled, as a worker gets it that takes over all others."""
    bus.relay()
    worker = bus.register()
    bus.fall_silent(*bus.column("SELECT id FROM {bus}.workers WHERE id <> %s", worker))
    bus.take_over(worker, lease=0.001, max_crashes=100)
    worker = bus.register()
    handled: list[str | None] = []
    while claim := bus.claim(worker, 1):
        handled += claim.event_ids
        assert bus.settle(claim)
    for alone in (False, True):
        while held := bus.claim_due(worker, 1, alone=alone):
            handled += [one.event_id for one in held]
            assert bus.settle_due(held, "done")
    return handled


def test_only_what_was_not_settled_for_good_is_handled_again_and_nothing_is_lost(crashing: Crashing) -> None:
    bus = crashing.bus
    events = [bus.publish() for _ in range(20)]
    bus.relay()
    worker = bus.register()
    durable = bus.claimed(worker, 1, 10)
    bus.settle(durable)
    crashing.risk_what_follows()
    lost = bus.claimed(worker, 1, 5)
    assert bus.settle(lost) == {lost.id}
    bus.claimed(worker, 1, 3)
    bus = crashing.crash()
    assert bus.value("SELECT count(*) FROM {bus}.settlements") == 1
    handled = Counter([*durable.event_ids, *lost.event_ids, *drain(bus)])
    assert handled.keys() == set(events)
    assert {event for event, times in handled.items() if times > 1} == set(lost.event_ids)


def test_what_a_lost_tick_had_relayed_is_relayed_again_and_once(crashing: Crashing) -> None:
    events = [crashing.bus.publish() for _ in range(5)]
    crashing.risk_what_follows()
    assert crashing.bus.tick(2).more
    assert crashing.bus.tick(2).more
    bus = crashing.crash()
    assert bus.delivered(1) == []
    bus.relay(2)
    assert bus.delivered(1) == events


def test_a_claim_that_a_crash_took_back_settles_nothing_of_the_claim_that_got_its_number(crashing: Crashing) -> None:
    bus = crashing.bus
    survivor, newcomer = bus.register(), bus.register()
    bus.publish()
    bus.relay()
    crashing.risk_what_follows()
    lost = bus.claimed(survivor, 1)
    bus = crashing.crash()
    again = bus.claimed(newcomer, 1)
    assert (again.id, again.event_ids) == (lost.id, lost.event_ids)
    assert bus.settle(lost) == set()
    assert bus.settle(again) == {again.id}


def test_a_claim_that_its_worker_settled_before_the_crash_but_not_on_disk_comes_back(crashing: Crashing) -> None:
    bus = crashing.bus
    worker = bus.register()
    bus.publish()
    bus.relay()
    claim = bus.claimed(worker, 1)
    crashing.risk_what_follows()
    assert bus.settle(claim) == {claim.id}
    bus = crashing.crash()
    assert bus.beat(worker, open_from=claim.id + 1) == (True, 0)
    assert bus.beat(worker, open_from=claim.id + 1) == (True, 0)
    assert bus.rows("SELECT kind, id FROM {bus}.held(%s, %s)", worker, claim.id + 1) == [("claim", claim.id)]
    assert claim.event_ids[0] in drain(bus)


class Load:
    """Publishers and a consumer that go on whatever happens to the server."""

    def __init__(self, dsn: str, schema: str) -> None:
        self.committed: list[str] = []
        self.in_doubt: list[str] = []
        self.handled: list[str | None] = []
        self.stop = threading.Event()
        self._dsn = dsn
        self._schema = schema

    def publish(self) -> None:
        self._again_and_again(self._publish_one)

    def consume(self) -> None:
        self._again_and_again(self._consume_some)

    def _again_and_again(self, call: Callable[[Engine], None]) -> None:
        while not self.stop.is_set():
            with suppress(psycopg.Error), psycopg.connect(self._dsn, autocommit=True) as connection:
                while not self.stop.is_set():
                    call(Engine(connection, self._schema))
                    self.stop.wait(0.002)

    def _publish_one(self, engine: Engine) -> None:
        published = ""
        try:
            with engine.connection.transaction():
                published = engine.publish()
        except psycopg.Error:
            self.in_doubt.append(published)
            raise
        self.committed.append(published)

    def _consume_some(self, engine: Engine) -> None:
        engine.tick(7)
        worker = engine.register()
        for _ in range(20):
            if self.stop.is_set() or not (claim := engine.claim(worker, 1, 5)):
                engine.tick(7)
            elif engine.settle(claim):
                self.handled += claim.event_ids


def test_no_committed_event_is_lost_when_backends_and_the_server_are_killed_again_and_again(crashing: Crashing) -> None:
    load = Load(crashing.cluster.dsn(), crashing.bus.schema)
    threads = [threading.Thread(target=call) for call in (load.publish, load.publish, load.consume, load.consume)]
    for thread in threads:
        thread.start()
    try:
        for number in range(ROUNDS):
            goal = len(load.committed) + PUBLISHED_PER_ROUND
            wait_until(lambda goal=goal: len(load.committed) >= goal, 60)  # type: ignore[misc]
            if number % 2:
                crashing.crash()
            else:
                os.kill(crashing.bus.pid, signal.SIGKILL)  # the server ends all others and recovers
                crashing.close()
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()
    bus = crashing.crash()
    load.handled += drain(bus)
    assert set(load.committed) - set(load.handled) == set()
    assert set(load.handled) <= {*load.committed, *load.in_doubt}
