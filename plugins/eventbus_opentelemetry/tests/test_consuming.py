"""The span of a call: where it belongs, what it says, and what is current while the handler runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from opentelemetry import baggage
from opentelemetry.context import attach, get_current, set_value
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from opentelemetry.trace import INVALID_SPAN, NoOpTracer, NoOpTracerProvider, SpanKind, StatusCode, get_current_span

from eventbus import DeadLetter, Discard, Event, OutboxEvent, Retry
from eventbus.plugins import Call
from eventbus.transport import Done
from eventbus_opentelemetry import OpenTelemetry
from eventbus_opentelemetry.tests.recording import REMOTE, SPAN, TRACE, Recording, facts, id_of, new_event, traced


def returning(*outcomes: object) -> Callable[[Sequence[Event]], Sequence[Any]]:
    return lambda _: outcomes


def raising(error: BaseException) -> Callable[[Sequence[Event]], Sequence[Any]]:
    def handler(_: Sequence[Event]) -> Sequence[Any]:
        raise error

    return handler


done = returning(Done())


def test_a_call_continues_the_trace_that_its_event_carries() -> None:
    recording = Recording()
    event = traced(attempt=2, key="Ann")
    recording.handle([event], done, facts())
    span = recording.span("process ledger")
    assert span.kind is SpanKind.CONSUMER
    assert span.status.status_code is StatusCode.UNSET
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id, span.parent.is_remote) == (TRACE, SPAN, True)
    assert list(span.links) == []
    assert span.attributes == {
        "messaging.system": "eventbus",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders.created",
        "messaging.destination.subscription.name": "ledger",
        "messaging.consumer.group.name": "ledger",
        "messaging.message.id": event.event_id_text,
        "messaging.message.conversation_id": event.event_id_text,
        "code.function.name": "shop.ledger.book",
        "eventbus.attempt": 2,
        "eventbus.outcome": "done",
    }


def test_keys_are_recorded_only_if_somebody_wants_them() -> None:
    recording = Recording(keys=True)
    recording.handle([traced(key="Ann")], done, facts())
    assert (recording.span("process ledger").attributes or {})["eventbus.key"] == "Ann"


def test_the_conversation_is_the_correlation_id() -> None:
    recording = Recording()
    recording.handle([new_event('{"correlation-id": "request 7"}')], done, facts())
    attributes = recording.span("process ledger").attributes or {}
    assert attributes["messaging.message.conversation_id"] == "request 7"


@pytest.mark.parametrize("headers", [None, '{"tenant": "a"}', '{"traceparent": "nonsense"}'])
def test_an_event_without_a_trace_begins_one(headers: str | None) -> None:
    recording = Recording()
    recording.handle([new_event(headers)], done, facts())
    assert recording.span("process ledger").parent is None


@pytest.mark.parametrize(
    ("settings", "options"), [({"parent": "link"}, {}), ({}, {"replay_id": 3})], ids=["setting", "replay"]
)
def test_a_trace_of_its_own_has_a_link_to_the_publish(settings: dict[str, Any], options: dict[str, Any]) -> None:
    recording = Recording(**settings)
    recording.handle([traced(**options)], done, facts())
    span = recording.span("process ledger")
    assert span.parent is None
    assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [(TRACE, SPAN)]
    assert (span.attributes or {}).get("eventbus.replay") is (True if options else None)


@pytest.mark.parametrize("parent", ["remote", "link"])
def test_baggage_of_the_event_is_there_in_the_handler_in_any_case(parent: str) -> None:
    found = []

    def handler(_: Sequence[Event]) -> Sequence[Any]:
        found.append(baggage.get_baggage("tenant"))
        return (Done(),)

    event = new_event(f'{{"traceparent": "{REMOTE}", "baggage": "tenant=a"}}')
    Recording(parent=parent).handle([event], handler, facts())
    assert found == ["a"]


def test_what_a_handler_publishes_is_a_child_of_its_span() -> None:
    recording = Recording()
    headers: list[dict[str, str]] = []

    def handler(events: Sequence[Event]) -> Sequence[Any]:
        headers.extend(recording.publish(OutboxEvent("orders.booked"), inherited=events[0].headers))
        return (Done(),)

    recording.handle([traced()], handler, facts())
    publish, process = recording.span("publish orders.booked"), recording.span("process ledger")
    assert publish.parent is not None
    assert publish.parent.span_id == id_of(process)
    assert int(headers[0]["traceparent"].split("-")[2], 16) == id_of(publish)


@pytest.mark.parametrize(
    ("outcome", "name", "error_type", "description", "reason"),
    [
        (Discard("a test order"), "discarded", None, None, "a test order"),
        (Discard(), "discarded", None, None, None),
        (Retry(reason="not yet"), "retry", "retry", "not yet", "not yet"),
        (Retry(), "retry", "retry", "the handler asked for a retry", None),
        (DeadLetter("no such account"), "dead", "dead_letter", "no such account", "no such account"),
        (DeadLetter(), "dead", "dead_letter", "the handler gave the event up", None),
    ],
    ids=repr,
)
def test_what_a_handler_returns_is_its_outcome(
    outcome: object, name: str, error_type: str | None, description: str | None, reason: str | None
) -> None:
    recording = Recording()
    recording.handle([traced()], returning(outcome), facts())
    span = recording.span("process ledger")
    attributes = span.attributes or {}
    assert (attributes["eventbus.outcome"], attributes.get("error.type")) == (name, error_type)
    assert attributes.get("eventbus.reason") == reason
    assert span.status.status_code is (StatusCode.UNSET if error_type is None else StatusCode.ERROR)
    assert span.status.description == description
    assert list(span.events) == []


def test_what_a_handler_raises_is_recorded_and_passes_through() -> None:
    recording = Recording()
    failure = ZeroDivisionError("by zero")
    with pytest.raises(ZeroDivisionError) as caught:
        recording.handle([traced()], raising(failure), facts())
    assert caught.value is failure
    span = recording.span("process ledger")
    attributes = span.attributes or {}
    assert (attributes["eventbus.outcome"], attributes["error.type"]) == ("failed", "ZeroDivisionError")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "by zero")
    [event] = span.events
    assert event.name == "exception"
    assert "raise error" in str((event.attributes or {})["exception.stacktrace"])


def test_a_call_that_a_stop_cut_short_is_told_from_one_that_failed() -> None:
    recording = Recording()
    with pytest.raises(asyncio.CancelledError):
        recording.handle([traced()], raising(asyncio.CancelledError()), facts())
    span = recording.span("process ledger")
    assert (span.attributes or {})["eventbus.outcome"] == "cancelled"
    assert span.status.status_code is StatusCode.ERROR


def test_an_error_of_a_library_is_named_with_its_module() -> None:
    class Declined(Exception):
        pass

    recording = Recording()
    with pytest.raises(Declined):
        recording.handle([traced()], raising(Declined()), facts())
    name = (recording.span("process ledger").attributes or {})["error.type"]
    assert name == f"{__name__}.test_an_error_of_a_library_is_named_with_its_module.<locals>.Declined"


def test_a_call_whose_result_is_still_awaited_has_no_outcome() -> None:
    recording = Recording()
    recording.handle([traced()], returning(), facts())
    assert "eventbus.outcome" not in (recording.span("process ledger").attributes or {})


def test_a_batch_has_a_trace_of_its_own_with_a_link_to_every_publish() -> None:
    recording = Recording()
    events = [traced(), new_event(topic="orders.paid"), traced(f"00-{'1' * 32}-{'2' * 16}-01", attempt=3)]
    recording.handle(events, returning(Done(), Done(), Done()), facts(batch=10))
    span = recording.span("process ledger")
    assert span.parent is None
    assert [(link.context.span_id, dict(link.attributes or {})) for link in span.links] == [
        (SPAN, about(events[0], 1)),
        (0x2222222222222222, about(events[2], 3)),
    ]
    assert span.attributes == {
        "messaging.system": "eventbus",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.subscription.name": "ledger",
        "messaging.consumer.group.name": "ledger",
        "messaging.batch.message_count": 3,
        "code.function.name": "shop.ledger.book",
        "eventbus.outcome": "done",
    }


def about(event: Event, attempt: int) -> dict[str, Any]:
    return {
        "messaging.message.id": event.event_id_text,
        "messaging.destination.name": event.topic,
        "eventbus.attempt": attempt,
    }


def test_a_batch_of_one_looks_like_a_batch_and_of_one_topic_names_it() -> None:
    recording = Recording()
    recording.handle([traced()], done, facts(batch=10))
    span = recording.span("process ledger")
    assert span.parent is None
    assert [link.context.span_id for link in span.links] == [SPAN]
    assert (span.attributes or {})["messaging.batch.message_count"] == 1
    assert (span.attributes or {})["messaging.destination.name"] == "orders.created"


def test_a_batch_says_which_of_its_events_failed_and_why() -> None:
    recording = Recording()
    events = [new_event() for _ in range(4)]
    outcomes = (Done(), KeyError("account"), Retry(), Discard("a test"))
    recording.handle(events, returning(*outcomes), facts(batch=10))
    span = recording.span("process ledger")
    attributes = span.attributes or {}
    assert (attributes["eventbus.outcome"], attributes["error.type"]) == ("mixed", "_OTHER")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "2 of 4 events failed")
    found = [(event.name, dict(event.attributes or {})) for event in span.events]
    assert [(name, each["messaging.message.id"]) for name, each in found] == [
        ("exception", events[1].event_id_text),
        ("eventbus.outcome", events[2].event_id_text),
        ("eventbus.outcome", events[3].event_id_text),
    ]
    assert found[0][1]["exception.type"] == "KeyError"
    assert found[1][1]["eventbus.outcome"] == "retry"
    assert (found[2][1]["eventbus.outcome"], found[2][1]["eventbus.reason"]) == ("discarded", "a test")


def test_a_batch_that_discards_some_has_not_failed() -> None:
    recording = Recording()
    recording.handle([new_event(), new_event()], returning(Done(), Discard()), facts(batch=10))
    span = recording.span("process ledger")
    assert (span.attributes or {})["eventbus.outcome"] == "mixed"
    assert span.status.status_code is StatusCode.UNSET


def test_a_batch_whose_events_all_fail_the_same_way_names_it() -> None:
    recording = Recording()
    recording.handle([new_event(), new_event()], returning(Retry(), Retry()), facts(batch=10))
    attributes = recording.span("process ledger").attributes or {}
    assert (attributes["eventbus.outcome"], attributes["error.type"]) == ("retry", "retry")


def test_a_batch_that_raises_is_one_failure() -> None:
    recording = Recording()
    with pytest.raises(KeyError):
        recording.handle([new_event(), new_event()], raising(KeyError("x")), facts(batch=10))
    span = recording.span("process ledger")
    assert [event.name for event in span.events] == ["exception"]
    assert (span.attributes or {})["error.type"] == "KeyError"


@pytest.mark.parametrize("handler", [done, raising(ZeroDivisionError())], ids=["returns", "raises"])
def test_nothing_of_a_call_is_current_after_it_whatever_the_handler_left_there(
    handler: Callable[[Sequence[Event]], Sequence[Any]],
) -> None:
    recording = Recording()
    before = get_current()

    def careless(events: Sequence[Event]) -> Sequence[Any]:
        attach(set_value("left", "behind"))
        return handler(events)

    for _ in range(2):
        try:
            recording.handle([traced()], careless, facts())
        except ZeroDivisionError:
            assert handler is not done
        assert get_current() == before


@pytest.mark.parametrize("sampler", [ALWAYS_OFF, ParentBased(ALWAYS_OFF)], ids=["off", "parent"])
def test_what_is_not_sampled_is_not_recorded_and_neither_is_what_follows(sampler: Sampler) -> None:
    recording = Recording(sampler)
    unsampled = traced(REMOTE.removesuffix("01") + "00")
    headers: list[dict[str, str]] = []

    def handler(_: Sequence[Event]) -> Sequence[Any]:
        headers.extend(recording.publish(OutboxEvent("orders.booked")))
        return (Done(),)

    recording.handle([unsampled], handler, facts())
    assert recording.spans == []
    _, trace, span, flags = headers[0]["traceparent"].split("-")
    assert (int(trace, 16), int(flags, 16) & 1) == (TRACE, 0)
    assert int(span, 16) != SPAN


@pytest.mark.parametrize("parents", [True, False], ids=["knows parents", "forgets parents"])
def test_without_an_sdk_the_trace_goes_through_to_what_the_handler_publishes(
    parents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not parents:  # as versions of the API do that we support
        monkeypatch.setattr(NoOpTracer, "start_span", lambda *_, **__: INVALID_SPAN)
    plugin = OpenTelemetry(OpenTelemetry.Settings(), NoOpTracerProvider())
    headers: dict[str, str] = {}
    follow_up, event = OutboxEvent("orders.booked"), traced()
    with plugin.eventbus_around_handler(facts())(Call("ledger", [event])):
        assert get_current_span().get_span_context().span_id == SPAN
        with plugin.eventbus_around_publish([follow_up]):
            plugin.eventbus_amend_headers(follow_up, headers)
    assert headers == {"traceparent": REMOTE}
