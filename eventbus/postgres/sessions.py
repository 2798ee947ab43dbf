"""The connections of transactional handlers, while no handler has them.

Before it: a handler is about to be called. After it: ``transactions`` runs it on the connection and gives it back. As
many connections are made as handlers ever ran at once; the one that was used last is used next, so that those that are
not needed stay idle and can be closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

IDLE_SECONDS: Final = 60.0

Session = TypeVar("Session", psycopg.Connection[Any], psycopg.AsyncConnection[Any])


class Sessions(Generic[Session]):
    """Open connections of one queue. For any thread. ``clock`` in monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[tuple[Session, float]] = []
        """With the time since when."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._idle)

    def take(self) -> Session | None:
        """The connection that was used last; None if all are in use."""
        with self._lock:
            while self._idle:
                session, _ = self._idle.pop()
                if not session.closed:
                    return session
        return None

    def give(self, session: Session) -> None:
        """A handler has ended. Its connection is closed if it is of no more use."""
        with self._lock:
            if not self._closed and _at_rest(session):
                self._idle.append((session, self._clock()))
                return
        end(session)

    def trim(self) -> None:
        """Close those that nobody has needed for a minute, except one."""
        with self._lock:
            old = sum(since < self._clock() - IDLE_SECONDS for _, since in self._idle)
            surplus = self._idle[: min(old, len(self._idle) - 1)]
            del self._idle[: len(surplus)]
        for session, _ in surplus:
            end(session)

    def close(self) -> None:
        """Close all, and those in use when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for session, _ in idle:
            end(session)


def end(session: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Close a connection, of either kind, without waiting for anything."""
    session.pgconn.finish()


def refresh(session: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Undo what a handler has changed about the connection on our side of it."""
    session.prepare_threshold = 5
    if isinstance(session, psycopg.Connection):
        session.row_factory = tuple_row
        session.cursor_factory = psycopg.Cursor
        session.server_cursor_factory = psycopg.ServerCursor
    else:
        session.row_factory = tuple_row
        session.cursor_factory = psycopg.AsyncCursor
        session.server_cursor_factory = psycopg.AsyncServerCursor


def _at_rest(session: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether it can be used again. How it begins transactions can only be changed by who has ended ours."""
    return (
        session.pgconn.transaction_status == TransactionStatus.IDLE
        and session.pgconn.pipeline_status == PipelineStatus.OFF
        and session.autocommit
        and (session.isolation_level, session.read_only, session.deferrable) == (None, None, None)
    )
