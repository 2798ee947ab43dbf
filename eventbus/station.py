"""Builds the parts of a worker for PostgreSQL: five connections, one for plugins, and what runs on each."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import psycopg

from eventbus import signals
from eventbus.consuming.consumer import Consumer, Limits
from eventbus.consuming.execution import Execution
from eventbus.consuming.idempotency import Completions, knower
from eventbus.consuming.pace import Pace
from eventbus.consuming.queues import QueueState
from eventbus.consuming.remembering import require_remembered
from eventbus.consuming.reporting import QueueReporter, Reporter
from eventbus.consuming.runners import Finish, runner_for
from eventbus.consuming.subscriptions import Subscription
from eventbus.consuming.surrounding import facts_of, surround_of
from eventbus.consuming.tenure import Tenure
from eventbus.errors import ConfigurationError, Unavailable
from eventbus.postgres.announcing import Announcer
from eventbus.postgres.breaker import LONGEST_PAUSE, Breaker, Turn
from eventbus.postgres.claiming import PostgresConsumer
from eventbus.postgres.connecting import connect_blocking, conninfo
from eventbus.postgres.duties import begin_duties
from eventbus.postgres.handle import Handle, PluginConnection
from eventbus.postgres.heartbeat import Heartbeat, Pulse, Watch
from eventbus.postgres.link import Link, describe, turned_away
from eventbus.postgres.listener import Ears, Listener
from eventbus.postgres.maintenance import Maintenance
from eventbus.postgres.migrate import require_current
from eventbus.postgres.relaying import PostgresRelay
from eventbus.postgres.statements import Statements
from eventbus.postgres.transactions import Bind, Transactions
from eventbus.postgres.tries import Patience
from eventbus.postgres.watching import Watching
from eventbus.publishing.relay import Relay
from eventbus.runtime.life import Background, Life
from eventbus.runtime.worker import Parts
from eventbus.settings import Settings

log = logging.getLogger("eventbus")

_LONGEST_SILENCE: Final = 3600.0
"""Seconds that a transactional handler without a timeout may leave its transaction without a statement."""


class Station:
    """One worker's place in one database. ``wait``: a server that is away at the start is waited for.

    ``using`` makes a connection the one to publish on, for a block. ``reporter`` has the plugins.
    """

    def __init__(
        self,
        settings: Settings,
        subscriptions: Sequence[Subscription],
        using: Bind,
        reporter: Reporter,
        *,
        wait: bool,
    ) -> None:
        if settings.dsn is None:
            raise ConfigurationError("no database: set EVENTBUS_DSN")
        for subscription in subscriptions:
            require_remembered(subscription, settings.processed_retention)
        self._settings = settings
        self._subscriptions = subscriptions
        self._wait = wait
        self._using = using
        self._reporter = reporter
        self._boundaries: list[Transactions] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._background = Background(reporter)
        self._announcer = Announcer(reporter, self._on_loop, self._background.begin)
        # so that every worker is back after an outage before one that was quicker may take it over
        self._breaker = Breaker(self._announcer.outage(), longest=min(LONGEST_PAUSE, settings.lease / 4))
        self._calls = calls = Statements("engine", settings.schema_name)
        self._links = [Link(settings.dsn, name, self._breaker) for name in ("relay", "claim", "settle", "watch")]
        relaying, claiming, settling, watching = self._links
        self._watching = Watching(watching, calls)
        self._announcer.end = self._watching.end_probe
        self._relay_engine = PostgresRelay(relaying, calls, resume_after_restore=settings.on_restore == "resume")
        self._engine = PostgresConsumer(claiming, settling, calls, self._watching)
        self._consumer = Consumer(
            self._engine, Limits(settings.batch, settings.prefetch_bytes, settings.settle_interval)
        )
        self._relay = Relay(
            self._relay_engine,
            batch=settings.relay_batch,
            notify=settings.notify,
            fed=self._consumer.wake,
            random=random.random,
            relayed=self._announcer.relayed,
            unrouted=lambda topic: reporter.send(signals.unrouted, topic=topic),
        )
        self._maintenance = Maintenance(settings, calls, self._breaker, random.random)
        self._tenure = Tenure()
        self._heart = Heartbeat(settings, calls, self._breaker, self._watch())
        self._plugin_connection = PluginConnection(settings, self._breaker)
        self._announcer.look_up = self._plugin_connection.names
        self._facts = {item.name: facts_of(item, settings.concurrency) for item in subscriptions}
        self._handle = Handle(
            self._facts, self._engine, self._consumer.queues, self._plugin_connection, self._background.begin
        )
        self._listening(False)

    def parts(self) -> Parts:
        """The worker's parts; nothing is connected yet."""
        ears = Ears(
            published=self._relay.wake,
            relayed=self._relay.heard,
            fed=self._consumer.wake,
            listening=self._listening,
            own_relay=lambda: None if self._settings.listen_dsn else self._links[0].backend_pid,
        )
        assert self._settings.dsn is not None
        duties = self._reporter.plugins.duties(self._settings)
        begin_duties(duties, self._handle.rows, self._background.begin, random.random)
        heard = self._settings.listen_dsn or self._settings.dsn
        # another way to the server, or to its pooler, can fail alone
        breaker = self._breaker if heard == self._settings.dsn else Breaker(self._breaker.outage)
        listener = Listener(heard, self._settings.schema_name, breaker, ears)
        return Parts(
            relay=self._relay,
            consumer=self._consumer,
            heart=self._heart,
            open=self._open,
            hear=listener.run if self._settings.notify else None,
            maintain=self._maintenance.run if any(item.tracking != "none" for item in self._subscriptions) else None,
            undone=self._watching.undone,
            leave=self._engine.unregister,
            life=Life(self._settings, self._reporter, self._handle, self._background, self._plugin_connection.close),
            close=self._close,
        )

    async def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        while True:
            try:
                await self._join()
                return
            except Unavailable:
                if not self._wait:
                    raise
                await self._links[0].recover()

    async def _join(self) -> None:
        self._require_schema(await self._breaker.turn())
        if await self._relay_engine.is_foreign():
            log.warning("this database was restored from another one: %s", await self._relay_engine.attach())
        numbers = await self._relay_engine.declare([_declaration(item) for item in self._subscriptions])
        await self._engine.register()
        for subscription in self._subscriptions:
            number = numbers[subscription.name]
            self._engine.names[number] = subscription.name
            self._engine.kinds[number] = subscription.kind
            if subscription.tracking == "idempotent":
                self._engine.idempotent.add(number)
            queue = self._queue(subscription)
            queue.probed = functools.partial(self._announcer.end_probe, number, subscription.name)
            self._consumer.add(number, queue)

    def _require_schema(self, turn: Turn) -> None:
        """Raise when the schema is missing or does not fit this code. Blocks, but then nothing runs yet."""
        assert self._settings.dsn is not None
        try:
            with connect_blocking(turn, conninfo(self._settings.dsn, "start")) as connection:
                require_current(connection, self._settings.schema_name, self._reporter.plugins.migrations())
        except psycopg.OperationalError as error:
            problem = describe(error, "connect")
            if turned_away(problem):
                raise ConfigurationError(f"the server does not let us in: {problem}") from error
            if self._wait:
                self._breaker.outage.began("start", problem)
            raise Unavailable(problem) from error
        self._breaker.outage.ended("start")

    def _queue(self, subscription: Subscription) -> QueueState:
        slots = subscription.concurrency or self._settings.concurrency
        completions = Completions() if subscription.tracking == "idempotent" else None
        execution = Execution(
            subscription,
            random.random,
            completed=knower(completions),
            boundary=self._boundary(subscription),
            tenure=self._tenure,
            surround=surround_of(self._reporter.plugins, self._facts[subscription.name]),
        )
        size = subscription.batch or 1
        pace = Pace(slots * size, max(size, self._settings.prefetch), asyncio.get_running_loop().time())
        state: QueueState
        finish: Finish = lambda delivery, verdict: self._consumer.finish(delivery, verdict, state)  # noqa: E731
        runner = runner_for(subscription, execution, slots, finish, f"eventbus-{subscription.name}")
        reporter = QueueReporter(self._reporter, subscription.name)
        execution.verdicts.later = reporter.decides
        skips = subscription.when_exhausted == "skip"
        state = QueueState(subscription.name, runner, pace, reporter, completions=completions, skips=skips)
        return state

    def _boundary(self, subscription: Subscription) -> Transactions | None:
        if not subscription.transactional:
            return None
        assert self._settings.dsn is not None
        lease = self._settings.lease
        idle = (subscription.timeout or _LONGEST_SILENCE) + lease
        statements = Statements("transactions", self._settings.schema_name)
        patience = Patience(subscription.name, idle, lease, random.random, self._tenure)
        boundary = Transactions(self._settings.dsn, statements, self._using, patience, self._breaker)
        self._boundaries.append(boundary)
        return boundary

    async def _close(self) -> None:
        for queue in self._consumer.queues.values():
            queue.runner.close()
            _tell_of(queue)
        for boundary in self._boundaries:
            boundary.close()
        for link in self._links:
            await link.close()

    def _listening(self, heard: bool) -> None:  # noqa: FBT001 - a callback with one parameter
        interval = self._settings.poll_interval if heard else self._settings.poll_interval_without_listen
        self._relay.poll_interval = interval
        self._consumer.poll_every(interval)

    def _on_loop(self, action: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    def _took_over(self, workers: int, deliveries: int) -> None:
        self._consumer.wake()
        self._announcer.took_over(workers, deliveries)

    def _watch(self) -> Watch:
        on_loop = self._on_loop

        def lost(worker_id: UUID) -> None:
            on_loop(functools.partial(self._lost, worker_id))

        def connected() -> None:
            self._engine.forget_newest_claim()
            on_loop(self._consumer.forget_completions)

        return Watch(
            pulse=self._pulse,
            connected=connected,
            renewed=self._tenure.renew,
            lost=lost,
            took_over=lambda *numbers: on_loop(functools.partial(self._took_over, *numbers)),
            routine=lambda: on_loop(self._routine),
        )

    def _routine(self) -> None:
        self._consumer.doubt()
        for boundary in self._boundaries:
            boundary.trim()

    def _pulse(self) -> Pulse:
        open_from, started = self._engine.beat_state(list(self._consumer.leases))
        return Pulse(self._engine.worker_id, open_from, started)

    def _lost(self, worker_id: UUID) -> None:
        if worker_id == self._engine.worker_id:
            self._consumer.orphan()


def _declaration(subscription: Subscription) -> Mapping[str, Any]:
    """What the engine is told of a queue."""
    return {
        "name": subscription.name,
        "patterns": subscription.patterns,
        "kind": subscription.kind,
        "lanes": subscription.priorities,
        "tracking": subscription.tracking,
        "when_exhausted": subscription.when_exhausted,
        "start": subscription.start,
    }


def _tell_of(queue: QueueState) -> None:
    """Say how often remembered completions saved a second look, if they were asked at all."""
    completions = queue.completions
    if completions is not None and completions.lookups:
        log.info(
            "queue %s: %d of %d events that waited for another copy of them were known to be completed",
            queue.name, completions.hits, completions.lookups, extra={"queue": queue.name},
        )  # fmt: skip
