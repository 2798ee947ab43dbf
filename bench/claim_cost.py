"""Whether claiming gets dearer as the backlog grows: the same claims from a small and from a large backlog.

Rows go straight into outbox and deliveries, because publishing ten million events would take longer than anything
that is measured here. The two databases take turns, and each claim is settled as a consumer would.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg

from bench import line
from bench.report import Figure, Target, median
from bench.rounds import say
from bench.servers import Server

SMALL: Final = 10_000
_BATCH: Final = 100
_CHUNK: Final = 500_000
_CLAIMS: Final = 20
"""Claims in a row before it is the other database's turn."""


@dataclass(slots=True)
class _Backlog:
    """One database with waiting deliveries of one queue, and the times of claims from it."""

    connection: psycopg.Connection[Any]
    rows: int
    worker_id: UUID = field(default_factory=uuid4)
    milliseconds: list[float] = field(default_factory=list)

    def build(self) -> None:
        """Insert the rows; the queue has number 1, because it is the first."""
        line.declare(self.connection)
        line.run(self.connection, "SELECT {s}.register_worker(%s, 'bench', 1)", (self.worker_id,))
        for first in range(1, self.rows + 1, _CHUNK):
            last = min(first + _CHUNK - 1, self.rows)
            line.run(
                self.connection,
                "INSERT INTO {s}.outbox (event_id, topic, payload, size)"
                f" SELECT {{s}}.new_event_id(), '{line.TOPIC}', ({line.PAYLOAD_SQL})::json, {line.PAYLOAD_BYTES}"
                " FROM generate_series(%s::bigint, %s::bigint) AS i ORDER BY i",
                (first, last),
            )
            line.run(
                self.connection,
                "INSERT INTO {s}.deliveries (queue_id, lane, seq, outbox_id, size)"
                f" SELECT 1, 0, i, i, {line.PAYLOAD_BYTES}"
                " FROM generate_series(%s::bigint, %s::bigint) AS i ORDER BY i",
                (first, last),
            )
            say(f"  {last:,} of {self.rows:,} rows")
        line.checkpoint(self.connection)

    def claim(self) -> None:
        """Claim a batch, note how long it took, and settle it."""
        token = uuid4()
        started = time.perf_counter()
        claimed = self.connection.execute(
            b"SELECT * FROM eventbus.claim(%s, %s, %s::integer[], %s::integer[], %s)",
            (self.worker_id, token, [1], [_BATCH], 2**23),
            prepare=True,
        ).fetchall()
        self.milliseconds.append((time.perf_counter() - started) * 1e3)
        ids = {row[0] for row in claimed if row[0] is not None}
        if len(ids) != 1 or sum(row[0] is not None for row in claimed) != _BATCH:
            raise RuntimeError(f"a claim brought {len(claimed)} rows of {len(ids)} claims; {_BATCH} were expected")
        line.run(self.connection, "SELECT {s}.settle(%s::bigint[], %s::uuid[], NULL)", (list(ids), [token]))


def claim_cost(server: Server, rows: int) -> list[Figure]:
    """Milliseconds per claim of 100 from 10,000 and from ``rows`` waiting deliveries, and the ratio."""
    with ExitStack() as stack:
        small, large = (
            _Backlog(stack.enter_context(line.connect(stack.enter_context(server.database()))), waiting)
            for waiting in (SMALL, rows)
        )
        small.build()
        large.build()
        for backlog in (small, large):
            backlog.claim()
            backlog.milliseconds.clear()  # the first one plans its statements
        while len(small.milliseconds) + _CLAIMS < SMALL // _BATCH:
            for backlog in (small, large):
                for _ in range(_CLAIMS):
                    backlog.claim()
    figures = [
        median("claim-cost", f"claim of {_BATCH} from {backlog.rows:,} waiting", backlog.milliseconds, "ms")
        for backlog in (small, large)
    ]
    ratio = figures[1].value / figures[0].value
    target = Target("<=", 1.5)
    return [*figures, Figure("claim-cost", f"{rows:,} waiting / {SMALL:,} waiting", ratio, "x", target)]
