"""What the metrics of the database are: each section is one query, and fails alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from eventbus_prometheus import sql

COUNTED_UP_TO: Final = 100_000
"""What has to be counted row by row is counted up to here."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """One metric: a column of the section's query, and the columns that are its labels."""

    name: str
    column: str
    what: str
    labels: tuple[str, ...] = ()

    def family(self, rows: Sequence[Mapping[str, Any]]) -> Metric:
        """The metric with its values."""
        family = GaugeMetricFamily(self.name, self.what, labels=self.labels)
        for labels, value in {tuple(row[label] for label in self.labels): row[self.column] for row in rows}.items():
            family.add_metric(labels, value)
        return family


@dataclass(frozen=True, slots=True)
class Section:
    """One query. ``relation``: what must exist for it, where that is not certain; without it there is no section."""

    name: str
    query: str
    gauges: tuple[Gauge, ...]
    relation: str | None = None

    def families(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
        """The metrics with their values."""
        return (gauge.family(rows) for gauge in self.gauges)


_QUEUE: Final = ("queue",)
SECTIONS: Final = (
    Section(
        "queues",
        sql.QUEUES,
        (
            Gauge("eventbus_queue_waiting_events", "waiting", "Events that wait and were never tried.", _QUEUE),
            Gauge("eventbus_queue_running_events", "running", "Events that workers hold.", _QUEUE),
            Gauge("eventbus_queue_retrying_events", "retrying", "Events that wait for another attempt.", _QUEUE),
            Gauge("eventbus_queue_parked_events", "parked", "Events that wait behind one of their key.", _QUEUE),
            Gauge(
                "eventbus_queue_oldest_age_seconds",
                "oldest_age",
                "Age of the oldest event that waits, retrying and parked ones included; 0 without any.",
                _QUEUE,
            ),
        ),
    ),
    Section(
        "dead_letters",
        sql.DEAD_LETTERS,
        (Gauge("eventbus_queue_dead_letters", "dead", f"Dead letters, counted up to {COUNTED_UP_TO}.", _QUEUE),),
    ),
    Section(
        "pauses",
        sql.PAUSES,
        (
            Gauge("eventbus_queue_paused", "paused", "1 while the source pauses the queue.", ("queue", "source")),
            Gauge("eventbus_queue_paused_seconds", "seconds", "How long it has been paused.", ("queue", "source")),
        ),
    ),
    Section(
        "circuit_breakers",
        sql.CIRCUIT_BREAKERS,
        (
            Gauge("eventbus_circuit_breaker_state", "it_is", "1 for the state that it is in.", ("queue", "state")),
            Gauge("eventbus_circuit_breaker_trips", "trips", "How often in a row it has opened.", _QUEUE),
        ),
        relation="circuit_breaker_states",
    ),
    Section(
        "outbox",
        sql.OUTBOX,
        (
            Gauge(
                "eventbus_outbox_backlog_events",
                "events",
                f"Committed events that no relay has seen, counted up to {COUNTED_UP_TO}.",
            ),
            Gauge("eventbus_outbox_oldest_age_seconds", "oldest_age", "Age of the oldest of them; 0 without any."),
        ),
    ),
    Section(
        "relay",
        sql.RELAY,
        (
            Gauge(
                "eventbus_relay_delay_seconds",
                "delay",
                "From INSERT to queue, of the first event that was relayed last; 0 after a minute.",
            ),
        ),
    ),
    Section(
        "scheduled",
        sql.SCHEDULED,
        (
            Gauge("eventbus_scheduled_events", "events", f"Delayed events, counted up to {COUNTED_UP_TO}."),
            Gauge("eventbus_scheduled_overdue_seconds", "overdue", "How late the first of them is; 0 if it is not."),
        ),
    ),
    Section("bus", sql.BUS, (Gauge("eventbus_paused", "paused", "1 while the whole bus waits for eventbus resume."),)),
    Section(
        "workers",
        sql.WORKERS,
        (
            Gauge(
                "eventbus_workers",
                "workers",
                "Workers: alive, or silent for longer than the lease and not taken over yet.",
                ("state",),
            ),
        ),
    ),
    Section(
        "tables",
        sql.TABLES,
        (
            Gauge("eventbus_table_live_rows", "live", "Rows, as the statistics estimate them.", ("table",)),
            Gauge("eventbus_table_dead_rows", "dead", "Dead rows that no vacuum has removed, estimated.", ("table",)),
            Gauge("eventbus_table_size_bytes", "bytes", "Size with indexes and TOAST.", ("table",)),
        ),
    ),
    Section(
        "transactions",
        sql.TRANSACTIONS,
        (
            Gauge("eventbus_oldest_transaction_age_seconds", "oldest", "Age of the oldest open transaction here."),
            Gauge(
                "eventbus_oldest_snapshot_age_transactions",
                "snapshot",
                "How many transactions ago the oldest snapshot was taken that keeps dead rows.",
            ),
        ),
    ),
)
"""Every section, in the order in which they are read: what matters most first."""
