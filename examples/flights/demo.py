"""The demo as a story: publish while two processes consume, kill one of them, wait, and compare with the data set.

``eventbus demo`` has found a server and chosen two schema names before it comes here.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pandas as pd  # type: ignore[import-untyped]
import psycopg
from psycopg import sql
from rich.console import Console

from eventbus.bus import EventBus
from eventbus.errors import EventBusError
from eventbus.plugins.registry import loaded
from eventbus.postgres.migrate import migrate
from eventbus.settings import Settings
from examples.flights import database, dataset
from examples.flights.accident import Accident
from examples.flights.figures import Comparison, compare
from examples.flights.processes import COMMAND, Consumer, Consumers
from examples.flights.publisher import Publisher
from examples.flights.screen import Screen, screen
from examples.flights.standing import Look, Standing

PROCESSES: Final = 2
AHEAD: Final = 2_000
"""Flights that the publisher may be ahead of the consumers."""
LOOK_EVERY: Final = 0.1
PATIENCE: Final = 60.0
"""Seconds without any progress after which the demo gives up."""


class Stuck(EventBusError):
    """Nothing moved for a minute."""


@dataclass(frozen=True, slots=True)
class Result:
    """How it ended. ``repeated``: deliveries to the audit that came again, because their process was killed."""

    flights: int
    seconds: float
    dead: int
    repeated: int
    comparisons: list[Comparison]

    @property
    def equal(self) -> bool:
        """Whether nothing was given up and every table has the figures of the data set."""
        return self.dead == 0 and not any(each.differences for each in self.comparisons)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the demo happens. ``settings`` name the server and the bus's schema, ``folder`` holds ``examples``."""

    settings: Settings
    tables_schema: str
    folder: Path

    @property
    def dsn(self) -> str:
        """Where the server is."""
        assert self.settings.dsn is not None
        return self.settings.dsn

    @property
    def environment(self) -> dict[str, str]:
        """What the demo's processes see."""
        return {
            **os.environ,
            "EVENTBUS_DSN": self.dsn,
            "EVENTBUS_SCHEMA": self.settings.schema_name,
            "EVENTBUS_LEASE": f"{self.settings.lease:g}",
            "FLIGHTS_SCHEMA": self.tables_schema,
            "PYTHONUNBUFFERED": "1",
        }


def run(place: Place, count: int | None, console: Console) -> Result:
    """Run the demo in two schemas that do not exist yet; they stay when it ends, see :func:`remove`.

    However the call ends, no consumer process outlives it.
    """
    frame = dataset.read(count)
    migrate(place.dsn, place.settings.schema_name, loaded(place.settings).migrations())
    database.create_tables(place.environment)
    with database.connect(place.environment) as connection:
        look = Look(connection, place.settings.schema_name, frame)
        with screen(console, look.totals) as display:
            last = _stage(place, frame, look, display)
        return Result(
            flights=len(frame),
            seconds=last.seconds,
            dead=last.dead,
            repeated=_repeated(connection),
            comparisons=compare(connection, frame),
        )


def remove(place: Place) -> None:
    """Drop both schemas with everything in them."""
    with psycopg.connect(place.dsn, autocommit=True) as connection:
        connection.execute("SET client_min_messages TO warning")
        for schema in (place.settings.schema_name, place.tables_schema):
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))


def _stage(place: Place, frame: pd.DataFrame, look: Look, display: Screen) -> Standing:
    """Everything that runs at the same time; returns the standing when all of it is done."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eventbus-demo-")))
        names = [f"consumer {number}" for number in range(1, PROCESSES + 1)]
        consumers = [Consumer(name, place.folder, place.environment, logs / name) for name in names]
        running = stack.enter_context(Consumers(consumers))
        for consumer in consumers:
            display.say(f"{consumer.name} is process {consumer.pid}: eventbus {' '.join(COMMAND)}")
        _wait_for_consumers(running, look)
        publisher = Publisher(place.environment, EventBus(place.settings).outbox, dataset.flights(frame))
        stack.enter_context(publisher)
        accident = Accident(consumers[-1], len(frame), place.settings.lease, display.say)
        return _follow(running, publisher, accident, look, display)


def _wait_for_consumers(running: Consumers, look: Look) -> None:
    """Their queues must exist before the first event: an event that no queue wants goes nowhere."""
    patience = Patience()
    while len((standing := look.look(published=0)).workers) < PROCESSES:
        running.check()
        patience.check(standing)
        time.sleep(LOOK_EVERY)


def _follow(running: Consumers, publisher: Publisher, accident: Accident, look: Look, display: Screen) -> Standing:
    """Show the standing until everything is published and handled."""
    patience = Patience()
    total = look.totals["published"]
    while True:
        standing = look.look(publisher.published)
        display.show(standing)
        accident.go_on(standing)
        if accident.over and standing.quiet and standing.published == total:
            return standing
        publisher.allow(standing.handled["audit"] + AHEAD)
        publisher.check()
        running.check()
        patience.check(standing)
        time.sleep(LOOK_EVERY)


class Patience:
    """Ends when nothing has changed for a minute."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0

    def check(self, standing: Standing) -> None:
        """Raise :class:`Stuck` if ``standing`` is no different from those of the last minute."""
        counts = (standing.published, standing.relayed, standing.handled, standing.workers)
        if counts != self._seen:
            self._seen, self._since = counts, standing.seconds
        elif standing.seconds - self._since > PATIENCE:
            raise Stuck(f"nothing has moved for {PATIENCE:.0f} s: {standing}")


def _repeated(connection: psycopg.Connection) -> int:
    row = connection.execute("SELECT coalesce(sum(deliveries) - count(*), 0) FROM audit").fetchone()
    assert row is not None
    return int(row[0])
