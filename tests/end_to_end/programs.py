"""What the processes of the tests do: consume, relay, publish. Each records what really happened in a journal.

The journal is a file to which every process appends one line per happening in one write, so that it outlives the
process, the server and their connections. It is read by the module ``checker``, which knows nothing of the bus.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from eventbus import Event, RetryPolicy
from eventbus.bus import EventBus
from eventbus.settings import Settings, load

Json = Mapping[str, Any]


class Journal:
    """Appends to one file, whichever process or thread writes."""

    def __init__(self, path: str) -> None:
        self.folder = Path(path).parent
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, event: Event) -> None:
        """Record what happened to one delivery."""
        entry = {
            "what": what, "event_id": str(event.event_id), "queue": event.queue, "topic": event.topic,
            "attempt": event.attempt, "pid": os.getpid(), "at": time.time(),
        }  # fmt: skip
        os.write(self._file, (json.dumps(entry) + "\n").encode())


def consume(
    journal: str, queues: Sequence[Json], settings: Json, *, until_idle: bool = False, wait: bool = True
) -> int:
    """Consume queues, each ``{name, pattern, sync?, concurrency?, retry?}``, by what the payloads ask for."""
    bus = EventBus(_settings(settings))
    for queue in queues:
        subscribe(bus, queue, Journal(journal))
    return bus.consume(until_idle=until_idle, wait=wait)


def subscribe(bus: EventBus, queue: Json, journal: Journal) -> None:
    """Subscribe a handler that does what each payload asks for and records it."""

    async def handle(event: Event) -> None:
        journal.write("start", event)
        await _act(event.payload, event, journal)
        if follow_ups := event.payload.get("publish"):
            await _publish(bus, follow_ups)
        if "needs_its_row" in event.payload:
            await _find_row(bus, event)
        journal.write("end", event)

    def handle_in_thread(event: Event) -> None:
        journal.write("start", event)
        _act_in_thread(event.payload, event, journal)
        journal.write("end", event)

    bus.subscribe(
        queue["pattern"],
        name=queue["name"],
        concurrency=queue.get("concurrency"),
        retry=RetryPolicy(**queue["retry"]) if "retry" in queue else None,
    )(handle_in_thread if queue.get("sync") else handle)


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
    from eventbus.postgres.link import Link, Outage
    from eventbus.postgres.relaying import PostgresRelay
    from eventbus.postgres.statements import Statements
    from eventbus.publishing.relay import Relay

    chosen = _settings(settings)
    assert chosen.dsn is not None
    link = Link(chosen.dsn, "relay", Outage())
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


async def _act(wish: Json, event: Event, journal: Journal) -> None:
    _fail_or_die(wish, event)
    if "block" in wish:
        time.sleep(wish["block"])  # noqa: ASYNC251 - a handler that does what it should not
    if "exit_in" in wish:
        await _exit_in(wish["exit_in"])
    if "sleep" in wish:
        await asyncio.sleep(wish["sleep"])
    if "gate" in wish:
        await _until((journal.folder / wish["gate"]).exists, stubborn=wish.get("stubborn", False))
    _fail(event, wish.get("fail_at_end", 0))


async def _exit_in(place: str) -> None:
    """Raise SystemExit where it is not the handler itself that raises it."""
    match place:
        case "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(_exit())
        case "task":
            await asyncio.wait({asyncio.create_task(_exit())})
        case "callback":
            asyncio.get_running_loop().call_soon(sys.exit, 3)
            await asyncio.sleep(0.01)
        case _:
            raise AssertionError(place)


async def _exit() -> None:
    sys.exit(3)


async def _publish(bus: EventBus, count: int) -> None:
    """Publish follow-up events on a connection of the handler's own."""
    assert bus.settings.dsn is not None
    async with await psycopg.AsyncConnection.connect(bus.settings.dsn) as connection:
        for _ in range(count):
            event_id = await bus.outbox.apublish_event("follow-up", {}, conn=connection)
            await connection.execute("INSERT INTO business (event_id, topic) VALUES (%s, 'follow-up')", (event_id,))


async def _find_row(bus: EventBus, event: Event) -> None:
    assert bus.settings.dsn is not None
    async with await psycopg.AsyncConnection.connect(bus.settings.dsn) as connection:
        found = await connection.execute("SELECT FROM business WHERE event_id = %s", (event.event_id,))
        assert found.rowcount == 1, "the row of the publisher's transaction is not there"


async def _until(condition: Callable[[], bool], *, stubborn: bool) -> None:
    while not condition():
        try:
            await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            if not stubborn:
                raise


def _act_in_thread(wish: Json, event: Event, journal: Journal) -> None:
    _fail_or_die(wish, event)
    if seconds := wish.get("block", wish.get("sleep")):
        time.sleep(seconds)
    while "gate" in wish and not (journal.folder / wish["gate"]).exists():
        time.sleep(0.005)
    _fail(event, wish.get("fail_at_end", 0))


def _fail_or_die(wish: Json, event: Event) -> None:
    _fail(event, wish.get("fail", 0))
    if "die" in wish:
        os.kill(os.getpid(), signal.SIGKILL)


def _fail(event: Event, attempts: int) -> None:
    if event.attempt <= attempts:
        raise ValueError(f"attempt {event.attempt} fails on purpose")
