"""The span of a publish, and which context its events carry."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from eventbus import OutboxEvent
from eventbus_opentelemetry.carrying import extract
from eventbus_opentelemetry.tests.recording import REMOTE, SPAN, Recording, id_of

ID = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def test_the_span_of_one_event_says_what_was_published() -> None:
    recording = Recording()
    with recording.tracer.start_as_current_span("request") as request:
        [headers] = recording.publish(OutboxEvent("orders.created", {}, key="Ann", event_id=ID))
    span = recording.span("publish orders.created")
    assert span.kind is SpanKind.PRODUCER
    assert span.status.status_code is StatusCode.UNSET
    assert span.parent == request.get_span_context()
    assert span.attributes == {
        "messaging.system": "eventbus",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders.created",
        "messaging.message.id": str(ID),
        "messaging.message.conversation_id": str(ID),
    }
    assert headers.keys() == {"traceparent"}
    assert get_current_span(extract(headers)).get_span_context().span_id == id_of(span)


def test_keys_are_recorded_only_if_somebody_wants_them() -> None:
    recording = Recording(keys=True)
    recording.publish(OutboxEvent("orders.created", key="Ann"))
    assert (recording.span("publish orders.created").attributes or {})["eventbus.key"] == "Ann"


def test_the_conversation_is_the_correlation_id_that_is_inherited() -> None:
    recording = Recording()
    recording.publish(OutboxEvent("orders.created", event_id=ID), inherited={"correlation-id": "request 7"})
    attributes = recording.span("publish orders.created").attributes or {}
    assert attributes["messaging.message.conversation_id"] == "request 7"


def test_events_that_are_published_together_have_one_span_and_carry_its_context() -> None:
    recording = Recording()
    events = [OutboxEvent(topic, key="Ann", event_id=uuid.uuid4()) for topic in ("orders.created", "orders.paid", "x")]
    headers = recording.publish(*events)
    span = recording.span("publish")
    assert span.attributes == {
        "messaging.system": "eventbus",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.batch.message_count": 3,
    }
    assert {get_current_span(extract(each)).get_span_context().span_id for each in headers} == {id_of(span)}


def test_events_of_one_topic_have_it_in_the_name_of_their_span() -> None:
    recording = Recording()
    recording.publish(OutboxEvent("orders.paid"), OutboxEvent("orders.paid"))
    attributes = recording.span("publish orders.paid").attributes or {}
    assert attributes["messaging.destination.name"] == "orders.paid"
    assert attributes["messaging.batch.message_count"] == 2


def test_an_event_keeps_the_trace_that_its_publisher_gave_it_and_the_span_links_there() -> None:
    recording = Recording()
    own, other = recording.publish(OutboxEvent("a", headers={"traceparent": REMOTE}), OutboxEvent("a"))
    span = recording.span("publish a")
    assert own == {"traceparent": REMOTE}
    assert other["traceparent"] != REMOTE
    assert [link.context.span_id for link in span.links] == [SPAN]


def test_a_publish_that_fails_is_an_error_and_raises_what_it_raised() -> None:
    recording = Recording()
    failure = OSError("no route")
    with (
        pytest.raises(OSError, match="no route") as caught,
        recording.plugin.eventbus_around_publish([OutboxEvent("a")]),
    ):
        raise failure
    assert caught.value is failure
    span = recording.span("publish a")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no route")
    assert (span.attributes or {})["error.type"] == "OSError"
    [event] = span.events
    assert (event.attributes or {})["exception.message"] == "no route"


def test_after_a_publish_the_context_is_as_before_also_if_it_failed() -> None:
    recording = Recording()
    with recording.tracer.start_as_current_span("request") as request:
        recording.publish(OutboxEvent("a"))
        assert get_current_span() is request
        with pytest.raises(ZeroDivisionError), recording.plugin.eventbus_around_publish([OutboxEvent("a")]):
            raise ZeroDivisionError
        assert get_current_span() is request


def test_a_span_that_has_ended_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording()
    recording.publish(OutboxEvent("a", event_id=ID))
    headers: dict[str, str] = {}
    recording.plugin.eventbus_amend_headers(OutboxEvent("b", event_id=ID), headers)
    assert headers == {}
    assert caplog.text == ""


async def test_publishes_that_wait_at_the_same_time_do_not_mix_their_contexts() -> None:
    recording = Recording()
    all_in = asyncio.Barrier(3)

    async def publish(topic: str) -> int:
        headers: dict[str, str] = {}
        event = OutboxEvent(topic)
        with recording.plugin.eventbus_around_publish([event]):
            await all_in.wait()
            recording.plugin.eventbus_amend_headers(event, headers)
        return get_current_span(extract(headers)).get_span_context().span_id

    carried = await asyncio.gather(*map(publish, "abc"))
    assert carried == [id_of(recording.span(f"publish {topic}")) for topic in "abc"]


def test_a_publish_that_is_not_sampled_is_not_recorded_and_its_events_say_so() -> None:
    recording = Recording(ALWAYS_OFF)
    [headers] = recording.publish(OutboxEvent("a", event_id=ID))
    assert recording.spans == []
    assert headers.keys() == {"traceparent"}
    assert not get_current_span(extract(headers)).get_span_context().trace_flags.sampled
