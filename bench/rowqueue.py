"""What the bus is compared with: a bare row queue, as good as one can be written by hand in psycopg.

One table; a batch of 100 is claimed by one UPDATE (FOR UPDATE SKIP LOCKED in id order) and deleted by one DELETE, each
its own transaction. Of the variants that were tried this is the fastest: the time of visibility has no index, so that
with half-filled pages the UPDATE stays inside its page (HOT) and the primary key is the only index to maintain. One
connection, prepared statements, payloads fetched as text, no retries, no dead letters, no routing, no fan-out.

``python -m bench.rowqueue`` drains a filled table and prints how fast.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import psycopg

from bench.line import PAYLOAD_SQL, TOPIC, checkpoint, connect, run
from bench.meter import Meter

BATCH: Final = 100
_CREATE: Final = """
CREATE TABLE row_queue (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    visible_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    topic text NOT NULL,
    payload json NOT NULL
) WITH (fillfactor = 50)"""
_CLAIM: Final = f"""
UPDATE row_queue SET visible_at = clock_timestamp() + interval '30 seconds'
WHERE id IN (
    SELECT id FROM row_queue WHERE visible_at <= clock_timestamp()
    ORDER BY id LIMIT {BATCH} FOR UPDATE SKIP LOCKED
)
RETURNING id, topic, payload::text"""
_DELETE: Final = "DELETE FROM row_queue WHERE id = ANY (%s)"

Handler = Callable[[str, str], Awaitable[None]]


def create(connection: psycopg.Connection[Any], events: int) -> None:
    """The table with ``events`` rows, analysed."""
    run(connection, _CREATE)
    run(
        connection,
        f"INSERT INTO row_queue (topic, payload) SELECT '{TOPIC}', ({PAYLOAD_SQL})::json"
        " FROM generate_series(1, %s::bigint) AS i ORDER BY i",
        (events,),
    )
    run(connection, "ANALYZE row_queue")
    checkpoint(connection)


def main() -> None:
    """Drain as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--events", type=int, required=True, help="how many rows there are")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="give up after so many")
    parser.add_argument("--asynchronous-commit", action="store_true", help="synchronous_commit = off")
    arguments = parser.parse_args()
    meter = Meter(arguments.events, lambda: None)
    with connect(arguments.dsn) as connection:
        if arguments.asynchronous_commit:
            connection.execute("SET synchronous_commit = off")
        meter.start()
        handled = asyncio.run(drain(connection, _handler(meter), arguments.seconds))
        print(json.dumps(meter.result(handled)))


def _handler(meter: Meter) -> Handler:
    count = meter.count

    async def handle(_topic: str, _payload: str) -> None:
        count()

    return handle


async def drain(connection: psycopg.Connection[Any], handle: Handler, seconds: float) -> int:
    """Claim, handle and delete until nothing is left or the time is up; how many.

    The connection blocks the event loop: there is nothing else to do on it, and an awaited one is slower.
    """
    handled = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rows = connection.execute(_CLAIM, prepare=True).fetchall()
        if not rows:
            break
        for _, topic, payload in rows:
            await handle(topic, payload)
        connection.execute(_DELETE, [[row[0] for row in rows]], prepare=True)
        handled += len(rows)
    return handled


if __name__ == "__main__":
    main()
