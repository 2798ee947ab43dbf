"""Circuit breakers: a queue whose handler keeps failing is paused, tried with single events, and goes on by itself.

``options`` are its settings, ``tally`` counts, ``circuit`` decides, ``switching`` acts, ``records`` and the migrations
are the database's part, ``commands`` is ``eventbus circuits``.
"""

from eventbus_circuit_breaker.announcing import closed, opened
from eventbus_circuit_breaker.options import Options, counts_by_default
from eventbus_circuit_breaker.plugin import CircuitBreaker

__all__ = ["CircuitBreaker", "Options", "closed", "counts_by_default", "opened"]
