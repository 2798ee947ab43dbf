"""One scenario: a database, publishers in the test itself, consumers in processes of their own, and the checker."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from eventbus.bus import EventBus
from eventbus.event import OutboxEvent
from eventbus.settings import load
from tests.end_to_end.checker import Checker
from tests.end_to_end.processes import Nursery, Process
from tests.waiting import wait_until

LEASE = 1.0
PLUGINS = ("stats",)
"""Handlers of scenes fail many times in a row, for which the circuit breaker would pause their queues."""
FAST_RETRY = {"first": 0.05, "factor": 1.0, "jitter": False}
one_server = pytest.mark.parametrize("major", [18], indirect=True)
"""For what does not depend on the server's version."""


class Scene:
    """What one test plays with."""

    def __init__(self, dsn: str, folder: Path, nursery: Nursery) -> None:
        self.dsn = dsn
        self.folder = folder
        self.journal = folder / "journal"
        self.check = Checker(dsn, self.journal)
        self.bus = EventBus(load({"dsn": dsn, "plugins": PLUGINS}, environment={}, folder=folder))
        self._nursery = nursery
        self._numbers = itertools.count(1)
        self._started: list[Process] = []

    def prepare(self, *queues: Mapping[str, Any]) -> None:
        """Make the business table and the queues, so that events published from now on are routed."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            _attach(connection)
            connection.execute("CREATE TABLE IF NOT EXISTS business (event_id uuid PRIMARY KEY, topic text NOT NULL)")
            connection.execute("CREATE TABLE IF NOT EXISTS effects (queue text NOT NULL, event_id uuid NOT NULL)")
            connection.execute("SELECT eventbus.declare_queues(%s)", [json.dumps([*map(_declaration, queues)])])

    def consume(self, *queues: Mapping[str, Any], **options: Any) -> Process:
        """Start a consumer; options that ``programs.consume`` does not know are settings."""
        known = {name: options.pop(name) for name in ("until_idle", "wait") if name in options}
        return self.start(
            "consume", journal=str(self.journal), queues=queues, settings=self.settings(**options), **known
        )

    def settings(self, **changed: Any) -> dict[str, Any]:
        """Settings of the processes: a short lease, and whatever the test changes."""
        return {"dsn": self.dsn, "lease": LEASE, "plugins": PLUGINS} | changed

    def start(self, program: str, **options: Any) -> Process:
        """Start one of the functions of the module ``programs``."""
        process = self._nursery.start(program, self.folder / f"log-{next(self._numbers)}", **options)
        self._started.append(process)
        return process

    def publish(self, topic: str, *payloads: Any) -> list[str]:
        """Publish in one transaction, each event with its business row; the ids."""
        with psycopg.connect(self.dsn) as connection:
            return self.publish_on(connection, topic, *payloads)

    def publish_keyed(self, key: str, *payloads: Any) -> list[str]:
        """Publish events of one key, with the key as topic, each with its business row; the ids."""
        with psycopg.connect(self.dsn) as connection:
            return self.publish_on(connection, key, *payloads, key=key)

    def publish_on(
        self, connection: psycopg.Connection, topic: str, *payloads: Any, key: str | None = None
    ) -> list[str]:
        """Publish on a connection, in its transaction."""
        events = [OutboxEvent(topic, payload, key=key) for payload in payloads]
        ids = self.bus.outbox.publish_events(events, conn=connection)
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO business (event_id, topic) VALUES (%s, %s)", [(one, topic) for one in ids])
        return [str(one) for one in ids]

    def open_gate(self, name: str) -> None:
        """Let handlers go on that wait for this gate."""
        (self.folder / name).touch()

    def wait_for(self, queue: str, what: str, count: int, timeout: float = 60.0) -> None:
        """Wait until the journal holds so many happenings of one kind."""
        wait_until(lambda: len(self.check.entries(queue, what)) >= count, timeout)

    def wait_until_consuming(self, *processes: Process, timeout: float = 60.0) -> None:
        """Wait until each of these processes is a registered worker."""

        def registered() -> bool:
            for process in processes:
                assert process.exit_code() is None, process.log
            return {process.pid for process in processes} <= set(self.workers())

        wait_until(registered, timeout)

    def workers(self, state: str = "live") -> list[int]:
        """Process ids of the registered workers."""
        with psycopg.connect(self.dsn) as connection:
            return [pid for (pid,) in connection.execute("SELECT pid FROM eventbus.workers WHERE state = %s", (state,))]

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Ask the database in a transaction of its own."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return connection.execute(statement.encode(), parameters).fetchall()

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._started:
            process.kill()


@contextmanager
def played(dsn: str, folder: Path, nursery: Nursery) -> Iterator[Scene]:
    """A scene whose processes are gone afterwards."""
    scene = Scene(dsn, folder, nursery)
    try:
        yield scene
    finally:
        scene.end()


NewScene = Callable[[str], Scene]


def _declaration(queue: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker that subscribes this queue declares."""
    tracking = next((kind for kind in ("transactional", "idempotent") if queue.get(kind)), "none")
    return {
        "name": queue["name"], "patterns": [queue["pattern"]], "kind": "ordered" if queue.get("ordered") else "plain",
        "tracking": tracking, "when_exhausted": queue.get("when_exhausted", "park"),
    }  # fmt: skip


def _attach(connection: psycopg.Connection) -> None:
    """Tell the engine that a database cloned from a template is not somebody's copy to be careful with."""
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    connection.execute("LOCK TABLE eventbus.outbox, eventbus.ticks IN SHARE ROW EXCLUSIVE MODE")
    connection.execute("SELECT eventbus.attach(true)")
    connection.execute("COMMIT")
