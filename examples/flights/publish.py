"""Publish flights: the business rows and their events in one transaction, so that there is never one without the other.

Run it with ``python -m examples.flights.publish [COUNT]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import psycopg

from eventbus.publishing.outbox import Outbox
from examples.flights.flight import Flight

BATCH = 100
"""Departures per transaction."""

_INSERT = """
    INSERT INTO flights (name, carrier, origin, destination, scheduled, departure_delay, arrival_delay)
    VALUES (%s, %s, %s, %s, %s, %s, %s)
"""


def publish_one(conn: psycopg.Connection, outbox: Outbox, flight: Flight) -> None:
    """One row and its event."""
    with conn.transaction():
        conn.execute(_INSERT, _row(flight))
        outbox.publish_event(flight.topic, flight, conn=conn)


def publish_many(conn: psycopg.Connection, outbox: Outbox, batch: Sequence[Flight]) -> None:
    """Many rows and their events: all of them or, if anything fails, none."""
    with conn.transaction(), conn.cursor() as cursor:
        cursor.executemany(_INSERT, [_row(flight) for flight in batch])
        outbox.publish_events([(flight.topic, flight) for flight in batch], conn=conn)


def publish(
    conn: psycopg.Connection, outbox: Outbox, flights: Iterable[Flight], published: Callable[[int], None]
) -> None:
    """Publish departures in batches and every cancellation at once; ``published`` hears of each commit."""
    batch: list[Flight] = []
    for flight in flights:
        if flight.cancelled:
            publish_one(conn, outbox, flight)
            published(1)
            continue
        batch.append(flight)
        if len(batch) == BATCH:
            publish_many(conn, outbox, batch)
            published(len(batch))
            batch.clear()
    if batch:
        publish_many(conn, outbox, batch)
        published(len(batch))


def _row(flight: Flight) -> tuple[object, ...]:
    return (
        *(flight.name, flight.carrier, flight.origin, flight.destination, flight.scheduled),
        *(flight.departure_delay, flight.arrival_delay),
    )


def main(arguments: Sequence[str]) -> None:
    """Publish the first flights of the year, 1,000 unless the argument says another number."""
    from eventbus import outbox
    from examples.flights import database, dataset

    count = int(arguments[0]) if arguments else 1_000
    database.create_tables()
    with database.connect() as conn:
        publish(conn, outbox, dataset.flights(dataset.read(count)), published=lambda _: None)
    print(f"published {count:,} flights")


if __name__ == "__main__":
    main(sys.argv[1:])
