"""A torture run: publishers, workers to which things happen, and the checker in the end."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from eventbus.postgres.publishing import PublishStatements
from eventbus.publishing.outbox import Outbox
from eventbus.settings import load
from tests.torture import tables
from tests.torture.checker import Violation, violations
from tests.torture.history import History, read
from tests.torture.kinds import Kind
from tests.torture.publishers import Counters, Publisher
from tests.torture.workers import Workers

PUBLISHERS: Final = 4
HURT_EVERY: Final = 0.6


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of what. ``events`` are published in about ``seconds``."""

    kinds: Sequence[Kind]
    events: int
    seconds: float
    workers: int = 3
    patience: float = 60.0
    """Seconds in which all must be quiet once nobody publishes and nothing is broken any more."""


class Stage:
    """One database and the folder of the journals."""

    def __init__(self, dsn: str, folder: Path, plan: Plan) -> None:
        self._dsn = dsn
        self._folder = folder
        self._plan = plan
        self._workers = Workers(dsn, folder, plan.kinds, "faults")
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._counters = Counters(plan.events)
        self.history = History()

    def play(self) -> None:
        """Publish and torture until everything is published, then wait until all is quiet and stop the workers."""
        self._connection.execute(tables.APPLICATION)
        self._workers.start(self._plan.workers)
        self._wait_for_queues()
        publishing = self._publish()
        hurt_at = 0.0
        while any(thread.is_alive() for thread in publishing):
            self._workers.look()
            if time.monotonic() > hurt_at:
                self._workers.hurt()
                hurt_at = time.monotonic() + HURT_EVERY
            time.sleep(0.1)
        self._rest()

    def redrive(self) -> None:
        """Give every dead letter another chance, until there is none."""
        self._workers.start(2)
        deadline = time.monotonic() + self._plan.patience
        while self._workers.redrive(10_000):
            assert time.monotonic() < deadline, "there are dead letters again and again"
            self._wait_until_quiet()
        self._rest()

    def judge(self) -> list[Violation]:
        """What the checker finds wrong."""
        self.history = read(self._folder)
        return violations(self._plan.kinds, self.history, tables.look(self._connection))

    def summary(self) -> str:
        """What has happened, in one line."""
        told = Counter(str(run.told) for run in self.history.runs)
        return f"{len(self.history.runs)} runs {dict(told)}, faults {dict(Counter(self.history.faults))}"

    def close(self) -> None:
        """Kill what still runs."""
        self._counters.left = 0
        self._workers.close()
        self._connection.close()

    def _rest(self) -> None:
        self._workers.spare()
        self._wait_until_quiet()
        self._workers.stop()

    def _publish(self) -> list[threading.Thread]:
        plan = self._plan
        outbox = Outbox(PublishStatements("eventbus"), load({}, environment={}, folder=self._folder))
        pause = 3 * PUBLISHERS * plan.seconds / plan.events
        threads = [
            threading.Thread(
                target=Publisher(self._dsn, outbox, plan.kinds, number, self._folder).run,
                args=(self._counters, pause),
            )
            for number in range(PUBLISHERS)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _wait_for_queues(self) -> None:
        self._wait(lambda: self._count("eventbus.bindings") == 2 * len(self._plan.kinds), "queues")

    def _wait_until_quiet(self) -> None:
        self._wait(lambda: tables.is_quiet(self._connection), "quiet")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._plan.patience
        while not condition():
            self._workers.look()
            assert time.monotonic() < deadline, f"not {what}: {self._standing()}\n{self._workers.logs()}"
            time.sleep(0.1)

    def _count(self, table: str) -> int:
        [(count,)] = self._connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchall()
        return int(count)

    def _standing(self) -> str:
        found = tables.look(self._connection)
        counted = Counter((queue, place) for (queue, _), places in found.places.items() for place in places)
        return f"{len(found.published)} published, {found.delivered.total()} delivered, {dict(counted)}"
