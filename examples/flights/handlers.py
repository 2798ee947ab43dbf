"""Three consumers of the same events, each with a pattern, a queue and tables of its own.

Run them with ``eventbus consume examples.flights.handlers``, in as many processes as you like.

A handler runs at least once per event: when a process is killed after a handler's commit and before the bus has
recorded it, the event comes again. The three handlers show three ways to write so that a second run changes nothing.
(A later version of the bus takes this over with ``idempotent=True``.)
"""

from __future__ import annotations

from eventbus import Event, subscribe
from examples.flights.database import connection
from examples.flights.flight import Flight


@subscribe("flights.departed.*", name="carrier-delays", concurrency=4)
def record_delay(flight: Flight, event: Event) -> None:
    """Keep the delays of each carrier.

    ``UPDATE … SET minutes = minutes + delay`` would count a second run twice, and all events of a carrier would wait
    for one row. One row per event is safe because the event id is the same in every run, and the view
    ``carrier_delays`` adds the rows up.
    """
    connection().execute(
        "INSERT INTO departures (event_id, carrier, delay) VALUES (%s, %s, %s) ON CONFLICT (event_id) DO NOTHING",
        (event.event_id, flight.carrier, flight.departure_delay),
    )


@subscribe("flights.#", name="airport-board", concurrency=4)
def update_board(flight: Flight) -> None:
    """Show a flight at both of its airports.

    The row is found by what it is about, and it is set to a state instead of being changed by an amount: setting it
    again is harmless. It is one statement, so both airports change together.
    """
    arrival = "diverted" if flight.arrival_delay is None else "arrived"
    connection().execute(
        """
        INSERT INTO board (airport, flight, status, delay)
        VALUES (%(origin)s, %(flight)s, %(departure)s, %(departure_delay)s),
               (%(destination)s, %(flight)s, %(arrival)s, %(arrival_delay)s)
        ON CONFLICT (airport, flight) DO UPDATE SET status = excluded.status, delay = excluded.delay
        """,
        {
            **flight.model_dump(),
            "flight": flight.name,
            "departure": "cancelled" if flight.cancelled else "departed",
            "arrival": "cancelled" if flight.cancelled else arrival,
        },
    )


@subscribe("flights.departed.*", "flights.cancelled.*", name="audit", concurrency=4)
def count(event: Event) -> None:
    """Count every event once, whatever it holds, and keep how often it came.

    The number of rows is the count; ``deliveries`` is honest about the runs that were repeated.
    """
    connection().execute(
        "INSERT INTO audit AS a (event_id, topic) VALUES (%s, %s)"
        " ON CONFLICT (event_id) DO UPDATE SET deliveries = a.deliveries + 1",
        (event.event_id, event.topic),
    )
