"""What a call of the engine costs the server, counted and not timed: pages touched, sequential scans, spills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.postgres.engine.driver import Engine


@dataclass(frozen=True, slots=True)
class Cost:
    """One statement with everything that it called."""

    buffers: int
    """Pages of tables and indexes touched, in memory or not."""
    spilled: int
    """Pages of temporary files: a sort or a hash table that outgrew the memory."""
    scanned: dict[str, int]
    """Tables of the bus that were read from end to end, and how often."""


class Measuring:
    """Measures statements inside a transaction that will be rolled back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def cost(self, statement: str, *parameters: object) -> Cost:
        """Run the statement and count."""
        before = self._scans()
        [plan] = self.engine.value("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement, *parameters)
        root: dict[str, Any] = plan["Plan"]
        scanned = {table: scans - before[table] for table, scans in self._scans().items() if scans > before[table]}
        return Cost(
            buffers=root["Shared Hit Blocks"] + root["Shared Read Blocks"],
            spilled=root["Temp Read Blocks"] + root["Temp Written Blocks"],
            scanned=scanned,
        )

    def _scans(self) -> dict[str, int]:
        return dict(
            self.engine.rows(
                "SELECT relname::text, seq_scan FROM pg_stat_xact_user_tables"
                " WHERE schemaname = %s AND relname <> 'bus'",  # which has one row
                self.engine.schema,
            )
        )


@contextmanager
def measuring(engine: Engine) -> Iterator[Measuring]:
    """A transaction to measure in; nothing of it stays."""
    with engine.connection.transaction(force_rollback=True):
        yield Measuring(engine)
