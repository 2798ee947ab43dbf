"""The signals of circuit breakers. Their sender is the :class:`~eventbus_circuit_breaker.CircuitBreaker`.

They are sent in the process that has opened or closed the breaker, once for each time in the whole cluster; when one
takes its probe, ``eventbus.signals.probing`` is sent.
"""

from __future__ import annotations

from eventbus.signals import Signal

opened = Signal("a circuit breaker opened, or again after a probe: queue, seconds, trips, reason, error")
closed = Signal("a probe succeeded and the queue goes on: queue, seconds (how long it was open), trips")
