"""What is measured, with which attributes."""

from __future__ import annotations

import pytest

from eventbus import OutboxEvent, Retry
from eventbus.testing.values import new_counted
from eventbus.transport import Done
from eventbus_opentelemetry.tests.recording import Recording, facts, id_of, new_event, traced

QUEUE = {
    "messaging.system": "eventbus",
    "messaging.operation.name": "process",
    "messaging.destination.subscription.name": "ledger",
    "messaging.consumer.group.name": "ledger",
}
PUBLISH = {"messaging.system": "eventbus", "messaging.operation.name": "publish"}


def test_what_is_published_is_counted_by_topic() -> None:
    recording = Recording()
    recording.publish(OutboxEvent("a"))
    recording.publish(OutboxEvent("a"), OutboxEvent("b"), OutboxEvent("a"))
    assert recording.counted("messaging.client.sent.messages") == [
        ({**PUBLISH, "messaging.destination.name": "a"}, 3),
        ({**PUBLISH, "messaging.destination.name": "b"}, 1),
    ]


def test_what_could_not_be_published_is_counted_with_its_error() -> None:
    recording = Recording()
    with pytest.raises(OSError, match="no route"), recording.plugin.eventbus_around_publish([OutboxEvent("a")]):
        raise OSError("no route")
    assert recording.counted("messaging.client.sent.messages") == [
        ({**PUBLISH, "messaging.destination.name": "a", "error.type": "OSError"}, 1)
    ]


def test_a_call_is_measured_once_in_seconds_with_the_error_if_it_failed() -> None:
    recording = Recording()
    recording.handle([new_event(), new_event()], lambda _: (Done(), Done()), facts(batch=10))
    recording.handle([new_event()], lambda _: (Retry(),), facts())
    with pytest.raises(StopIteration):
        recording.handle([new_event()], lambda _: next(iter(())), facts())
    points = recording.durations("messaging.process.duration")
    assert [(dict(point.attributes or {}), point.count) for point in points] == [
        (QUEUE, 1),
        ({**QUEUE, "error.type": "retry"}, 1),
        ({**QUEUE, "error.type": "StopIteration"}, 1),
    ]
    assert all(0 < point.sum < 1 for point in points)
    assert 0.005 in points[0].explicit_bounds


def test_a_duration_that_was_measured_points_to_its_trace() -> None:
    recording = Recording()
    recording.handle([traced()], lambda _: (Done(),), facts())
    [point] = recording.durations("messaging.process.duration")
    assert [exemplar.span_id for exemplar in point.exemplars] == [id_of(recording.span("process ledger"))]


def test_what_was_settled_is_counted_by_outcome_and_only_called_handlers_consumed() -> None:
    recording = Recording()
    recording.plugin.eventbus_counted(
        "ledger", new_counted("done", "done", "done", "done", "done", "retry", "retry", "duplicate")
    )
    recording.plugin.eventbus_counted("ledger", new_counted("done", "released", "released", "released"))
    recording.plugin.eventbus_counted("ledger", new_counted("released"))
    assert recording.counted("messaging.client.consumed.messages") == [(QUEUE, 8)]
    assert recording.counted("eventbus.settled.deliveries") == [
        ({**QUEUE, "eventbus.outcome": "done"}, 6),
        ({**QUEUE, "eventbus.outcome": "retry"}, 2),
        ({**QUEUE, "eventbus.outcome": "duplicate"}, 1),
        ({**QUEUE, "eventbus.outcome": "released"}, 4),
    ]


def test_a_queue_of_which_no_handler_was_called_has_consumed_nothing() -> None:
    recording = Recording()
    recording.plugin.eventbus_counted("ledger", new_counted("duplicate", "duplicate", "duplicate", "duplicate"))
    assert recording.counted("messaging.client.consumed.messages") == []
