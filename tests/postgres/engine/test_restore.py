"""A dump that was taken in the middle of everything is restored elsewhere: nothing lost, nothing relayed twice.

See "Restored elsewhere" in docs/storage-engine.md.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from eventbus.postgres.migrate import migrate
from tests.postgres.engine.conftest import ClusterOf
from tests.postgres.engine.driver import Engine
from tests.postgres.engine.sessions import Background, NewSession, open_transaction
from tests.servers import Cluster, installed

TRANSACTIONS = 10_000
"""How many more transactions PostgreSQL 15 has seen than 18, so that xids go down on the way up and the reverse."""


@dataclass(frozen=True, slots=True)
class Story:
    """What had happened to the events of a bus when it was copied."""

    settled: list[str]
    relayed: list[str]
    fresh: list[str]
    """Committed, and not relayed yet."""
    scheduled: str
    dead: str


class Servers:
    """One cluster per version, and databases there."""

    def __init__(self, clusters: dict[int, Cluster], stack: ExitStack) -> None:
        self._clusters = clusters
        self._stack = stack

    def empty(self, major: int) -> str:
        name = f"db{uuid.uuid4().hex[:8]}"
        self.admin(major, f"CREATE DATABASE {name}")
        return name

    def admin(self, major: int, statement: str) -> None:
        with psycopg.connect(self._clusters[major].dsn(), autocommit=True) as admin:
            admin.execute(statement.encode())

    def use_up_transactions(self, major: int, *, beyond: int) -> None:
        """See that one server's transaction numbers are well above another's."""
        here, there = self.engine(major, "postgres"), self.engine(beyond, "postgres")
        ahead = here.value("SELECT pg_current_xact_id()::text::bigint")
        missing = there.value("SELECT pg_current_xact_id()::text::bigint") + TRANSACTIONS - ahead
        here.rows(f"DO $$ BEGIN FOR i IN 1..{missing} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$")

    def engine(self, major: int, database: str) -> Engine:
        connection = psycopg.connect(self._clusters[major].dsn(database), autocommit=True)
        self._stack.callback(connection.close)
        return Engine(connection)

    def dsn(self, major: int, database: str) -> str:
        return self._clusters[major].dsn(database)


@pytest.fixture
def servers(cluster_of: ClusterOf) -> Iterator[Servers]:
    clusters = {major: cluster_of(major) for major in (15, 18)}
    with ExitStack() as stack:
        servers = Servers(clusters, stack)
        servers.use_up_transactions(15, beyond=18)
        yield servers


def live_through(servers: Servers, major: int, database: str) -> Story:
    """Leave a bus with something of every kind: settled, claimed, retried, dead, waiting, half relayed, late."""
    migrate(servers.dsn(major, database), "eventbus")
    sessions = bus, slow, slower, slowest = [servers.engine(major, database) for _ in range(4)]
    bus.declare(audit="#", orders="orders.#")
    bus.resolve(["orders.created"])
    worker = bus.register()
    early = [bus.publish(key=f"{number}") for number in range(6)]
    bus.relay()
    done = bus.claimed(worker, 1, 3)
    bus.settle(done)
    mixed = bus.claimed(worker, 1, 2)
    said = [{"seq": mixed.lo, "outcome": "retry"}, {"seq": mixed.hi, "outcome": "dead", "reason": "no use"}]
    bus.settle(mixed, outcomes={mixed.id: said})
    bus.claimed(worker, 1, 1)
    with open_transaction(slowest):
        late = [slowest.publish()]
        with open_transaction(slow), open_transaction(slower):
            late += [session.publish() for session in (slow, slower, slow, slower)]
            waiting = [bus.publish() for _ in range(3)]
            bus.relay()
            late.append(slower.publish())
        window = [bus.publish() for _ in range(6)]
        assert bus.tick(4).more  # relays two of the late ones to two queues each, and stops in the middle
    after = bus.publish()
    scheduled = str(bus.value("SELECT {bus}.publish('orders.created', '{}', delay => interval '1 hour')"))
    relayed = bus.delivered(1)
    fresh = [event for event in [*late, *window, after] if event not in relayed]
    assert len(fresh) == 6 + 6 + 1 - 2
    for session in sessions:
        session.connection.close()
    return Story(early[:3], [*early, *waiting, *(set(relayed) & set(late))], fresh, scheduled, early[4])


def copy(servers: Servers, source: tuple[int, str], target: int, dump_with: int, folder: Path) -> str:
    """Dump a database and restore it into a new one on another server; its name."""
    file, name = folder / "dump.sql", servers.empty(target)
    run(dump_with, "pg_dump", "--dbname", servers.dsn(*source), "--file", str(file))
    restore(servers.dsn(target, name), file)
    return name


def restore(dsn: str, file: Path) -> None:
    """Run a dump. One version's dump holds settings that another does not know, and that do not matter."""
    complaints = run(18, "psql", "--no-psqlrc", "--quiet", "--dbname", dsn, "--file", str(file))
    known = ("transaction_timeout", "pg_attver")  # new in 17; what late releases of 15 note down for themselves
    serious = [line for line in complaints.splitlines() if "ERROR" in line and not any(word in line for word in known)]
    assert serious == []


def run(major: int, program: str, *arguments: str) -> str:
    programs = installed(major)
    assert programs is not None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    done = subprocess.run(
        [programs.path(program), *arguments], check=True, capture_output=True, text=True, env=environment
    )
    return done.stderr


def check(bus: Engine, story: Story, published_in_the_copy: list[str]) -> None:
    """Everything is relayed once, the rest is handled once, and the new position works as the old one did."""
    bus.relay(3)
    expected = [*story.relayed, *story.fresh, *published_in_the_copy]
    for queue in (1, 2):
        assert Counter(bus.delivered(queue)) == Counter(expected)
    assert bus.value("SELECT count(*) FROM {bus}.deliveries") == 2 * len(expected)
    assert bus.column("SELECT event_id::text FROM {bus}.scheduled") == [story.scheduled]
    assert bus.column("SELECT event_id::text FROM {bus}.dead_letters") == [story.dead]
    assert Counter(handle_everything(bus)) == Counter(expected) - Counter([*story.settled, story.dead])
    straggle(bus)


def handle_everything(bus: Engine) -> list[str | None]:
    bus.fall_silent(*bus.column("SELECT id FROM {bus}.workers"))
    worker = bus.register()
    assert bus.take_over(worker, lease=0.01)[0] >= 1
    worker = bus.register()
    handled: list[str | None] = []
    while claim := bus.claim(worker, 1):
        handled += claim.event_ids
        bus.settle(claim)
    for alone in (False, True):
        while held := bus.claim_due(worker, 1, alone=alone):
            handled += [one.event_id for one in held]
            bus.settle_due(held, "done")
    return handled


def straggle(bus: Engine) -> None:
    """After all this, a transaction that is open across ticks is neither lost nor repeated, and relays are woken."""
    before = len(bus.delivered(1))
    with psycopg.connect(bus.connection.info.dsn, autocommit=True) as connection:
        late = Engine(connection)
        with open_transaction(late):
            straggler = late.publish()
            others = [bus.publish(), bus.publish()]
            bus.relay()
    bus.relay()
    assert bus.delivered(1)[before:] == [*others, straggler]
    bus.rows('LISTEN "eventbus.relay"')
    assert bus.fall_asleep() is False
    bus.publish()
    assert len(list(bus.connection.notifies(timeout=10, stop_after=1))) == 1


WAYS = [(15, 18, 15), (15, 18, 18), (18, 15, 18)]


@pytest.mark.parametrize(("source", "target", "dump_with"), WAYS, ids=lambda major: f"{major}")
def test_nothing_is_lost_or_repeated_in_a_copy_on_another_server(
    servers: Servers, source: int, target: int, dump_with: int, tmp_path: Path
) -> None:
    database = servers.empty(source)
    story = live_through(servers, source, database)
    bus = servers.engine(target, copy(servers, (source, database), target, dump_with, tmp_path))
    assert bus.tick().state == "foreign"
    published = [bus.publish(), bus.publish()]
    bus.rows(  # this server's clock is behind
        "UPDATE {bus}.outbox SET published_at = published_at - interval '1 day' WHERE event_id = %s", published[0]
    )
    assert bus.value("SELECT {bus}.is_foreign()")
    assert bus.attach() == "paused"
    assert bus.tick().state == "paused"
    assert not bus.value("SELECT {bus}.is_foreign()")
    assert bus.attach() == "attached"
    bus.rows("UPDATE {bus}.bus SET state = 'running'")
    check(bus, story, published)


@pytest.mark.parametrize("major", [15, 18], ids=["pg15", "pg18"])
def test_nothing_is_lost_or_repeated_in_a_copy_beside_the_original_and_in_the_original(
    servers: Servers, major: int
) -> None:
    database, beside = servers.empty(major), f"copy{uuid.uuid4().hex[:8]}"
    story = live_through(servers, major, database)
    servers.admin(major, f"CREATE DATABASE {beside} TEMPLATE {database}")
    bus = servers.engine(major, beside)
    assert bus.tick().state == "foreign"
    assert bus.attach(resume=True) == "resumed"
    check(bus, story, [])
    check(servers.engine(major, database), story, [])


def test_what_a_copy_publishes_under_low_ids_before_it_is_attached_is_not_taken_for_relayed(
    servers: Servers, tmp_path: Path
) -> None:
    """Restored without its sequences, the copy counts from one again, where retention has made room."""
    database = servers.empty(15)
    story = live_through(servers, 15, database)
    bus = servers.engine(18, copy(servers, (15, database), 18, 15, tmp_path))
    bus.rows("DELETE FROM {bus}.deliveries WHERE outbox_id <= 3")
    bus.rows("DELETE FROM {bus}.outbox WHERE id <= 3")
    bus.rows("SELECT setval('{bus}.outbox_id_seq', 1, false)")
    published = [bus.publish(), bus.publish()]
    assert bus.column("SELECT id FROM {bus}.outbox WHERE id < 4 ORDER BY id") == [1, 2]
    assert bus.attach(resume=True) == "resumed"
    published.append(bus.publish())
    bus.relay()
    for queue in (1, 2):
        again = bus.delivered(queue)
        assert {event: again.count(event) for event in [*story.fresh, *published]} == dict.fromkeys(
            [*story.fresh, *published], 1
        )


@pytest.mark.parametrize("major", [15, 18], ids=["pg15", "pg18"])
def test_nothing_is_lost_or_repeated_when_the_schema_is_restored_in_place(
    servers: Servers, major: int, tmp_path: Path
) -> None:
    database = servers.empty(major)
    story = live_through(servers, major, database)
    file = tmp_path / "dump.sql"
    run(18, "pg_dump", "--dbname", servers.dsn(major, database), "--schema", "eventbus", "--file", str(file))
    bus = servers.engine(major, database)
    bus.rows("DROP SCHEMA {bus} CASCADE")
    restore(servers.dsn(major, database), file)
    assert bus.attach() == "attached"
    check(bus, story, [])


def test_a_copy_in_which_nothing_is_left_to_send_is_not_paused(bus: Engine) -> None:
    bus.rows("UPDATE {bus}.ticks SET system_identifier = 0")
    assert bus.attach() == "resumed"
    event = bus.publish()
    bus.relay()
    assert bus.delivered(1) == [event]


def test_two_processes_that_attach_at_once_do_it_once(bus: Engine, background: Background, session: NewSession) -> None:
    event = bus.publish()
    bus.rows("UPDATE {bus}.ticks SET system_identifier = 0")
    first, second = session(), session()
    with first.connection.transaction():
        first.rows("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        first.rows("LOCK TABLE {bus}.outbox, {bus}.ticks IN SHARE ROW EXCLUSIVE MODE")
        waiting = background.blocked(second, second.attach)
        assert first.value("SELECT {bus}.attach(true)") == "resumed"
    assert waiting.result() == "attached"
    bus.relay()
    assert bus.delivered(1) == [event]


def test_a_publisher_in_the_middle_of_its_transaction_loses_nothing_when_the_copy_is_attached(
    bus: Engine, background: Background, session: NewSession
) -> None:
    bus.rows("UPDATE {bus}.ticks SET system_identifier = 0")
    inserts, begins, attaches = session(), session(), session()
    with open_transaction(begins):
        begins.rows("SELECT pg_current_xact_id()")
        with open_transaction(inserts):
            first = inserts.publish()
            waiting = background.blocked(attaches, attaches.attach)
        assert waiting.result() == "paused"
        second = begins.publish()
    bus.rows("UPDATE {bus}.bus SET state = 'running'")
    bus.relay()
    assert bus.delivered(1) == [first, second]
