"""OpenTelemetry for the bus: one trace from who publishes to whatever handlers publish, and metrics of both.

``carrying`` moves trace context through the headers of events, ``producing`` and ``consuming`` make the spans,
``metrics`` counts. Only the package opentelemetry-api is needed; what becomes of spans and metrics is decided by the
SDK that the program configures, and without one nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eventbus import ConfigurationError, OutboxEvent
from eventbus.plugins import Counted, QueueFacts, hookimpl

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from eventbus.hookspecs import Around

_MISSING = 'plugin opentelemetry needs the package opentelemetry-api; pip install "eventbus[opentelemetry]"'


class OpenTelemetry:
    """Traces through the headers of events, spans of publishing and handling, and metrics, for OpenTelemetry.

    The providers are the global ones unless others are given. Raises :class:`~eventbus.ConfigurationError` if
    opentelemetry-api is not installed.
    """

    class Settings(BaseModel):
        """What the spans look like; sampling, exporters and propagators are settings of OpenTelemetry itself."""

        model_config = ConfigDict(frozen=True, extra="forbid")

        parent: Literal["remote", "link"] = Field(
            default="remote",
            description="remote: a handler's span continues the trace of whoever published the event; link: it begins "
            "a trace of its own with a link there, as batches and replayed events always do",
        )
        keys: bool = Field(
            default=False,
            description="record the key of an event as eventbus.key; off because keys are often personal data",
        )

    def __init__(
        self,
        settings: Settings,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        try:
            from opentelemetry.trace import get_tracer

            from eventbus_opentelemetry.consuming import Consuming
            from eventbus_opentelemetry.metrics import Metrics
            from eventbus_opentelemetry.producing import Producing
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("opentelemetry"):
                raise
            raise ConfigurationError(_MISSING) from error
        tracer = get_tracer("eventbus", tracer_provider=tracer_provider)
        self._metrics = Metrics(meter_provider)
        self._producing = Producing(tracer, self._metrics, keys=settings.keys)
        self._consuming = Consuming(tracer, self._metrics, parent=settings.parent, keys=settings.keys)

    @hookimpl
    def eventbus_around_publish(self, events: Sequence[OutboxEvent]) -> AbstractContextManager[Any]:
        """A producer span around the SQL."""
        return self._producing.around(events)

    @hookimpl(trylast=True)
    def eventbus_amend_headers(self, event: OutboxEvent, headers: dict[str, str]) -> None:
        """The event carries the context of that span, instead of what it would inherit."""
        self._producing.amend(event, headers)

    @hookimpl
    def eventbus_around_handler(self, queue: QueueFacts) -> Around:
        """A consumer span around every call, sync and async."""
        return self._consuming.around(queue)

    @hookimpl
    def eventbus_counted(self, queue: str, counted: Counted) -> None:
        """Counted by outcome."""
        self._metrics.counted(queue, counted)
