"""The statements of the circuit breakers; ``{schema}`` is filled in by whoever runs them."""

from __future__ import annotations

from typing import Final

OPEN: Final = """
    SELECT state, seconds, trips
    FROM {schema}.circuit_breaker_open(%s::text, %s::float8, %s::text, %s::text, %s::float8, %s::float8, %s::float8,
                                       %s::float8)
"""

CLOSE: Final = "SELECT seconds, trips FROM {schema}.circuit_breaker_close(%s::text, %s::float8)"

LOOK: Final = """
    SELECT CASE WHEN state = 'open' THEN seconds ELSE 0 END, trips
    FROM {schema}.circuit_breaker_states WHERE queue = %s::text AND state <> 'closed'
"""

STATES: Final = """
    SELECT queue, state, seconds, trips, began_at, opened_at, closed_at, reason, error
    FROM {schema}.circuit_breaker_states ORDER BY queue
"""
