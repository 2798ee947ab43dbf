"""Each hook is called when the documentation says, and what it answers has the effect that it promises."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

import psycopg
import pytest

from eventbus.consuming.reporting import Reporter
from eventbus.consuming.subscriptions import Subscription
from eventbus.errors import ConfigurationError, PublishVetoed
from eventbus.event import Event, OutboxEvent
from eventbus.hookspecs import Around, AsyncAround
from eventbus.plugins import (
    Answer,
    Call,
    Counted,
    Duty,
    Failure,
    Migration,
    Page,
    Postpone,
    QueueFacts,
    Result,
    Settled,
    WorkerHandle,
    hookimpl,
)
from eventbus.plugins.registry import Plugins
from eventbus.postgres.migrate import migrate
from eventbus.runtime.worker import Parts
from eventbus.settings import Settings
from eventbus.station import Station
from tests.end_to_end.stage import Stage, eventually, seen

pytestmark = [pytest.mark.usefixtures("major"), pytest.mark.parametrize("major", [18], indirect=True)]


class Diary:
    """Writes down what happens in a worker's life."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    @hookimpl
    def eventbus_worker_starting(self, worker: WorkerHandle) -> None:
        self.entries.append("starting")

    @hookimpl
    async def eventbus_worker_ready(self, worker: WorkerHandle) -> None:
        await asyncio.sleep(0)
        live = await worker.rows("SELECT id FROM {schema}.workers WHERE state = 'live'")
        self.entries.append(("ready", [row[0] for row in live] == [worker.worker_id], sorted(worker.queues)))

    @hookimpl
    def eventbus_worker_draining(self, worker: WorkerHandle) -> None:
        self.entries.append("draining")

    @hookimpl
    async def eventbus_worker_stopped(self, worker: WorkerHandle, code: int) -> None:
        self.entries.append(("stopped", code, await worker.rows("SELECT 1")))


@pytest.mark.hook(
    "eventbus_worker_starting", "eventbus_worker_ready", "eventbus_worker_draining", "eventbus_worker_stopped"
)
async def test_the_life_of_a_worker_is_told_in_its_order_with_the_database_at_hand(dsn: str) -> None:
    diary = Diary()
    stage = Stage(dsn, diary)
    stage.subscribe(seen)
    assert await stage.until_idle() == 0
    assert diary.entries == ["starting", ("ready", True, ["ledger"]), "draining", ("stopped", 0, [(1,)])]


class Slow:
    @hookimpl
    async def eventbus_worker_ready(self) -> None:
        await asyncio.sleep(3_600)


@pytest.mark.slow
async def test_a_hook_that_never_ends_keeps_a_worker_for_five_seconds_and_no_longer(dsn: str) -> None:
    stage = Stage(dsn, Slow())
    stage.subscribe(seen)
    assert await stage.until_idle() == 0


class Publishing:
    """Marks events, refuses some, and writes down what surrounds them."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    @hookimpl
    @contextmanager
    def eventbus_around_publish(self, events: Sequence[OutboxEvent]) -> Iterator[None]:
        self.entries.append("begins")
        try:
            yield
        finally:
            self.entries.append(f"ends {len(events)}")

    @hookimpl
    def eventbus_veto_publish(self, event: OutboxEvent) -> str | None:
        self.entries.append(f"asked {event.topic} {event.event_id is not None}")
        return "is closed" if event.topic == "closed" else None

    @hookimpl
    def eventbus_amend_headers(self, event: OutboxEvent, headers: dict[str, str]) -> None:
        self.entries.append("amends")
        headers["seen-by"] = event.topic


@pytest.mark.hook("eventbus_around_publish", "eventbus_amend_headers")
async def test_what_is_published_is_surrounded_and_marked(dsn: str) -> None:
    plugin, headers = Publishing(), []
    stage = Stage(dsn, plugin)

    async def handle(event: Event) -> None:
        headers.append(event.headers["seen-by"])

    stage.subscribe(handle)
    stage.publish("a")
    assert (plugin.entries[0], plugin.entries[-1]) == ("begins", "ends 1")
    assert "amends" in plugin.entries
    stage.publish("b", "c")
    assert await stage.until_idle() == 0
    assert sorted(headers) == ["a", "b", "c"]


@pytest.mark.hook("eventbus_veto_publish")
async def test_a_refused_event_is_not_published_nor_what_is_published_with_it(dsn: str) -> None:
    plugin = Publishing()
    stage = Stage(dsn, plugin)
    with pytest.raises(PublishVetoed, match="plugin publishing refuses to publish on closed: is closed"):
        stage.publish("open", "closed")
    assert stage.query("SELECT count(*) FROM eventbus.outbox") == [(0,)]
    assert "asked closed True" in plugin.entries
    assert plugin.entries[-1] == "ends 2"


class Gate:
    """Lets one event through at a time."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.claimed: list[tuple[str, int]] = []
        self.relayed: dict[str, int] = {}

    @hookimpl
    def eventbus_limit_claim(self, queue: str, room: int, held: int) -> int:
        self.asked.append((queue, room, held))
        return 1

    @hookimpl
    def eventbus_claimed(self, queue: str, count: int) -> None:
        self.claimed.append((queue, count))

    @hookimpl
    def eventbus_relayed(self, deliveries: Mapping[str, int]) -> None:
        for queue, count in deliveries.items():
            self.relayed[queue] = self.relayed.get(queue, 0) + count


@pytest.mark.hook("eventbus_limit_claim", "eventbus_claimed", "eventbus_relayed")
async def test_a_claim_is_as_small_as_a_plugin_says_and_everything_is_handled(dsn: str) -> None:
    gate, handled = Gate(), []
    stage = Stage(dsn, gate)

    async def handle(event: Event) -> None:
        handled.append(event.topic)

    stage.subscribe(handle)
    await stage.until_idle()
    gate.relayed.clear()
    stage.publish(*"abcde")
    assert await stage.until_idle() == 0
    assert sorted(handled) == ["a", "b", "c", "d", "e"]
    assert [count for _, count in gate.claimed] == [1] * 5
    assert gate.relayed == {"ledger": 5}
    assert all(queue == "ledger" and room >= 1 and held >= 0 for queue, room, held in gate.asked)


async def test_a_claim_that_a_plugin_forbids_happens_when_it_wakes_the_queue(dsn: str) -> None:
    handled = asyncio.Event()

    class Closed:
        def __init__(self) -> None:
            self.open = False
            self.worker: WorkerHandle | None = None

        @hookimpl
        def eventbus_worker_ready(self, worker: WorkerHandle) -> None:
            self.worker = worker

        @hookimpl
        def eventbus_limit_claim(self) -> int | None:
            return None if self.open else 0

    closed = Closed()
    stage = Stage(dsn, closed)

    async def handle(event: Event) -> None:
        handled.set()

    stage.subscribe(handle)
    stage.publish("a")
    async with stage.working():
        await eventually(lambda: closed.worker is not None)
        await eventually(lambda: stage.query("SELECT 1 FROM eventbus.deliveries"))
        assert not handled.is_set()
        closed.open = True
        assert closed.worker is not None
        closed.worker.wake("ledger")
        await asyncio.wait_for(handled.wait(), 20)


class Surrounding:
    """Writes down who is called where."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    @hookimpl
    def eventbus_around_handler(self, queue: QueueFacts) -> Around:
        @contextmanager
        def around(call: Call) -> Iterator[None]:
            self.entries.append(("in", queue.name, call.event.topic, threading.get_ident()))
            try:
                yield
            except ValueError as error:
                self.entries.append(("failed", str(error)))
                raise
            else:
                self.entries.append(("out", [type(outcome).__name__ for outcome in call.outcomes]))

        return around

    @hookimpl
    def eventbus_around_async_handler(self, queue: QueueFacts) -> AsyncAround:
        @asynccontextmanager
        async def around(call: Call) -> AsyncIterator[None]:
            self.entries.append("async in")
            await asyncio.sleep(0)
            yield
            self.entries.append("async out")

        return around


@pytest.mark.hook("eventbus_around_handler")
async def test_a_plain_handler_is_surrounded_in_its_own_thread(dsn: str) -> None:
    plugin, threads = Surrounding(), []
    stage = Stage(dsn, plugin)

    def handle(event: Event) -> None:
        threads.append(threading.get_ident())

    stage.subscribe(handle)
    stage.publish("a")
    assert await stage.until_idle() == 0
    assert plugin.entries == [("in", "ledger", "a", threads[0]), ("out", ["Done"])]
    assert threads[0] != threading.get_ident()


@pytest.mark.hook("eventbus_around_async_handler")
async def test_an_async_handler_is_surrounded_by_both_and_its_failure_is_seen(dsn: str) -> None:
    plugin = Surrounding()
    stage = Stage(dsn, plugin)

    async def handle(event: Event) -> None:
        plugin.entries.append("handles")
        if event.topic == "bad":
            raise ValueError("no such order")

    stage.subscribe(handle)
    stage.publish("a")
    await stage.until_idle()
    here = threading.get_ident()
    assert plugin.entries == [("in", "ledger", "a", here), "async in", "handles", "async out", ("out", ["Done"])]
    plugin.entries.clear()
    stage.publish("bad")
    await stage.until_idle()
    assert plugin.entries.count(("failed", "no such order")) == 2


class Patient:
    """Postpones the first failure of each event."""

    def __init__(self) -> None:
        self.failures: list[tuple[str, str, str, int]] = []

    @hookimpl
    def eventbus_handler_failed(self, queue: str, failure: Failure) -> Postpone | None:
        self.failures.append((queue, repr(failure.error), failure.outcome, failure.event.attempt))
        return Postpone(0.01) if len(self.failures) == 1 else None


@pytest.mark.hook("eventbus_handler_failed")
async def test_a_failure_that_a_plugin_postpones_burns_no_attempt(dsn: str) -> None:
    plugin, attempts = Patient(), []
    stage = Stage(dsn, plugin)

    async def handle(event: Event) -> None:
        attempts.append(event.attempt)
        if len(attempts) < 3:
            raise ValueError("busy")

    stage.subscribe(handle)
    stage.publish("a")
    assert await stage.until_idle() == 0
    assert attempts == [1, 1, 2]
    assert plugin.failures == [("ledger", "ValueError('busy')", "retry", 1)] * 2
    assert stage.query("SELECT count(*) FROM eventbus.dead_letters") == [(0,)]


class Counting:
    """Adds up outcomes."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.dead: list[tuple[str, int, str | None]] = []

    @hookimpl
    def eventbus_settled(self, queue: str, settled: Settled) -> None:
        assert queue == settled.queue == "ledger"
        for outcome, count in settled.counts.items():
            self.counts[outcome] = self.counts.get(outcome, 0) + count
        if settled.has_failures:
            for result in settled.results:
                if result.outcome == "dead" and result.event is not None:
                    self.dead.append(
                        (result.event.topic, result.attempt, str(result.error and result.error["message"]))
                    )


@pytest.mark.hook("eventbus_settled")
async def test_what_came_of_each_delivery_is_told_once_it_is_stored(dsn: str) -> None:
    plugin = Counting()
    stage = Stage(dsn, plugin)

    async def handle(event: Event) -> None:
        if event.topic == "bad":
            raise ValueError("no such order")

    stage.subscribe(handle)
    stage.publish("a", "b", "bad")
    assert await stage.until_idle() == 0
    assert {name: count for name, count in plugin.counts.items() if count} == {"done": 2, "retry": 1, "dead": 1}
    assert plugin.dead == [("bad", 2, "no such order")]


class Numbers:
    """Adds up numbers."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.calls = self.failures = self.timed = self.slow = 0

    @hookimpl
    def eventbus_counted(self, queue: str, counted: Counted) -> None:
        assert queue == "ledger"
        self.counts.update(counted.counts)
        self.calls += counted.calls
        self.failures += counted.failures
        self.timed += sum(timing.calls for timing in counted.timings)
        self.slow += sum(timing.seconds > 0.05 for timing in counted.timings)


@pytest.mark.hook("eventbus_counted")
@pytest.mark.parametrize("options", [{}, {"batch": 50}, {"ordered": True}, {"idempotent": True}], ids=str)
async def test_how_many_came_to_what_and_how_long_they_took_is_told_in_numbers(
    dsn: str, options: dict[str, Any]
) -> None:
    plugin = Numbers()
    stage = Stage(dsn, plugin)

    async def single(event: Event) -> None:
        if event.topic == "slow":
            await asyncio.sleep(0.06)
        if event.topic == "bad":
            raise ValueError("no such order")

    async def batch(events: list[Event]) -> None:
        for event in events:
            await single(event)

    stage.subscribe(batch if "batch" in options else single, **options)
    stage.publish(*["a"] * 999, *([] if "batch" in options else ["bad"]), *["a"] * 500)
    stage.publish("slow")
    assert await stage.until_idle() == 0
    failing = 0 if "batch" in options else 1
    assert plugin.counts == {"done": 1_500} | ({"retry": 1, "dead": 1} if failing else {})
    assert plugin.calls == plugin.timed == 1_500 + 2 * failing
    assert plugin.failures == 2 * failing
    assert plugin.slow >= 1


class Probing:
    """Pauses the queue at once, and notes what comes of the probe."""

    def __init__(self) -> None:
        self.results: list[Result] = []

    @hookimpl
    async def eventbus_worker_ready(self, worker: WorkerHandle) -> None:
        await worker.pause("ledger", "test", "to see", 0.05, probe_seconds=30.0)

    @hookimpl
    def eventbus_probed(self, queue: str, result: Result) -> None:
        assert queue == "ledger"
        self.results.append(result)


@pytest.mark.hook("eventbus_probed")
async def test_what_came_of_the_event_that_tried_a_paused_queue_is_told(dsn: str) -> None:
    plugin = Probing()
    stage = Stage(dsn, plugin)
    stage.subscribe(seen)
    stage.publish("a", "b", "c")
    assert await stage.until_idle() == 0
    [result] = plugin.results
    assert (result.outcome, result.probe, result.queue) == ("done", True, "ledger")
    assert result.event is not None
    assert result.event.topic in ("a", "b", "c")


class Crises:
    """Writes down losses and outages."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    @hookimpl
    def eventbus_lease_lost(self, queue: str, deliveries: int) -> None:
        self.entries.append(("lost", queue, deliveries))

    @hookimpl
    def eventbus_took_over(self, workers: int, deliveries: int) -> None:
        self.entries.append(("took over", workers, deliveries))

    @hookimpl
    def eventbus_outage_began(self, reason: str) -> None:
        self.entries.append(("began", bool(reason)))

    @hookimpl
    def eventbus_outage_ended(self, seconds: float) -> None:
        self.entries.append(("ended", seconds >= 0))


@pytest.mark.hook("eventbus_took_over", "eventbus_lease_lost")
async def test_what_is_lost_to_another_worker_is_told_on_both_sides(dsn: str) -> None:
    loser, winner, go_on = Crises(), Crises(), asyncio.Event()
    here, there = Stage(dsn, loser, lease=1.0), Stage(dsn, winner, lease=1.0)
    begun: list[str] = []

    async def stuck(event: Event) -> None:
        begun.append(event.topic)
        await go_on.wait()

    here.subscribe(stuck)
    there.subscribe(seen)
    here.publish("a")
    async with here.working():
        await eventually(lambda: begun)
        silence = asyncio.create_task(here.silence(lambda: winner.entries and loser.entries))
        async with there.working():
            await silence
        go_on.set()
    assert ("took over", 1, 1) in winner.entries
    assert ("lost", "ledger", 1) in loser.entries


@pytest.mark.hook("eventbus_outage_began", "eventbus_outage_ended")
async def test_an_outage_is_told_when_it_begins_and_when_it_is_over(dsn: str) -> None:
    plugin = Crises()
    stage = Stage(dsn, plugin, lease=1.0)
    stage.subscribe(seen)
    async with stage.working():
        await eventually(lambda: stage.query("SELECT 1 FROM eventbus.workers WHERE state = 'live'"))
        with stage.away():
            await eventually(lambda: ("began", True) in plugin.entries)
        await eventually(lambda: ("ended", True) in plugin.entries)
    assert [entry[0] for entry in plugin.entries if entry[0] in ("began", "ended")] == ["began", "ended"]


class Tables:
    """Has a table, and forgets what is in it."""

    def __init__(self) -> None:
        self.removed: list[int] = []

    @hookimpl
    def eventbus_migrations(self) -> Sequence[Migration]:
        return [Migration("0001_notes", "-- Notes.\nCREATE TABLE {schema}.tables_notes (n integer);")]

    @hookimpl
    def eventbus_duties(self) -> Sequence[Duty]:
        return [Duty("notes", 0.05, self._forget)]

    async def _forget(self, rows: Callable[..., Any]) -> int:
        gone = await rows("DELETE FROM {schema}.tables_notes WHERE n < %s RETURNING n", (3,))
        self.removed += [n for (n,) in gone]
        return len(gone)


@pytest.mark.hook("eventbus_migrations", "eventbus_duties")
async def test_a_plugin_has_tables_and_one_worker_keeps_them_tidy(dsn: str) -> None:
    plugin = Tables()
    stage = Stage(dsn, plugin)
    stage.subscribe(seen)
    applied = migrate(dsn, "eventbus", stage.bus.plugins.migrations())
    assert [name for name in applied if "notes" in name]
    stage.query("INSERT INTO eventbus.tables_notes SELECT generate_series(1, 4)")
    async with stage.working():
        await eventually(lambda: len(plugin.removed) == 2)
    assert stage.query("SELECT n FROM eventbus.tables_notes ORDER BY n") == [(3,), (4,)]


class Paged:
    """Has a page."""

    @hookimpl
    def eventbus_pages(self, worker: WorkerHandle) -> Sequence[Page]:
        return [Page("/notes", lambda asked: Answer(f"{asked['of']} of {sorted(worker.queues)}".encode()), "Notes")]


@pytest.mark.hook("eventbus_pages")
async def test_a_page_of_a_plugin_is_served_by_the_worker(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="eventbus")
    stage = Stage(dsn, Paged(), http_port=0)
    stage.subscribe(seen)
    async with stage.working():
        await eventually(lambda: "serving /notes on http" in caplog.text)
        [address] = {word for word in caplog.text.split() if word.startswith("http://")}
        answer = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{address}notes?of=ours").read())
    assert answer == b"ours of ['ledger']"


class Wrapped:
    """Somebody's connection, of a kind that the bus does not know."""

    def __init__(self, inner: psycopg.Connection) -> None:
        self.inner = inner


class WrappedAdapter:
    """Publishes on it."""

    def handles(self, connection: object) -> bool:
        return isinstance(connection, Wrapped)

    def in_transaction(self, connection: Wrapped) -> bool:
        return True

    def execute(self, connection: Wrapped, statements: Sequence[Any]) -> None:
        for statement in statements:
            self._run(connection, statement)

    def fetch(self, connection: Wrapped, statement: Any) -> Any:
        [row] = self._run(connection, statement).fetchall()
        return row[0]

    def _run(self, connection: Wrapped, statement: Any) -> Any:
        return psycopg.RawCursor(connection.inner).execute(statement.sql, statement.parameters)


class Adapting:
    @hookimpl
    def eventbus_connection_adapters(self) -> Sequence[Any]:
        return [WrappedAdapter()]


@pytest.mark.hook("eventbus_connection_adapters")
async def test_events_are_published_on_a_kind_of_connection_that_a_plugin_knows(dsn: str) -> None:
    stage = Stage(dsn, Adapting())
    with psycopg.connect(dsn) as connection:
        wrapped: Any = Wrapped(connection)
        stage.bus.outbox.publish_event("a", {"order": 17}, conn=wrapped)
        assert stage.query("SELECT count(*) FROM eventbus.outbox") == [(0,)]
        connection.commit()
    assert stage.query("SELECT topic FROM eventbus.outbox") == [("a",)]


class Foreign:
    """Makes workers for another kind of DSN, out of those for PostgreSQL."""

    def __init__(self, dsn: str) -> None:
        self.asked: list[str] = []
        self._dsn = dsn

    @hookimpl
    def eventbus_transport(self, scheme: str) -> Callable[..., Parts] | None:
        self.asked.append(scheme)
        return self._parts if scheme == "foreign" else None

    def _parts(self, settings: Settings, subscriptions: Sequence[Subscription]) -> Parts:
        there = settings.model_copy(update={"dsn": self._dsn})
        return Station(there, subscriptions, nullcontext, Reporter(Plugins(), self), wait=False).parts()


@pytest.mark.hook("eventbus_transport")
async def test_a_worker_for_another_kind_of_dsn_is_what_a_plugin_makes_of_it(dsn: str) -> None:
    plugin, handled = Foreign(dsn), []
    stage = Stage(dsn, plugin)
    stage.publish("a")
    stage.subscribe(lambda event: handled.append(event.topic))
    worker = stage.bus.worker(stage.bus.settings.model_copy(update={"dsn": "foreign://there"}), until_idle=True)
    assert await asyncio.wait_for(worker.run(), 60) == 0
    assert (plugin.asked, handled) == (["foreign"], ["a"])


async def test_a_kind_of_dsn_that_no_plugin_knows_is_refused(dsn: str) -> None:
    stage = Stage(dsn, Foreign(dsn))
    stage.subscribe(seen)
    with pytest.raises(ConfigurationError, match="no plugin has a transport for strange://"):
        stage.bus.worker(stage.bus.settings.model_copy(update={"dsn": "strange://there"}))
