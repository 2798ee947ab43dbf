"""What ``eventbus doctor`` finds out about the breakers."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg

from eventbus.plugins import Finding
from eventbus_circuit_breaker.records import breakers


def findings(connection: psycopg.Connection, schema: str) -> Iterator[Finding]:
    """One finding for each queue that a breaker keeps paused; if there is none, that all is well."""
    try:
        found = breakers(connection, schema)
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
        forget = f"DELETE FROM \"{schema}\".migrations WHERE starts_with(name, 'circuit_breaker/')"  # noqa: S608 - is said
        yield Finding(
            "degraded",
            "circuit_breakers_missing",
            "the tables of the circuit breakers are gone from this database; workers go on, each counting for itself",
            f"drop what is left of them and let eventbus migrate make them again, after: {forget}",
        )
        return
    broken = [breaker for breaker in found if breaker.state != "closed"]
    for breaker in broken:
        times = "once" if breaker.trips == 1 else f"{breaker.trips} times in a row"
        yield Finding(
            "degraded",
            "circuit_open",
            f"queue {breaker.queue} is paused by its circuit breaker, which opened {times}: "
            f"{breaker.reason}; {breaker.error}",
            f"put right what fails; it goes on by itself (at once: eventbus circuits close {breaker.queue})",
        )
    if not broken:
        yield Finding("ok", "circuits_closed", "no queue is paused by a circuit breaker")
