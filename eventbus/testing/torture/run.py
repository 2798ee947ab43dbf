"""One torture run: publish and hurt for some minutes, spare everybody, wait until all is quiet, then judge.

What is decided by the seed: the transactions, what handlers do, and which faults come in which order. How processes
interleave is not, so the same seed gives a similar run, not the same one.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from eventbus.plugins.registry import loaded
from eventbus.postgres.migrate import migrate
from eventbus.settings import load
from eventbus.testing.torture import history
from eventbus.testing.torture.checker import Evidence, Violation, repeats, violations
from eventbus.testing.torture.crew import LEASE, SETTINGS, WORKERS, Crew, environment
from eventbus.testing.torture.facts import History, Tables
from eventbus.testing.torture.postgres.tables import Database
from eventbus.testing.torture.queues import KINDS

FAULT_EVERY: Final = 2.0
PATIENCE: Final = 60.0
"""Seconds in which all must be quiet when nobody publishes and nothing is broken any more."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run, and where. ``owns_server``: connections of the bus may be terminated by their names."""

    dsn: str
    schema: str
    seed: str
    seconds: float
    faults: Sequence[str]
    path: Path
    """The history, a new file."""
    owns_server: bool


@dataclass(frozen=True, slots=True)
class Result:
    """How it went."""

    counts: dict[str, int]
    violations: list[Violation]


def run(plan: Plan) -> Result:
    """Run it all in two schemas that do not exist yet; they are dropped unless a promise was broken."""
    settings = load({"dsn": plan.dsn, "plugins": SETTINGS["EVENTBUS_PLUGINS"]}, environment={})
    migrate(plan.dsn, plan.schema, loaded(settings).migrations())
    with psycopg.connect(plan.dsn, autocommit=True) as connection:
        database = Database(connection, plan.schema)
        database.create()
        quiet = _play(plan, connection, database)
        happened = history.read(plan.path, int(LEASE * 1e9))
        tables = database.look()
        found = violations([kind.promise for kind in KINDS], happened, tables)
        if not quiet and not found:
            found = [Violation("stuck", "every queue", f"not quiet after {PATIENCE:.0f} s")]
        if not found:
            database.drop()
        return Result(_counts(happened, tables), found)


def _play(plan: Plan, connection: psycopg.Connection, database: Database) -> bool:
    journal = history.Journal(plan.path)
    name = f"torture {plan.schema}"
    seen = environment(plan.dsn, plan.schema, plan.path, plan.seed, owns_server=plan.owns_server)
    with Crew(seen, plan.path.parent, journal, name) as crew:
        crew.work(WORKERS)
        if not _wait(crew, lambda: database.bindings() >= len(KINDS)):
            return False
        crew.publish()
        _hurt(plan, crew, connection)
        crew.spare()
        crew.end_publishing()
        quiet = _wait(crew, database.is_quiet) and _wait(crew, lambda: crew.workers <= database.workers())
        crew.end_working()
    journal.close()
    return quiet


def _hurt(plan: Plan, crew: Crew, connection: psycopg.Connection) -> None:
    chance = random.Random(plan.seed)  # noqa: S311 - it has to come again
    end, next_at = time.monotonic() + plan.seconds, time.monotonic() + FAULT_EVERY
    left: list[str] = []
    while time.monotonic() < end:
        crew.look()
        if plan.faults and time.monotonic() > next_at:
            left = left or chance.sample(plan.faults, len(plan.faults))
            ready = frozenset(call.pid for call in history.read(plan.path, 0).calls)
            crew.hurt(left.pop(), chance, ready, connection)
            next_at = time.monotonic() + FAULT_EVERY * (0.5 + chance.random())
        time.sleep(0.05)


def _wait(crew: Crew, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        crew.look()
        if condition():
            return True
        time.sleep(0.2)
    return False


def _counts(happened: History, tables: Tables) -> dict[str, int]:
    evidences = [Evidence(kind.promise, happened, tables) for kind in KINDS]
    faults = Counter(fault.kind for fault in happened.faults)
    return {
        "events": len(tables.published),
        "deliveries": tables.delivered.total(),
        "calls": len(happened.calls),
        "failures on purpose": sum(call.told in ("raise", "retry") for call in happened.calls),
        "repeats": sum(1 for each in evidences if not each.promise.effects for _ in repeats(each)),
        "dead letters": len(tables.letters),
        "parked": len(tables.undone),
        "graceful exits": len(happened.exits),
        **{f"fault {kind}": count for kind, count in sorted(faults.items())},
    }
