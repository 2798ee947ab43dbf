"""One scrape: from metrics to text, the same for everybody who asks within a second."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import Final

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from eventbus_prometheus.database import Database, Reading
from eventbus_prometheus.sections import SECTIONS

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Families = Callable[[], Iterable[Metric]]


class Scraping:
    """Answers scrapes. ``cache``: seconds for which an answer is given again. May be called in any thread."""

    def __init__(self, parts: Iterable[Families], cache: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = tuple(parts)
        self._cache = cache
        self._clock = clock
        self._lock = threading.Lock()
        self._text = b""
        self._fresh_until = float("-inf")

    def text(self) -> bytes:
        """The metrics in Prometheus's text format."""
        with self._lock:
            if self._clock() >= self._fresh_until:
                self._text = text(family for part in self._parts for family in part())
                self._fresh_until = self._clock() + self._cache
            return self._text


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Once only."""
        return self._families


def text(families: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus's text format; labels are escaped."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


def of_database(database: Database) -> Iterator[Metric]:
    """The metrics of the database, and which sections could be read."""
    return of_reading(database.read())


def of_reading(reading: Reading) -> Iterator[Metric]:
    """The same of what was read before."""
    up = GaugeMetricFamily("eventbus_section_up", "1 if this part of the metrics could be read.", labels=("section",))
    took = GaugeMetricFamily("eventbus_section_seconds", "How long reading it took.", labels=("section",))
    for section in SECTIONS:
        if section.name in reading.found:
            families, seconds = reading.found[section.name]
            yield from families
            took.add_metric((section.name,), seconds)
        if section.name not in reading.absent:
            up.add_metric((section.name,), section.name in reading.found)
    yield up
    yield took


def of_build() -> Iterator[Metric]:
    """Which version runs here."""
    yield InfoMetricFamily(
        "eventbus_build",
        "What runs here.",
        {"version": version("eventbus"), "python": platform.python_version()},
    )


def of_interpreter() -> Iterable[Metric]:
    """Memory, processor time and open files of this process, under Prometheus's usual names."""
    return ProcessCollector(registry=None).collect()
