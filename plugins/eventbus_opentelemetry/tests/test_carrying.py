"""Which trace an event carries: the publisher's own, the current one, or the inherited one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import baggage, propagate
from opentelemetry.context import Context, attach, detach
from opentelemetry.propagators.textmap import (
    CarrierT,
    Getter,
    Setter,
    TextMapPropagator,
    default_getter,
    default_setter,
)
from opentelemetry.trace import (
    INVALID_SPAN,
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    TraceState,
    get_current_span,
    set_span_in_context,
)

from eventbus_opentelemetry.carrying import extract, has_own_trace, inject
from eventbus_opentelemetry.tests.recording import REMOTE, SPAN, TRACE

OTHER = "00-11111111111111111111111111111111-2222222222222222-01"


@pytest.fixture
def current() -> Iterator[None]:
    """The trace that ``REMOTE`` stands for is current."""
    token = attach(
        set_span_in_context(NonRecordingSpan(SpanContext(TRACE, SPAN, is_remote=False, trace_flags=TraceFlags(1))))
    )
    yield
    detach(token)


def test_what_is_injected_is_extracted_again(current: None) -> None:
    token = attach(baggage.set_baggage("tenant", "north & south"))
    headers: dict[str, str] = {}
    inject(None, headers)
    detach(token)
    assert headers == {"traceparent": REMOTE, "baggage": "tenant=north+%26+south"}
    context = extract(headers)
    assert get_current_span(context).get_span_context().span_id == SPAN
    assert get_current_span(context).get_span_context().is_remote
    assert baggage.get_baggage("tenant", context) == "north & south"


def test_headers_without_a_trace_carry_none_although_one_is_current(current: None) -> None:
    assert extract({"tenant": "a"}) == {}
    assert extract({}) == {}


def test_the_current_trace_replaces_all_of_the_inherited_one(current: None) -> None:
    headers = {"traceparent": OTHER, "tracestate": "vendor=old", "baggage": "a=b", "tenant": "t"}
    inject(None, headers)
    assert headers == {"traceparent": REMOTE, "tenant": "t"}


def test_without_a_current_trace_the_inherited_one_goes_on() -> None:
    headers = {"traceparent": OTHER, "tracestate": "vendor=old"}
    inject(None, headers)
    assert headers == {"traceparent": OTHER, "tracestate": "vendor=old"}


@pytest.mark.parametrize("state", [None, [], [("vendor", "current")]], ids=["no trace", "no state", "state"])
def test_a_trace_that_the_publisher_names_stays_and_nothing_of_another_is_mixed_in(
    state: list[tuple[str, str]] | None,
) -> None:
    here = SpanContext(TRACE, SPAN, is_remote=False, trace_flags=TraceFlags(1), trace_state=TraceState(state))
    token = attach(set_span_in_context(INVALID_SPAN if state is None else NonRecordingSpan(here)))
    headers = {"traceparent": OTHER, "tracestate": "vendor=inherited"}
    inject({"traceparent": OTHER}, headers)
    detach(token)
    assert headers == {"traceparent": OTHER}


def test_a_publisher_can_leave_the_trace_out(current: None) -> None:
    headers: dict[str, str] = {}
    inject({"traceparent": None}, headers)
    assert headers == {}


def test_baggage_that_the_publisher_names_stays_beside_the_current_trace(current: None) -> None:
    token = attach(baggage.set_baggage("tenant", "current"))
    headers = {"baggage": "tenant=own"}
    inject({"baggage": "tenant=own"}, headers)
    detach(token)
    assert headers == {"baggage": "tenant=own", "traceparent": REMOTE}


def test_baggage_goes_on_without_a_trace() -> None:
    token = attach(baggage.set_baggage("tenant", "a"))
    headers = {"traceparent": OTHER}
    inject(None, headers)
    detach(token)
    assert headers == {"traceparent": OTHER, "baggage": "tenant=a"}


def test_the_state_of_the_current_trace_is_carried() -> None:
    state = TraceState([("vendor", "new")])
    span = NonRecordingSpan(SpanContext(TRACE, SPAN, is_remote=False, trace_flags=TraceFlags(1), trace_state=state))
    token = attach(set_span_in_context(span))
    headers = {"tracestate": "vendor=old"}
    inject(None, headers)
    detach(token)
    assert headers == {"traceparent": REMOTE, "tracestate": "vendor=new"}


@pytest.mark.parametrize("value", ["", "nonsense", "00-0-0-01", f"00-{'0' * 32}-{'0' * 16}-01"])
def test_a_broken_trace_is_none(value: str) -> None:
    assert not get_current_span(extract({"traceparent": value})).get_span_context().is_valid


@pytest.mark.parametrize(
    ("own", "found"),
    [(None, False), ({}, False), ({"tenant": "a"}, False), ({"baggage": "a=b"}, False), ({"traceparent": OTHER}, True)],
)
def test_baggage_alone_is_no_trace(own: dict[str, str | None] | None, found: bool) -> None:
    assert has_own_trace(own) is found


class Capitals(TextMapPropagator):
    """Like those of clouds whose header names have capitals, which no header of the bus has."""

    def extract(
        self, carrier: CarrierT, context: Context | None = None, getter: Getter[CarrierT] = default_getter
    ) -> Context:
        [value] = getter.get(carrier, "X-Cloud-Trace") or [""]
        return baggage.set_baggage("cloud", value, context)

    def inject(
        self, carrier: CarrierT, context: Context | None = None, setter: Setter[CarrierT] = default_setter
    ) -> None:
        setter.set(carrier, "X-Cloud-Trace", "here")

    @property
    def fields(self) -> set[str]:
        return {"X-Cloud-Trace"}


def test_a_propagator_with_capitals_in_its_names_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", Capitals())
    headers = {"x-cloud-trace": "inherited"}
    inject(None, headers)
    assert headers == {"x-cloud-trace": "here"}
    assert baggage.get_baggage("cloud", extract(headers)) == "here"
