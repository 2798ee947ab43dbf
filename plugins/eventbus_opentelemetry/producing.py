"""Producer spans: one around the SQL of each publish, whose context the events carry.

After it: the relay moves the events, headers and all; ``consuming`` continues the trace in the handlers. A span says
that the SQL has run; whether the caller's transaction commits is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from opentelemetry.context import attach, detach
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer, get_current_span

from eventbus import OutboxEvent
from eventbus_opentelemetry.carrying import extract, has_own_trace, inject, inside
from eventbus_opentelemetry.conventions import (
    BATCH_COUNT,
    CONVERSATION_ID,
    DESTINATION,
    ERROR_TYPE,
    EVENTBUS,
    KEY,
    MESSAGE_ID,
    OPERATION_NAME,
    OPERATION_TYPE,
    PUBLISH,
    SEND,
    SYSTEM,
    class_name,
)
from eventbus_opentelemetry.metrics import Metrics

_CORRELATION_ID: Final = "correlation-id"


class Producing:
    """Makes the producer spans. ``keys``: record the keys of events."""

    def __init__(self, tracer: Tracer, metrics: Metrics, *, keys: bool) -> None:
        self._tracer = tracer
        self._metrics = metrics
        self._keys = keys
        self._single: ContextVar[Span | None] = ContextVar("eventbus_opentelemetry_publishing", default=None)
        """The span of the only event that is being published, if it is recorded."""

    @contextmanager
    def around(self, events: Sequence[OutboxEvent]) -> Iterator[None]:
        """A span that is current until the SQL has run. Events that bring a trace of their own are linked."""
        topics = {event.topic for event in events}
        topic = next(iter(topics)) if len(topics) == 1 else None
        span = self._tracer.start_span(
            PUBLISH if topic is None else f"{PUBLISH} {topic}",
            kind=SpanKind.PRODUCER,
            attributes=_attributes(events, topic),
            links=_links(events),
        )
        alone = len(events) == 1 and span.is_recording()
        if alone:
            self._describe(span, events[0])
        here, single = attach(inside(span)), self._single.set(span if alone else None)
        try:
            yield
        except BaseException as error:
            _fail(span, error)
            self._metrics.published(events, error)
            raise
        else:
            self._metrics.published(events, None)
        finally:
            self._single.reset(single)
            detach(here)
            span.end()

    def amend(self, event: OutboxEvent, headers: dict[str, str]) -> None:
        """Put the context of the current span into the headers that an event will have."""
        inject(event.headers, headers)
        span = self._single.get()
        if span is not None:
            conversation = headers.get(_CORRELATION_ID) or (str(event.event_id) if event.event_id else None)
            if conversation:
                span.set_attribute(CONVERSATION_ID, conversation)

    def _describe(self, span: Span, event: OutboxEvent) -> None:
        if event.event_id is not None:
            span.set_attribute(MESSAGE_ID, str(event.event_id))
        if self._keys and event.key is not None:
            span.set_attribute(KEY, event.key)


def _attributes(events: Sequence[OutboxEvent], topic: str | None) -> Mapping[str, str | int]:
    attributes: dict[str, str | int] = {SYSTEM: EVENTBUS, OPERATION_NAME: PUBLISH, OPERATION_TYPE: SEND}
    if topic is not None:
        attributes[DESTINATION] = topic
    if len(events) != 1:
        attributes[BATCH_COUNT] = len(events)
    return attributes


def _links(events: Sequence[OutboxEvent]) -> list[Link]:
    return [
        Link(get_current_span(extract(_present(event.headers))).get_span_context())
        for event in events
        if has_own_trace(event.headers)
    ]


def _present(headers: Mapping[str, str | None] | None) -> dict[str, str]:
    return {name: value for name, value in (headers or {}).items() if value is not None}


def _fail(span: Span, error: BaseException) -> None:
    if span.is_recording():
        span.record_exception(error)
        span.set_attribute(ERROR_TYPE, class_name(error))
        span.set_status(StatusCode.ERROR, str(error))
