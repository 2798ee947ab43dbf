"""Writes down which workers are registered, and until when each was heard."""

from __future__ import annotations

from typing import Final

import psycopg

from tests.torture.history import Journal

WORKERS: Final = """
SELECT id::text, pid, state, (extract(epoch FROM started_at) * 1000000)::bigint * 1000,
       (extract(epoch FROM CASE WHEN isfinite(heartbeat_at) THEN heartbeat_at ELSE started_at END)
        * 1000000)::bigint * 1000
FROM eventbus.workers
"""


class Watch:
    """``lease`` is in seconds."""

    def __init__(self, connection: psycopg.Connection, journal: Journal, lease: float) -> None:
        self._connection = connection
        self._journal = journal
        self._lease = int(lease * 1e9)
        self._seen: dict[str, tuple[str, int]] = {}

    def look(self) -> None:
        """Write down what has changed since the last look."""
        for worker, pid, state, started, heartbeat in self._connection.execute(WORKERS).fetchall():
            if self._seen.get(worker) == (state, heartbeat):
                continue
            self._seen[worker] = (state, heartbeat)
            self._journal.write(
                "worker", id=worker, pid=pid, state=state, started=started, heartbeat=heartbeat, lease=self._lease
            )
