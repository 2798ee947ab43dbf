"""Two sessions in one test: calls that block on each other, and functions that stop at a chosen line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import psycopg

from tests.postgres.engine.driver import Engine
from tests.waiting import wait_until

T = TypeVar("T")
NewSession = Callable[[], Engine]
GATE = 4711
"""Advisory lock at which :func:`stop_before` makes a function wait."""


class Background:
    """Runs calls in threads, each on a session of its own, and sees whether they wait for a lock."""

    def __init__(self, threads: ThreadPoolExecutor, observer: Engine) -> None:
        self._threads = threads
        self._observer = observer
        self._sessions: list[Engine] = []

    def start(self, session: Engine, call: Callable[[], T]) -> Future[T]:
        """Run ``call``, which uses ``session``, while the test goes on."""
        self._sessions.append(session)
        return self._threads.submit(call)

    def blocked(self, session: Engine, call: Callable[[], T]) -> Future[T]:
        """Run ``call`` and return once it waits for a lock that another session holds."""
        running = self.start(session, call)
        pid = session.pid
        wait_until(lambda: self._waits(pid) or running.done())
        if running.done():
            raise AssertionError(f"it did not wait; it returned {running.result()!r}")
        return running

    def _waits(self, pid: int) -> bool:
        return bool(self._observer.value("SELECT cardinality(pg_blocking_pids(%s)) > 0", pid))

    def end(self) -> None:
        """End what still waits."""
        for session in self._sessions:
            with suppress(psycopg.Error):
                self._observer.rows("SELECT pg_terminate_backend(%s)", session.pid)


@contextmanager
def open_transaction(session: Engine, isolation: str = "READ COMMITTED") -> Iterator[Engine]:
    """A transaction that commits at the end of the block; rolled back by :class:`psycopg.Rollback`."""
    with session.connection.transaction():
        session.rows(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        yield session


def stop_before(bus: Engine, function: str, line: str) -> None:
    """Make ``function`` wait for the lock :data:`GATE` just before the statement that starts with ``line``."""
    [source] = bus.column(
        "SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.pronamespace = %s::regnamespace AND p.proname = %s",
        f'"{bus.schema}"',
        function,
    )
    assert source.count(line) == 1, f"{line!r} is {source.count(line)} times in {function}"
    bus.rows(source.replace(line, f"PERFORM pg_advisory_xact_lock_shared({GATE}); {line}"))


@contextmanager
def gate_closed(session: Engine) -> Iterator[None]:
    """Hold :data:`GATE` for the block."""
    session.rows(f"SELECT pg_advisory_lock({GATE})")
    try:
        yield
    finally:
        session.rows(f"SELECT pg_advisory_unlock({GATE})")
