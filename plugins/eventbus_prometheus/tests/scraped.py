"""What a scrape says, as values to compare."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from eventbus.settings import Settings, load
from eventbus_prometheus.database import Database, Reading

Samples = dict[tuple[str, ...], float]


def parsed(text: bytes) -> dict[str, Metric]:
    """The metrics of a page, by name; fails if Prometheus could not read it."""
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def samples(families: Iterable[Metric]) -> Samples:
    """Each value by the name and the labels' values, these in the order of the labels' names."""
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, *(value for _, value in sorted(sample.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def of(reading: Reading) -> Samples:
    """The values of every section that could be read."""
    return samples(family for families, _ in reading.found.values() for family in families)


def settings(dsn: str, **more: object) -> Settings:
    """Settings with this DSN, whatever the environment says."""
    return load({"dsn": dsn, **more}, environment={})


def read(dsn: str, **more: object) -> Reading:
    """One reading of a database."""
    return Database(settings(dsn, **more), timeout=5.0, statement_timeout=2.0).read()
