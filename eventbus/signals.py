"""Announcements of what has happened, one signal per transition (blinker). A receiver can change nothing.

::

    from eventbus import signals

    @signals.dead_lettered.connect
    def alarm(bus, *, event, reason, **_): ...

The sender is the :class:`~eventbus.EventBus`; ``connect(receiver, sender=bus)`` hears one bus only. Every signal passes
keyword arguments; more may come with a later version, so a receiver ends with ``**_``. Receivers are held by strong
references until ``disconnect``: a lambda stays connected. What a receiver raises is logged and ignored.

A plain receiver is called where the thing happened: in a worker on its event loop, so it must not block; while
publishing in the publisher's thread. An async receiver is awaited on the worker's event loop, one after the other, in
the order of what happened; where no event loop of a worker runs it cannot be, which is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import blinker

from eventbus.errors import passes

log = logging.getLogger("eventbus")


class Signal(blinker.Signal):
    """A signal whose receivers stay connected, whatever they are."""

    def connect(self, receiver: Any, sender: Any = blinker.ANY, weak: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Call ``receiver(sender, **what)`` from now on; returns the receiver, so that it decorates."""
        return super().connect(receiver, sender, weak)


published = Signal("events were published in a transaction that has not committed yet: events")
relayed = Signal("events were moved into queues: deliveries (a mapping of queue names to how many)")
unrouted = Signal("a topic was relayed that no queue wants: topic")
claimed = Signal("this worker claimed events of a queue: queue, count")
handled = Signal("a handler is done with an event: queue, event, attempt, seconds")
skipped = Signal("an event was not handled because a copy of it had been: queue, event")
discarded = Signal("a handler dropped an event on purpose: queue, event, attempt, reason")
retried = Signal("a handler failed and its event runs again: queue, event, attempt, delay (seconds), error")
dead_lettered = Signal("an event was given up: queue, event (None if the outbox lost it), attempt, reason, error")
released = Signal("an event was given back before its handler ended: queue, event")
deferred = Signal("an event runs later without an attempt being counted: queue, event, delay (seconds)")
parked = Signal("an event waits behind an earlier one of its key: queue, event")
queue_paused = Signal("a queue turned out to be paused: queue, seconds (until it is asked again; None: not known)")
probing = Signal("this worker got the one event that tries a paused queue: queue")
lease_lost = Signal("other workers took over what this one held: queue, deliveries (how many)")
took_over = Signal("this worker took over from silent ones: workers, deliveries (how many)")
outage_began = Signal("the database cannot be worked with: reason")
outage_ended = Signal("the database is back: seconds (how long it was away)")
worker_starting = Signal("a worker is about to connect: queues (names)")
worker_ready = Signal("a worker is registered and consumes: worker_id, queues")
worker_draining = Signal("a worker stops claiming: worker_id")
worker_stopped = Signal("a worker has ended: worker_id, code (its exit code)")

ALL: Final[Mapping[str, Signal]] = {name: value for name, value in globals().items() if isinstance(value, Signal)}
"""Every signal by its name."""

OF_OUTCOMES: Final = (handled, skipped, discarded, retried, dead_lettered, released, deferred, parked)
"""The signals that are sent per event, when its outcome has been stored."""

Later = Callable[[Callable[..., Any], Any, Mapping[str, Any]], None]


def send(signal: Signal, sender: Any, later: Later | None = None, /, **what: Any) -> None:
    """Call the receivers. ``later`` takes the async ones with their arguments; None: no event loop runs for them."""
    for receiver in signal.receivers_for(sender) if signal.receivers else ():
        try:
            if not is_async(receiver):
                receiver(sender, **what)
            elif later is not None:
                later(receiver, sender, what)
            else:
                log.warning(
                    "signal %s: %s is async and was not called, for no worker runs here", name_of(signal), receiver
                )
        except BaseException as error:
            if passes(error):
                raise
            log.exception("signal %s: the receiver %s failed; ignored", name_of(signal), receiver)


def is_async(receiver: Any) -> bool:
    """Whether calling this returns something to await."""
    import inspect

    return inspect.iscoroutinefunction(receiver) or inspect.iscoroutinefunction(getattr(receiver, "__call__", None))  # noqa: B004


def name_of(signal: Signal) -> str:
    """The name under which a signal stands in this module; of another one, what it says of itself."""
    return next((name for name, each in ALL.items() if each is signal), str(signal.__doc__).partition(":")[0])
