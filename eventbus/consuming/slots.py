"""What every runner offers to the consumer: slots in which the handlers of one queue run in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from eventbus.transport import Delivery, Verdict

Finish = Callable[[Delivery, Verdict], None]
"""Takes a delivery with its verdict, on the event loop."""


class Runner(Protocol):
    """Slots of one queue in one process."""

    made_room: Callable[[], None]
    """Called when a slot was replaced whose handler goes on after its timeout: there is room, and nothing finished."""

    @property
    def running(self) -> int:
        """Deliveries for whose handlers a slot is taken now. A handler whose slot was replaced is not counted."""

    @property
    def waiting(self) -> int:
        """Deliveries offered and not started."""

    def offer(self, deliveries: Iterable[Delivery]) -> None:
        """Run these when slots are free, in this order. On the event loop only."""

    def resume(self, delivery: Delivery) -> None:
        """Run this, too; called from within ``finish``, whose slot is free now."""

    def withdraw(self) -> list[Delivery]:
        """Take back all that have not started."""

    def abort(self) -> None:
        """Cut short what is running, as far as that is possible: its verdict becomes released."""

    def close(self) -> None:
        """Let idle threads end."""
