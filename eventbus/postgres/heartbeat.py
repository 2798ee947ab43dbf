"""Tells the database that this worker lives, from a thread and a connection of its own.

A handler that blocks the event loop for minutes keeps its lease. The same thread takes over workers that went
silent, because it is the one that always runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

import orjson
import psycopg

from eventbus.errors import Unavailable
from eventbus.postgres.breaker import Backoff, Breaker
from eventbus.postgres.connecting import connect_blocking, conninfo
from eventbus.postgres.link import describe, unreachable
from eventbus.postgres.statements import Statements
from eventbus.settings import Settings

log = logging.getLogger("eventbus")

_NAME = "heartbeat"
_LOOK_SECONDS = 1.0
"""How often to see whether the open claims have changed."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """What one heartbeat tells: see ``beat`` in the migrations."""

    worker_id: UUID
    open_from: int
    started: dict[str, int]


@dataclass(frozen=True, slots=True)
class Watch:
    """What the heartbeat asks and whom it tells. All are called from its thread."""

    pulse: Callable[[], Pulse]
    connected: Callable[[], None]
    """A new connection stands: the server may have crashed in between."""
    renewed: Callable[[float], None]
    """A heartbeat was answered: until when, in monotonic seconds, nobody takes this worker over."""
    lost: Callable[[UUID], None]
    """This worker was taken over."""
    took_over: Callable[[int, int], None]
    """Deliveries of a dead worker are waiting now."""
    routine: Callable[[], None]
    """Every third heartbeat."""


class Heartbeat:
    """One thread per worker. Beats every third of the lease, and within a second of new claims."""

    def __init__(self, settings: Settings, calls: Statements, breaker: Breaker, watch: Watch) -> None:
        assert settings.dsn is not None
        self._target = conninfo(settings.dsn, _NAME)
        self._calls = calls
        self._lease = settings.lease
        self._max_crashes = settings.max_crashes
        self._breaker = breaker
        self._backoff = Backoff()
        """Of what failed on connections that stood."""
        self._troubled = False
        self._watch = watch
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eventbus-heartbeat", daemon=True)
        self._connection: psycopg.Connection | None = None
        self._connected_at = 0.0
        self._beats = 0
        self._sent: Pulse | None = None
        self._sent_at = float("-inf")

    def start(self) -> None:
        """Beat until ``stop``."""
        self._thread.start()

    def stop(self) -> None:
        """Stop beating; returns when the thread has ended or after two seconds."""
        self._stopping.set()
        self._breaker.nudge()
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._beat_if_needed()
            except Unavailable:
                break  # it was stopped while it waited for its turn to connect
            except psycopg.Error as error:
                self._failed(error)
                continue
            except Exception:
                log.exception("the heartbeat failed; this is a defect of the bus")
            if self._troubled:
                self._troubled = False
                self._backoff.failures = 0
                self._breaker.outage.ended(_NAME)
            self._stopping.wait(min(_LOOK_SECONDS, self._lease / 3))
        self._close()

    def _failed(self, error: psycopg.Error) -> None:
        """Disconnect, and wait if it was not the connecting that failed: when to try that again, the breaker says."""
        self._troubled = True
        stood = self._connection is not None
        proven_at = max(self._connected_at, self._sent_at) if stood else None
        self._close()
        self._breaker.outage.began(_NAME, describe(error, "heartbeat"), proven_at)
        if stood:
            if unreachable(error):
                self._breaker.broke(proven_at)
            self._backoff.failures += 1
            self._stopping.wait(self._backoff.pause())

    def _beat_if_needed(self) -> None:
        pulse = self._watch.pulse()
        silent = time.monotonic() - self._sent_at
        known = self._sent is not None and pulse.worker_id == self._sent.worker_id
        fresh = silent < self._lease / 3 and known and (pulse == self._sent or not pulse.started)
        if fresh and self._connection is not None:
            return
        if self._connection is None:
            self._connect()
            pulse = self._watch.pulse()
        assert self._connection is not None
        asked_at = time.monotonic()
        row = self._connection.execute(
            self._calls["beat"],
            (pulse.worker_id, self._lease, pulse.open_from, orjson.dumps(pulse.started).decode()),
        ).fetchone()
        assert row is not None
        alive, expired = row
        self._sent, self._sent_at = pulse, time.monotonic()
        if alive:
            self._watch.renewed(asked_at + self._lease)
        else:
            self._watch.lost(pulse.worker_id)
        if expired:
            self._take_over(pulse.worker_id)
        self._beats += 1
        if self._beats % 3 == 0:
            self._watch.routine()

    def _take_over(self, worker_id: UUID) -> None:
        """Not within half a lease of our own connect: after an outage everybody's heartbeat is old."""
        if time.monotonic() - self._connected_at < self._lease / 2:
            return
        assert self._connection is not None
        row = self._connection.execute(self._calls["take_over"], (worker_id, self._lease, self._max_crashes)).fetchone()
        assert row is not None
        workers, deliveries = row
        if workers:
            log.warning("took over %d deliveries of %d silent workers", deliveries, workers)
            self._watch.took_over(workers, deliveries)

    def _connect(self) -> None:
        turn = self._breaker.turn_blocking(urgent=True, given_up=self._stopping.is_set)
        self._connection = connect_blocking(turn, self._target)
        self._connected_at = time.monotonic()
        self._watch.connected()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
