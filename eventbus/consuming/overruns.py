"""Handlers that their timeout did not end: a thread cannot be stopped, and a task may swallow its cancellation.

Such a handler keeps its event until it ends, however long that takes: run a second time beside itself, it would do
everything twice. What it must not keep is its slot. So it is reported, and the runner opens another slot in its
place, up to a number that says that something is badly wrong.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from eventbus.transport import Delivery

log = logging.getLogger("eventbus")

MOST_REPLACED: Final = 100
"""Slots of one queue in one process that are replaced at the same time."""


class Overruns:
    """The handlers of one queue that outlast their timeout."""

    def __init__(self, queue: str, seconds: float | None) -> None:
        self.replaced = 0
        """How many are going on whose slots have been replaced."""
        self._queue = queue
        self._seconds = seconds
        self._given_up = False

    def report(self, deliveries: Sequence[Delivery], where: str) -> bool:
        """Say that a handler goes on; true if its slot is to be replaced."""
        events = [str(delivery.event.event_id) for delivery in deliveries if delivery.event is not None]
        about = {"queue": self._queue, "seconds": self._seconds, "where": where, "event_ids": events}
        _say(
            logging.ERROR, "a handler of queue %s goes on after its timeout of %g s, in %s, with %s", about,
            self._queue, self._seconds, where, _named(events),
        )  # fmt: skip
        if self.replaced < MOST_REPLACED:
            self.replaced += 1
            return True
        if not self._given_up:
            self._given_up = True
            _say(
                logging.CRITICAL,
                "%d handlers of queue %s hang and their slots were replaced; no more are: restart this worker and "
                "give what its handlers wait for a timeout", about, self.replaced, self._queue,
            )  # fmt: skip
        return False

    def ended(self) -> None:
        """A handler whose slot was replaced has ended after all."""
        self.replaced -= 1
        if self.replaced == 0:
            self._given_up = False


def _named(event_ids: Sequence[str]) -> str:
    more = f" and {len(event_ids) - 1} more" if len(event_ids) > 1 else ""
    return f"event {event_ids[0]}{more}" if event_ids else "no event"


def _say(level: int, message: str, about: Mapping[str, object], *values: object) -> None:
    """Log, whatever the program's own filters and handlers of logging raise."""
    with contextlib.suppress(Exception):
        log.log(level, message, *values, extra=about)
