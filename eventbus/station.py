"""Builds the parts of a worker for PostgreSQL: five connections, and what runs on each."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import psycopg

from eventbus.consuming.consumer import Consumer, Limits
from eventbus.consuming.execution import Execution
from eventbus.consuming.idempotency import Completions, execution_of
from eventbus.consuming.pace import Pace
from eventbus.consuming.queues import QueueState
from eventbus.consuming.remembering import require_remembered
from eventbus.consuming.runners import Finish, runner_for
from eventbus.consuming.subscriptions import Subscription
from eventbus.consuming.tenure import Tenure
from eventbus.errors import ConfigurationError, Unavailable
from eventbus.postgres.breaker import LONGEST_PAUSE, Breaker, Turn
from eventbus.postgres.claiming import PostgresConsumer
from eventbus.postgres.connecting import connect_blocking, conninfo
from eventbus.postgres.heartbeat import Heartbeat, Pulse, Watch
from eventbus.postgres.link import Link, describe, turned_away
from eventbus.postgres.listener import Ears, Listener
from eventbus.postgres.maintenance import Maintenance
from eventbus.postgres.migrate import require_current
from eventbus.postgres.outage import Outage
from eventbus.postgres.relaying import PostgresRelay
from eventbus.postgres.statements import Statements
from eventbus.postgres.transactions import Bind, Transactions
from eventbus.postgres.tries import Patience
from eventbus.postgres.watching import Watching
from eventbus.publishing.relay import Relay
from eventbus.runtime.worker import Parts
from eventbus.settings import Settings
from eventbus.transport import Delivery

log = logging.getLogger("eventbus")

_LONGEST_SILENCE: Final = 3600.0
"""Seconds that a transactional handler without a timeout may leave its transaction without a statement."""


class Station:
    """One worker's place in one database. ``wait``: a server that is away at the start is waited for.

    ``using`` makes a connection the one to publish on, for a block.
    """

    def __init__(self, settings: Settings, subscriptions: Sequence[Subscription], using: Bind, *, wait: bool) -> None:
        if settings.dsn is None:
            raise ConfigurationError("no database: set EVENTBUS_DSN")
        for subscription in subscriptions:
            require_remembered(subscription, settings.processed_retention)
        self._settings = settings
        self._subscriptions = subscriptions
        self._wait = wait
        self._using = using
        self._boundaries: list[Transactions] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        # so that every worker is back after an outage before one that was quicker may take it over
        self._breaker = Breaker(Outage(), longest=min(LONGEST_PAUSE, settings.lease / 4))
        self._calls = calls = Statements("engine", settings.schema_name)
        self._links = [Link(settings.dsn, name, self._breaker) for name in ("relay", "claim", "settle", "watch")]
        relaying, claiming, settling, watching = self._links
        self._watching = Watching(watching, calls)
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
        )
        self._maintenance = Maintenance(settings, calls, self._breaker, random.random)
        self._tenure = Tenure()
        self._heart = Heartbeat(settings, calls, self._breaker, self._watch())
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
            self._consumer.add(number, self._queue(subscription))

    def _require_schema(self, turn: Turn) -> None:
        """Raise when the schema is missing or does not fit this code. Blocks, but then nothing runs yet."""
        assert self._settings.dsn is not None
        try:
            with connect_blocking(turn, conninfo(self._settings.dsn, "start")) as connection:
                require_current(connection, self._settings.schema_name)
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
            completed=_knower(completions),
            boundary=self._boundary(subscription),
            tenure=self._tenure,
        )
        size = subscription.batch or 1
        pace = Pace(slots * size, max(size, self._settings.prefetch), asyncio.get_running_loop().time())
        state: QueueState
        finish: Finish = lambda delivery, verdict: self._consumer.finish(delivery, verdict, state)  # noqa: E731
        runner = runner_for(subscription, execution, slots, finish, f"eventbus-{subscription.name}")
        state = QueueState(
            subscription.name, runner, pace, completions=completions, skips=subscription.when_exhausted == "skip"
        )
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

    def _watch(self) -> Watch:
        def on_loop(action: Callable[[], None]) -> None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(action)

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
            took_over=lambda: on_loop(self._consumer.wake),
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


def _knower(completions: Completions | None) -> Callable[[Delivery], bool]:
    """Whether a delivery's event is known to be completed by another delivery."""

    def completed(delivery: Delivery) -> bool:
        if completions is None or delivery.event is None:
            return False
        return completions.has(execution_of(delivery.event), time.monotonic())

    return completed


def _tell_of(queue: QueueState) -> None:
    """Say how often remembered completions saved a second look, if they were asked at all."""
    completions = queue.completions
    if completions is not None and completions.lookups:
        log.info(
            "queue %s: %d of %d events that waited for another copy of them were known to be completed",
            queue.name, completions.hits, completions.lookups, extra={"queue": queue.name},
        )  # fmt: skip
