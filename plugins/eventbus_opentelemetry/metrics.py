"""Metrics of publishing, handling and settling, by the conventions for messaging.

The duration of a call is recorded while its span is current, so that an SDK can add the trace as an exemplar. All the
rest is counted once per group of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.metrics import MeterProvider, get_meter

from eventbus import OutboxEvent
from eventbus.plugins import Counted
from eventbus_opentelemetry.conventions import (
    CONSUMER_GROUP,
    DESTINATION,
    ERROR_TYPE,
    EVENTBUS,
    OPERATION_NAME,
    OUTCOME,
    PROCESS,
    PUBLISH,
    SUBSCRIPTION,
    SYSTEM,
    class_name,
)

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Bounds of the histogram, as the conventions advise."""


class Metrics:
    """The instruments. ``provider`` None: the global one, also if it is set later."""

    def __init__(self, provider: MeterProvider | None = None) -> None:
        meter = get_meter("eventbus", meter_provider=provider)
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Events whose INSERT was sent; a rollback takes none away"
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Events with which a handler was called"
        )
        self._settled = meter.create_counter(
            "eventbus.settled.deliveries", "{delivery}", "Deliveries whose outcome was stored, by outcome"
        )
        self._duration = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of one call of a handler",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )

    def published(self, events: Sequence[OutboxEvent], error: BaseException | None) -> None:
        """These were published together, or it failed with ``error``."""
        topics = {events[0].topic: 1} if len(events) == 1 else Counter(event.topic for event in events)
        for topic, count in topics.items():
            attributes = {SYSTEM: EVENTBUS, OPERATION_NAME: PUBLISH, DESTINATION: topic}
            if error is not None:
                attributes[ERROR_TYPE] = class_name(error)
            self._sent.add(count, attributes)

    def called(self, queue: Mapping[str, str], seconds: float, error_type: str | None) -> None:
        """One call of a handler has ended; ``queue``: the attributes of :func:`of_queue`."""
        self._duration.record(seconds, queue if error_type is None else {**queue, ERROR_TYPE: error_type})

    def counted(self, queue: str, counted: Counted) -> None:
        """Outcomes of some deliveries of a queue were stored."""
        attributes = of_queue(queue)
        if calls := counted.calls:
            self._consumed.add(calls, attributes)
        for outcome, count in counted.counts.items():
            if count:
                self._settled.add(count, {**attributes, OUTCOME: outcome})


def of_queue(queue: str) -> dict[str, str]:
    """The attributes of whatever is measured of a queue."""
    return {SYSTEM: EVENTBUS, OPERATION_NAME: PROCESS, SUBSCRIPTION: queue, CONSUMER_GROUP: queue}
