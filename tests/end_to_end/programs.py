"""What the processes of the tests do: consume, relay, publish. Their handlers are in the module ``handlers``."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import psycopg

from eventbus.bus import EventBus
from eventbus.settings import Settings, load
from tests.end_to_end.handlers import Journal, Json, subscribe


def consume(
    journal: str, queues: Sequence[Json], settings: Json, *, until_idle: bool = False, wait: bool = True
) -> int:
    """Consume queues by what the payloads ask for. A queue is ``{name, pattern, sync?, concurrency?, retry?}`` and
    whatever ``@subscribe`` is to promise.
    """
    bus = EventBus(_settings(settings))
    for queue in queues:
        subscribe(bus, queue, Journal(journal))
    return bus.consume(until_idle=until_idle, wait=wait)


def publish_and_hang(journal: str, settings: Json, topic: str, *, commit: bool) -> None:
    """Publish inside a transaction with a business row, then hang in it, or right after its commit."""
    bus = EventBus(_settings(settings))
    assert bus.settings.dsn is not None
    with psycopg.connect(bus.settings.dsn) as connection:
        event_id = bus.outbox.publish_event(topic, {}, conn=connection)
        connection.execute("INSERT INTO business (event_id, topic) VALUES (%s, %s)", (event_id, topic))
        if commit:
            connection.commit()
        (Path(journal).parent / f"published-{os.getpid()}").touch()
        threading.Event().wait()


def relay(settings: Json) -> None:
    """Be nothing but a relay."""
    from eventbus.postgres.breaker import Breaker
    from eventbus.postgres.link import Link
    from eventbus.postgres.outage import Outage
    from eventbus.postgres.relaying import PostgresRelay
    from eventbus.postgres.statements import Statements
    from eventbus.publishing.relay import Relay

    chosen = _settings(settings)
    assert chosen.dsn is not None
    link = Link(chosen.dsn, "relay", Breaker(Outage()))
    engine = PostgresRelay(link, Statements("engine", chosen.schema_name), resume_after_restore=False)
    one = Relay(engine, batch=chosen.relay_batch, notify=True, fed=lambda _: None, random=random.random)
    asyncio.run(one.run())


def fork(journal: str, queue: Json, settings: Json, children: int) -> int:
    """Publish, fork, and publish and consume until idle in the parent and in every child at the same time."""
    bus = EventBus(_settings(settings))
    subscribe(bus, queue, Journal(journal))
    _publish_here(bus)
    pids = []
    for _ in range(children):
        pid = os.fork()
        if pid == 0:
            _publish_here(bus)
            os._exit(bus.consume(until_idle=True))
        pids.append(pid)
    _publish_here(bus)
    mine = bus.consume(until_idle=True)
    return mine or max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def _publish_here(bus: EventBus) -> None:
    assert bus.settings.dsn is not None
    with psycopg.connect(bus.settings.dsn) as connection:
        event_id = bus.outbox.publish_event("a", {}, conn=connection)
        connection.execute("INSERT INTO business (event_id, topic) VALUES (%s, 'a')", (event_id,))


def _settings(given: Json) -> Settings:
    return load(dict(given), environment={}, folder=Path("/"))
