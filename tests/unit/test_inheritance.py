"""What a handler publishes stays part of what caused it, and takes nothing along that is wrong on another event."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from eventbus.errors import InvalidHeaders
from eventbus.event import Event
from eventbus.publishing.inheritance import with_context

CAUSE_ID = "01a22c4e-7596-7514-aa0a-605ce5f1f2a9"
TRACE = {
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tracestate": "vendor=t61rcWkgMzE",
    "baggage": "user=17",
}


def cause(headers: Any) -> Event:
    return Event(
        event_id=CAUSE_ID,
        topic="orders.created",
        payload="1",
        headers=headers if isinstance(headers, str) else json.dumps(headers),
        key=None,
        published_at=datetime(2026, 11, 30, tzinfo=UTC),
        queue="billing",
    )


def context_of(headers: dict[str, str]) -> dict[str, str]:
    """Without the two ids that are always there."""
    return {name: value for name, value in headers.items() if name not in {"correlation-id", "causation-id"}}


def test_a_trace_and_the_users_own_headers_go_on_from_event_to_event() -> None:
    inherited = with_context(None, cause(TRACE | {"tenant": "acme", "correlation-id": "request-7"}))
    assert inherited == TRACE | {"tenant": "acme", "correlation-id": "request-7", "causation-id": CAUSE_ID}


def test_a_header_that_the_publish_names_is_not_inherited_and_none_leaves_it_out() -> None:
    inherited = with_context({"tenant": "other", "baggage": None, "own": "1"}, cause(TRACE | {"tenant": "acme"}))
    assert context_of(inherited) == {
        "traceparent": TRACE["traceparent"],
        "tracestate": TRACE["tracestate"],
        "tenant": "other",
        "own": "1",
    }


def test_the_cause_is_always_the_event_that_is_handled_and_not_the_one_before_it() -> None:
    assert with_context({}, cause({"causation-id": "first"}))["causation-id"] == CAUSE_ID
    assert with_context({"causation-id": "mine"}, cause({}))["causation-id"] == "mine"
    assert "causation-id" not in with_context({"causation-id": None}, cause({"causation-id": "first"}))


@pytest.mark.parametrize(
    "name",
    [
        "content-type",
        "content-encoding",
        "event-id",
        "message-id",
        "idempotency-key",
        "reply-to",
        "ce-id",
        "ce-type",
        "eventbus-replayed",
    ],
)
def test_what_describes_one_event_only_is_not_said_of_the_next_one(name: str) -> None:
    handled = cause({name: "x", "tenant": "acme"})
    assert context_of(with_context(None, handled)) == {"tenant": "acme"}
    assert with_context({name: "mine"}, handled)[name] == "mine"


@pytest.mark.parametrize(
    "stored",
    [
        '{"Trace_ID":"x","tenant":"acme"}',
        '{"bad":"\\u0000","tenant":"acme"}',
        '{"bad":"\\ud800","correlation-id":"\\ud800","tenant":"acme"}',
        json.dumps({"bad": "x" * 9_000, "tenant": "acme"}),
    ],
)
def test_headers_that_sql_stored_against_the_rules_do_not_stop_the_handler_from_publishing(stored: str) -> None:
    inherited = with_context(None, cause(stored))
    assert context_of(inherited) == {"tenant": "acme"}
    assert inherited["correlation-id"] == CAUSE_ID


def test_inherited_and_own_headers_together_keep_the_limit_and_the_error_says_what_to_leave_out() -> None:
    handled = cause({f"h{n}": "x" * 8_000 for n in range(3)})
    own: dict[str, str | None] = {f"own{n}": "x" * 4_500 for n in range(2)}
    with pytest.raises(InvalidHeaders, match=r"of which 24.* inherited .* at most 32768 .* None"):
        with_context(own, handled)
    assert len(with_context(own | {"h0": None}, handled)) == 6
    with pytest.raises(InvalidHeaders, match="at most 32768"):
        with_context({f"h{n}": "x" * 8_000 for n in range(5)}, cause({}))
