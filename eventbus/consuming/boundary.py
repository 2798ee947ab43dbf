"""What surrounds the calls of a transactional handler: the seam between handling and the database.

Before it: ``execution`` has the arguments of a call. After it: ``execution`` judges what came of the call. Who
implements :class:`Boundary` opens a transaction before the call, and commits it or rolls it back after it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from eventbus.transport import Delivery, Outcome

Results = Sequence[Outcome | BaseException]
"""What one call came to, for each of its events in their order; an exception is the failure of its event."""


class Postponed(Exception):
    """Nothing was committed, by no fault of the handler, or whether it was is unknown: no attempt counts.

    The engine is told to run the event again after ``delay`` seconds; where it finds that the event is done after all,
    or that this worker holds it no more, it does nothing.
    """

    def __init__(self, reason: str, *, delay: float) -> None:
        super().__init__(reason)
        self.delay = delay


class Boundary(Protocol):
    """One transaction around each call of a handler, with one event or with a batch.

    ``attempt`` takes the connection, calls the handler (with the connection, if it asks for it) and returns what came
    of it. The transaction is committed, with the completion of all ``deliveries``, if every result is Done or Discard,
    and rolled back otherwise, also if ``attempt`` raises. ``attempt`` may be called again, each time in a transaction
    of its own. What is raised here is a failure of the call, unless it is :class:`Postponed`. The timeout of the
    handler is inside ``attempt``.
    """

    async def run(self, deliveries: Sequence[Delivery], attempt: Callable[[Any], Awaitable[Results]]) -> Results:
        """For handlers on the event loop."""

    def run_blocking(self, deliveries: Sequence[Delivery], attempt: Callable[[Any], Results]) -> Results:
        """For handlers in threads; called in that thread."""
