"""The handlers of the tests: they do what the payload of each event asks for, and write down in a journal what happens.

The journal is a file to which every process appends one line per happening in one write, so that it outlives the
process, the server and their connections. It is read by the module ``checker``, which knows nothing of the bus.

What a payload may ask for is in ``_act`` and ``_fail_or_die``. ``after`` is asked for when the effect is there: the
line in the journal, or in a transactional handler the row in ``effects``.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from eventbus import Event, RetryPolicy
from eventbus.bus import EventBus

Json = dict[str, Any]
EFFECT = "INSERT INTO effects (queue, event_id) VALUES (%s, %s)"
"""What the handler of a transactional queue does to the database."""
PROMISES = ("idempotent", "transactional", "ordered", "when_exhausted", "batch", "batch_wait", "timeout")


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


def subscribe(bus: EventBus, queue: Json, journal: Journal) -> None:
    """Subscribe a handler that does what each payload asks for and records it."""
    bus.subscribe(
        queue["pattern"],
        name=queue["name"],
        concurrency=queue.get("concurrency"),
        retry=RetryPolicy(**queue["retry"]) if "retry" in queue else None,
        **{promise: queue[promise] for promise in PROMISES if promise in queue},
    )(Actor(bus, journal).of(queue))


class Actor:
    """Does what events ask for, in a handler of each kind."""

    def __init__(self, bus: EventBus, journal: Journal) -> None:
        self._bus = bus
        self._journal = journal

    def of(self, queue: Json) -> Callable[..., Any]:
        """The handler of a queue."""
        transactional = queue.get("transactional", False)
        if "batch" in queue:
            return self.batch_in_transaction if transactional else self.batch
        if queue.get("sync", False):
            return self.in_transaction_in_thread if transactional else self.in_thread
        return self.in_transaction if transactional else self.in_task

    async def in_task(self, event: Event) -> None:
        self._journal.write("start", event)
        await _act(event.payload, event, self._journal)
        if follow_ups := event.payload.get("publish"):
            await _publish(self._bus, follow_ups)
        if "needs_its_row" in event.payload:
            await _find_row(self._bus, event)
        await self._finish(event)

    def in_thread(self, event: Event) -> None:
        self._journal.write("start", event)
        _act_in_thread(event.payload, event, self._journal)
        self._finish_in_thread(event)

    async def in_transaction(self, event: Event, conn: psycopg.AsyncConnection) -> None:
        self._journal.write("start", event)
        await _act(event.payload, event, self._journal)
        await conn.execute(EFFECT, (event.queue, event.event_id))
        await self._finish(event)

    def in_transaction_in_thread(self, event: Event, conn: psycopg.Connection) -> None:
        self._journal.write("start", event)
        _act_in_thread(event.payload, event, self._journal)
        conn.execute(EFFECT, (event.queue, event.event_id))
        self._finish_in_thread(event)

    async def batch(self, events: list[Event]) -> None:
        for event in events:
            await self.in_task(event)

    async def batch_in_transaction(self, events: list[Event], conn: psycopg.AsyncConnection) -> None:
        for event in events:
            await self.in_transaction(event, conn)

    async def _finish(self, event: Event) -> None:
        """The effect is there; do what is asked for after it."""
        if "after" in event.payload:
            self._journal.write("effect", event)
            await _act(event.payload["after"], event, self._journal)
        self._journal.write("end", event)

    def _finish_in_thread(self, event: Event) -> None:
        if "after" in event.payload:
            self._journal.write("effect", event)
            _act_in_thread(event.payload["after"], event, self._journal)
        self._journal.write("end", event)


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
    _require(wish, journal)
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
    _require(wish, journal)
    _fail(event, wish.get("fail_at_end", 0))


def _require(wish: Json, journal: Journal) -> None:
    """Fail as a handler does whose service is down, until a file of that name is there."""
    if "needs" in wish and not (journal.folder / wish["needs"]).exists():
        raise ConnectionError(f"no {wish['needs']}")


def _fail_or_die(wish: Json, event: Event) -> None:
    _fail(event, wish.get("fail", 0))
    match wish.get("die"):
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(0)
        case "memory":
            _die_of_memory()
        case _:
            pass
    if "exhaust" in wish:
        _exhaust_memory()


def _die_of_memory() -> None:
    """End as native code does that gets no memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _exhaust_memory()
    except MemoryError:
        os.abort()


def _exhaust_memory() -> None:
    """Take all the memory that there is, which is not much; raises MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 64 * 1024 * 1024, before[1]))
    taken = []
    try:
        while True:
            taken.append(bytearray(1024 * 1024))
    finally:
        taken.clear()
        resource.setrlimit(resource.RLIMIT_AS, before)


def _fail(event: Event, attempts: int) -> None:
    if event.attempt <= attempts:
        raise ValueError(f"attempt {event.attempt} fails on purpose")
