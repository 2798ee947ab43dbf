"""What the plugin's tests share: the plugin with an SDK whose spans and metrics stay in memory, and events."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import Tracer

from eventbus import Event, OutboxEvent
from eventbus.plugins import Call, QueueFacts
from eventbus_opentelemetry import OpenTelemetry

REMOTE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = 0x0AF7651916CD43DD8448EB211C80319C
SPAN = 0xB7AD6B7169203331


class Recording:
    """A plugin, and what it has recorded."""

    def __init__(self, sampler: Sampler | None = None, **settings: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.plugin = OpenTelemetry(OpenTelemetry.Settings(**settings), self.tracers, self.meters)

    @property
    def tracer(self) -> Tracer:
        """For spans that are not the plugin's."""
        return self.tracers.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        """All that have ended, the first that ended first."""
        return list(self._exporter.get_finished_spans())

    def span(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        [found] = [span for span in self.spans if span.name == name]
        return found

    def counted(self, metric: str) -> list[tuple[dict[str, Any], int | float]]:
        """What a counter says now, by attributes."""
        points = self._points(metric)
        return [(dict(point.attributes or {}), point.value) for point in points if isinstance(point, NumberDataPoint)]

    def durations(self, metric: str) -> list[HistogramDataPoint]:
        """What a histogram says now."""
        return [point for point in self._points(metric) if isinstance(point, HistogramDataPoint)]

    def _points(self, metric: str) -> list[object]:
        data = self._reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for each in scope.metrics
            if each.name == metric
            for point in each.data.data_points
        ]

    def publish(self, *events: OutboxEvent, inherited: Mapping[str, str] | None = None) -> list[dict[str, str]]:
        """Publish as the bus does; the headers that the events end up with."""
        headers = [{**(inherited or {}), **_present(event)} for event in events]
        with self.plugin.eventbus_around_publish(events):
            for event, own in zip(events, headers, strict=True):
                self.plugin.eventbus_amend_headers(event, own)
        return headers

    def handle(
        self, events: Sequence[Event], handler: Callable[[Sequence[Event]], Sequence[Any]], queue: QueueFacts
    ) -> None:
        """Call a handler as the bus does; raises what it raises. It returns the outcomes."""
        around = self.plugin.eventbus_around_handler(queue)
        call = Call(queue.name, events)
        with around(call):
            call.outcomes = handler(events)


def new_event(headers: str | None = None, **options: Any) -> Event:
    """An event as it is handled; ``headers`` as JSON text."""
    given: dict[str, Any] = {"topic": "orders.created", "payload": "null", "key": None, "queue": "ledger", **options}
    return Event(event_id=str(uuid.uuid4()), headers=headers, published_at=datetime.now(UTC), **given)


def traced(traceparent: str = REMOTE, **options: Any) -> Event:
    """An event that carries a trace."""
    return new_event(f'{{"traceparent": "{traceparent}"}}', **options)


def id_of(span: ReadableSpan) -> int:
    """Its number."""
    assert span.context is not None
    number: int = span.context.span_id
    return number


def facts(**options: Any) -> QueueFacts:
    """The queue ``ledger``."""
    given: dict[str, Any] = {
        "name": "ledger",
        "patterns": ("orders.*",),
        "handler": "shop.ledger.book",
        "is_async": False,
        "idempotent": False,
        "transactional": False,
        "ordered": False,
        "batch": None,
        "concurrency": 10,
        "timeout": None,
        "max_attempts": 5,
    }
    return QueueFacts(**given | options)


def _present(event: OutboxEvent) -> dict[str, str]:
    return {name: value for name, value in (event.headers or {}).items() if value is not None}
