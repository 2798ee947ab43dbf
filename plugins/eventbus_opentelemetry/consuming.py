"""Consumer spans: one around each call of a handler, as a child of the publish or with links to several.

Before it: ``producing`` has put the context into the headers. While a span is current, what the handler publishes and
whatever other instrumentation it uses belong to its trace. ``judging`` says how the call went.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)

from eventbus import Event
from eventbus.hookspecs import Around
from eventbus.plugins import Call, QueueFacts
from eventbus_opentelemetry.carrying import extract, inside
from eventbus_opentelemetry.conventions import (
    ATTEMPT,
    BATCH_COUNT,
    CONVERSATION_ID,
    DESTINATION,
    ERROR_TYPE,
    FUNCTION,
    KEY,
    MESSAGE_ID,
    OPERATION_TYPE,
    OUTCOME,
    PROCESS,
    REASON,
    REPLAY,
)
from eventbus_opentelemetry.judging import Judgement, judge, judge_one
from eventbus_opentelemetry.metrics import Metrics, of_queue

Parent = Literal["remote", "link"]
Attributes = Mapping[str, str]


class Consuming:
    """Makes the consumer spans. ``parent``: what a trace in the headers is; ``keys``: record the keys of events."""

    def __init__(self, tracer: Tracer, metrics: Metrics, *, parent: Parent, keys: bool) -> None:
        self._tracer = tracer
        self._metrics = metrics
        self._parent = parent
        self._keys = keys

    def around(self, queue: QueueFacts) -> Around:
        """What surrounds the calls of one queue."""
        measured = of_queue(queue.name)
        attributes = {**measured, OPERATION_TYPE: PROCESS, FUNCTION: queue.handler}
        start: Callable[[str, Attributes, Call], tuple[Span, Context]]
        start = self._start if queue.batch is None else self._start_batch
        name = f"{PROCESS} {queue.name}"

        @contextmanager
        def surround(call: Call) -> Iterator[None]:
            span, context = start(name, attributes, call)
            token = attach(inside(span, context))
            began = time.perf_counter()
            try:
                yield
            except BaseException as error:
                self._ended(span, call, measured, began, error)
                raise
            else:
                self._ended(span, call, measured, began)
            finally:
                detach(token)
                span.end()

        return surround

    def _ended(
        self, span: Span, call: Call, queue: Attributes, began: float, raised: BaseException | None = None
    ) -> None:
        seconds = time.perf_counter() - began
        judgement = judge(call, raised)
        self._metrics.called(queue, seconds, judgement.error_type)
        _conclude(span, call, judgement)

    def _start(self, name: str, attributes: Attributes, call: Call) -> tuple[Span, Context]:
        """The span of one event."""
        event = call.event
        context, links = extract(event.headers, get_current()), []
        if self._parent == "link" or event.is_replay:
            links = _links_to(context, {})
            context = set_span_in_context(INVALID_SPAN, context)
        span = self._tracer.start_span(
            name, context, SpanKind.CONSUMER, {**attributes, DESTINATION: event.topic}, links
        )
        if span.is_recording():
            span.set_attributes(self._details(event))
        return span, context

    def _start_batch(self, name: str, attributes: Attributes, call: Call) -> tuple[Span, Context]:
        """The span of several events, in a trace of its own: it has a link to the publish of each."""
        known: dict[str, str | int] = {**attributes, BATCH_COUNT: len(call.events)}
        if len({event.topic for event in call.events}) == 1:
            known[DESTINATION] = call.event.topic
        links = [link for event in call.events for link in _links_to(extract(event.headers), _of_link(event))]
        context = get_current()
        return self._tracer.start_span(name, context, SpanKind.CONSUMER, known, links), context

    def _details(self, event: Event) -> dict[str, str | int | bool]:
        details: dict[str, str | int | bool] = {
            MESSAGE_ID: event.event_id_text,
            CONVERSATION_ID: event.correlation_id,
            ATTEMPT: event.attempt,
        }
        if event.is_replay:
            details[REPLAY] = True
        if self._keys and event.key is not None:
            details[KEY] = event.key
        return details


def _links_to(context: Context, attributes: Mapping[str, str | int]) -> list[Link]:
    publish = get_current_span(context).get_span_context()
    return [Link(publish, attributes)] if publish.is_valid else []


def _of_link(event: Event) -> dict[str, str | int]:
    return {MESSAGE_ID: event.event_id_text, DESTINATION: event.topic, ATTEMPT: event.attempt}


def _conclude(span: Span, call: Call, judgement: Judgement) -> None:
    if not span.is_recording():
        return
    if judgement.outcome is not None:
        span.set_attribute(OUTCOME, judgement.outcome)
    if judgement.reason is not None:
        span.set_attribute(REASON, judgement.reason)
    if judgement.error is not None:
        span.record_exception(judgement.error)
    if len(call.events) > 1:
        _tell_each(span, call)
    if judgement.error_type is not None:
        span.set_attribute(ERROR_TYPE, judgement.error_type)
        span.set_status(StatusCode.ERROR, judgement.description)


def _tell_each(span: Span, call: Call) -> None:
    """An event of the span for every event of the bus that is not simply done; none if the whole call raised."""
    for event, judgement in zip(call.events, map(judge_one, call.outcomes), strict=False):
        about = {MESSAGE_ID: event.event_id_text}
        if judgement.error is not None:
            span.record_exception(judgement.error, about)
        elif judgement.outcome not in {"done", None}:
            reason = {} if judgement.reason is None else {REASON: judgement.reason}
            span.add_event(OUTCOME, {**about, OUTCOME: str(judgement.outcome), **reason})
