"""What ``eventbus doctor`` looks at in a database: each check is a function that returns what it found.

It gets a :class:`Patient` and changes nothing in it. What it raises is for the caller to report.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import psycopg
from psycopg.rows import class_row

from eventbus.errors import SchemaMismatch, SchemaMissing
from eventbus.plugins.values import Finding
from eventbus.postgres import admin
from eventbus.postgres.connecting import conninfo
from eventbus.postgres.copies import duration
from eventbus.postgres.link import CONNECTIONS_PER_WORKER
from eventbus.postgres.migrate import Steps, require_current
from eventbus.postgres.pausing import pauses
from eventbus.postgres.privileges import CONSUME, PUBLISH, missing
from eventbus.postgres.statements import Statements
from eventbus.settings import Settings

_OLDEST_VERSION: Final = 140_000
_LATE: Final = 30.0
"""Seconds after which a committed event should have been relayed."""
_UNATTENDED: Final = 60.0
"""Seconds that events of a queue may wait while nobody works on it."""
_DEAF: Final = 2.0
"""Seconds within which a notification has to arrive."""
_MOST_NAMES: Final = 10


@dataclass(frozen=True, slots=True)
class Patient:
    """A database with a bus. ``connection``: in autocommit mode, in no transaction. ``steps``: those of plugins."""

    connection: psycopg.Connection
    schema: str
    settings: Settings
    dsn: str
    steps: Steps = ()


@dataclass(frozen=True, slots=True)
class _Server:
    version: int
    standby: bool
    read_only: bool
    most_connections: int
    connections: int


def server(patient: Patient) -> Finding:
    """Whether the server can be written to and is new enough, and has room for a worker."""
    with patient.connection.cursor(row_factory=class_row(_Server)) as cursor:
        found = cursor.execute(Statements("doctor", patient.schema)["server"]).fetchone()
    assert found is not None
    name = f"PostgreSQL {found.version // 10_000}.{found.version % 10_000}"
    used = f"{found.connections} of {found.most_connections} connections are used"
    if found.version < _OLDEST_VERSION:
        return Finding("stalled", "server_old", f"{name} is too old", "upgrade it to PostgreSQL 14 or newer")
    if found.standby or found.read_only:
        return Finding("stalled", "server_read_only", f"{name} is read-only", "let EVENTBUS_DSN name the primary")
    if found.most_connections - found.connections < CONNECTIONS_PER_WORKER:
        hint = f"a worker needs {CONNECTIONS_PER_WORKER}: raise max_connections, or find who holds them"
        return Finding("degraded", "server_full", f"{name}; {used}", hint)
    return Finding("ok", "server_ok", f"{name}; {used}")


def schema(patient: Patient) -> Finding:
    """Whether the schema is what this code works with."""
    try:
        require_current(patient.connection, patient.schema, patient.steps)
    except SchemaMissing as error:
        return Finding("stalled", "schema_missing", str(error))
    except SchemaMismatch as error:
        return Finding("stalled", "schema_mismatch", str(error))
    return Finding("ok", "schema_ok", f'schema "{patient.schema}" is up to date')


def rights(patient: Patient) -> Finding:
    """Whether this role may publish and consume."""
    to_publish = missing(patient.connection, patient.schema, PUBLISH)
    to_consume = missing(patient.connection, patient.schema, CONSUME)
    role = patient.connection.info.user
    if not to_publish and not to_consume:
        return Finding("ok", "rights_ok", f'role "{role}" may publish and consume')
    what = "publish or consume" if to_publish and to_consume else "publish" if to_publish else "consume"
    lacking = dict.fromkeys([*to_publish, *to_consume])
    hint = "as the owner of the schema run: " + "; ".join(f'GRANT {right} TO "{role}"' for right in lacking)
    level: Literal["degraded", "stalled"] = "stalled" if to_publish and to_consume else "degraded"
    return Finding(level, "rights_missing", f'role "{role}" may not {what}', hint)


def listening(patient: Patient) -> Finding:
    """Whether a notification that is sent on the one way arrives on the other: a real one is."""
    settings = patient.settings
    if not settings.notify:
        return Finding("ok", "listen_off", f"off by the setting notify: workers ask every {settings.poll_interval:g} s")
    statements, word = Statements("doctor", patient.schema), uuid.uuid4().hex
    way = settings.listen_dsn or patient.dsn
    with (
        psycopg.connect(conninfo(way, "doctor"), autocommit=True) as ears,
        psycopg.connect(conninfo(patient.dsn, "doctor"), autocommit=True) as mouth,
    ):
        ears.execute(statements["listen"])
        mouth.execute(statements["notify"], (word,))
        if any(heard.payload == word for heard in ears.notifies(timeout=_DEAF, stop_after=1)):
            return Finding("ok", "listen_ok", "a notification arrives")
    every = settings.poll_interval_without_listen
    return Finding(
        "degraded",
        "listen_deaf",
        f"a notification does not arrive within {_DEAF:g} s; workers find out by asking every {every:g} s",
        "let EVENTBUS_LISTEN_DSN name the server itself, not a pooler in transaction mode",
    )


def bus(patient: Patient) -> Finding:
    """Whether the bus runs."""
    state = admin.status(patient.connection, patient.schema).bus
    if state.state == "paused":
        return Finding("stalled", "bus_paused", f"the bus is paused: {state.reason}", "to go on: eventbus resume")
    if state.foreign:
        what = "this database was restored from another one"
        return Finding("stalled", "bus_foreign", what, "the next worker attaches it, or: eventbus resume")
    return Finding("ok", "bus_ok", "the bus runs")


def workers(patient: Patient) -> Finding:
    """Whether somebody relays and consumes."""
    status = admin.status(patient.connection, patient.schema)
    lease = patient.settings.lease
    alive = [worker for worker in status.workers if worker.heartbeat_age is not None and worker.heartbeat_age <= lease]
    silent = [worker for worker in status.workers if worker.heartbeat_age is not None and worker.heartbeat_age > lease]
    waiting = status.backlog.events + sum(
        queue.waiting + queue.retrying for queue in admin.queues(patient.connection, patient.schema)
    )
    start = "start one: eventbus consume MODULE"
    if not alive and waiting:
        return Finding("stalled", "workers_none", "no worker is alive, and events wait", start)
    if not alive:
        return Finding("degraded", "workers_none", "no worker is alive; nothing waits for one now", start)
    if silent:
        names = _listed([f"{worker.host}:{worker.pid}" for worker in silent])
        return Finding(
            "degraded", "workers_silent", f"silent for longer than the lease: {names}", "look at these hosts"
        )
    return Finding("ok", "workers_ok", f"{len(alive)} alive")


def relay(patient: Patient) -> Finding:
    """Whether committed events get into the queues."""
    backlog = admin.status(patient.connection, patient.schema).backlog
    if (backlog.oldest_age or 0.0) > _LATE:
        age = duration(backlog.oldest_age or 0.0)
        what = f"{_up_to(backlog.events)} committed events are not relayed, the oldest for {age}"
        return Finding("stalled", "relay_late", what, "workers relay: see whether one is alive, and its log")
    return Finding("ok", "relay_ok", f"not relayed yet: {_up_to(backlog.events)}")


def queues(patient: Patient) -> list[Finding]:
    """Queues that are paused, and those on which nobody seems to work."""
    standing = pauses(patient.connection, patient.schema)
    found = [Finding("degraded", "queue_paused", f"{pause.queue} is {pause.words()}") for pause in standing]
    paused = {pause.queue for pause in standing}
    every = admin.queues(patient.connection, patient.schema)
    for queue in every:
        age = queue.oldest_age or 0.0
        if queue.waiting and age > _UNATTENDED and not queue.running and queue.name not in paused:
            what = f"{queue.name}: {queue.waiting:,} events wait, the oldest for {duration(age)}, and none runs"
            hint = f"start a consumer that subscribes it, or: eventbus queues drop {queue.name}"
            found.append(Finding("degraded", "queue_unattended", what, hint))
    return found or [Finding("ok", "queues_ok", f"none of {len(every)} stands still")]


def dead_letters(patient: Patient) -> Finding:
    """Whether something was given up."""
    dead = {queue.name: queue.dead for queue in admin.queues(patient.connection, patient.schema) if queue.dead}
    if not dead:
        return Finding("ok", "dead_letters_ok", "none wait")
    names = _listed([f"{name} ({count:,})" for name, count in dead.items()])
    hint = "eventbus dead-letters shows why; redrive or discard them"
    return Finding("degraded", "dead_letters_wait", f"{sum(dead.values()):,} wait: {names}", hint)


OF_THE_SERVER: Final[Mapping[str, Callable[[Patient], Finding | list[Finding]]]] = {
    "server": server,
    "listen": listening,
    "schema": schema,
}
"""The checks that need no schema of the bus, by name, and the one whether it is there."""

OF_THE_BUS: Final[Mapping[str, Callable[[Patient], Finding | list[Finding]]]] = {
    "rights": rights,
    "bus": bus,
    "workers": workers,
    "relay": relay,
    "queues": queues,
    "dead letters": dead_letters,
}
"""The checks that need the schema, by name."""


def _up_to(events: int) -> str:
    return f"more than {admin.COUNTED_UP_TO:,}" if events > admin.COUNTED_UP_TO else f"{events:,}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
