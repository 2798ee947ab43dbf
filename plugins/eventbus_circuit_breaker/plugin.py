"""The plugin itself: which hook leads where."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from typing import Any

from eventbus import signals
from eventbus.hookspecs import hookimpl
from eventbus.plugins import Failure, Finding, Migration, Postpone, Result, WorkerHandle
from eventbus_circuit_breaker import records
from eventbus_circuit_breaker.health import findings
from eventbus_circuit_breaker.options import Options, counts_by_default
from eventbus_circuit_breaker.switching import Switch

log = logging.getLogger("eventbus")


class CircuitBreaker:
    """Pauses a queue whose handler keeps failing, tries it with one event at a time, and lets it go on by itself."""

    Settings = Options

    def __init__(self, settings: Options) -> None:
        self._options = settings
        self._counts = settings.counts or counts_by_default
        self._switch: Switch | None = None
        self._complained = False

    @hookimpl
    def eventbus_migrations(self) -> Sequence[Migration]:
        """The breakers' table, view and functions."""
        return records.migrations()

    @hookimpl
    def eventbus_commands(self, commands: Any) -> None:
        """``eventbus circuits``."""
        from eventbus_circuit_breaker.commands import register

        register(commands)

    @hookimpl
    def eventbus_worker_ready(self, worker: WorkerHandle) -> None:
        """From now on there are queues to watch."""
        self._switch = Switch(worker, self._options, random.random, self)
        signals.queue_paused.connect(self._paused)

    @hookimpl
    def eventbus_handler_failed(self, queue: str, failure: Failure) -> Postpone | None:
        """Count it; while the breaker is open, or about to, its event comes back later and has lost no attempt."""
        if self._switch is None:
            return None
        return self._switch.failed(queue, failure, counts=self._counted(failure))

    def _counted(self, failure: Failure) -> bool:
        """Whether it counts; where the program's own predicate fails, the one that is there without it decides."""
        try:
            return bool(self._counts(failure))
        except Exception:
            if not self._complained:
                log.exception("circuit breaker: the function counts failed; failures count as if there were none")
            self._complained = True
            return counts_by_default(failure)

    @hookimpl
    def eventbus_probed(self, queue: str, result: Result) -> None:
        """What came of a probe opens, closes or frees it."""
        if self._switch is not None:
            self._switch.probed(queue, result)

    @hookimpl
    def eventbus_worker_draining(self) -> None:
        """Nothing is waited for any more."""
        if self._switch is not None:
            self._switch.drain()

    @hookimpl
    def eventbus_worker_stopped(self) -> None:
        """The queues of another worker are another matter."""
        signals.queue_paused.disconnect(self._paused)
        self._switch = None

    @hookimpl
    def eventbus_health(self, connection: Any, schema: str) -> Iterable[Finding]:
        """Every queue that a breaker keeps paused."""
        return findings(connection, schema)

    def _paused(self, _sender: object, *, queue: str, **_: object) -> None:
        if self._switch is not None:
            self._switch.paused(queue)
