"""Reads the sections from the database, on a connection of its own that lasts as long as one scrape.

Nothing here waits longer than it may: what hangs is left behind in its thread, and not asked again before it answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
from prometheus_client.metrics_core import Metric
from psycopg import sql as compose
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from eventbus.settings import Settings as BusSettings
from eventbus_prometheus import sql
from eventbus_prometheus.sections import COUNTED_UP_TO, SECTIONS, Section

log = logging.getLogger("eventbus_prometheus")

_LATE: Final = "no answer in time"


@dataclass(slots=True)
class Reading:
    """What one scrape found, section by section: metrics and seconds, or why there are none."""

    found: dict[str, tuple[list[Metric], float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    """Sections of plugins that this bus does not have."""

    def closed(self) -> Reading:
        """A copy that does not change any more; what is missing in it was late."""
        copy = Reading(dict(self.found), dict(self.failures), set(self.absent))
        for section in SECTIONS:
            if not (section.name in copy.found or section.name in copy.failures or section.name in copy.absent):
                copy.failures[section.name] = _LATE
        return copy


class Database:
    """One bus in one database. ``timeout`` and ``statement_timeout`` in seconds: for all sections, and for each."""

    def __init__(self, settings: BusSettings, timeout: float, statement_timeout: float) -> None:
        self._dsn = settings.dsn or ""
        self._schema = settings.schema_name
        self._timeout = timeout
        self._statement_timeout = statement_timeout
        self._parameters: Mapping[str, Any] = {
            "limit": COUNTED_UP_TO,
            "lease": settings.lease,
            "name": settings.schema_name,
        }
        self._thread: threading.Thread | None = None
        self._failing: frozenset[str] = frozenset()

    def read(self) -> Reading:
        """All sections, after ``timeout`` seconds at most. Not for two threads at once. Raises nothing."""
        reading = Reading()
        if self._thread is None or not self._thread.is_alive():
            deadline = time.monotonic() + self._timeout
            self._thread = threading.Thread(
                target=self._fill, args=(reading, deadline), name="eventbus metrics", daemon=True
            )
            self._thread.start()
            self._thread.join(self._timeout)
        closed = reading.closed()
        self._report(closed)
        return closed

    def _fill(self, reading: Reading, deadline: float) -> None:
        try:
            target = make_conninfo(
                self._dsn, connect_timeout=max(2, round(self._timeout)), application_name="eventbus metrics"
            )
            with psycopg.connect(target, autocommit=True, prepare_threshold=None, row_factory=dict_row) as connection:
                for section in SECTIONS:
                    if connection.closed:
                        reading.failures[section.name] = "the connection broke"
                    elif time.monotonic() < deadline:
                        self._look(connection, section, reading)
        except Exception as error:  # noqa: BLE001 - the other part of the metrics is still there
            for section in SECTIONS:
                if section.name not in reading.found and section.name not in reading.absent:
                    reading.failures.setdefault(section.name, _brief(error))

    def _look(self, connection: psycopg.Connection[dict[str, Any]], section: Section, reading: Reading) -> None:
        began = time.monotonic()
        try:
            with connection.transaction():
                connection.execute(self._rendered(sql.BEGIN))
                if section.relation is not None and not self._exists(connection, section.relation):
                    reading.absent.add(section.name)
                    return
                rows = connection.execute(self._rendered(section.query), self._parameters).fetchall()
            reading.found[section.name] = (list(section.families(rows)), time.monotonic() - began)
        except Exception as error:  # noqa: BLE001 - each section fails alone
            reading.failures[section.name] = _brief(error)

    def _exists(self, connection: psycopg.Connection[dict[str, Any]], relation: str) -> bool:
        [row] = connection.execute(self._rendered(sql.PRESENT), {"relation": relation}).fetchall()
        return bool(next(iter(row.values())))

    def _rendered(self, text: str) -> bytes:
        schema = compose.Identifier(self._schema).as_string()
        milliseconds = str(max(1, round(self._statement_timeout * 1000)))
        return text.replace("{schema}", schema).replace("{milliseconds}", milliseconds).encode()

    def _report(self, reading: Reading) -> None:
        """One line when sections begin to fail, one when all are well again."""
        failing = frozenset(reading.failures)
        if new := sorted(failing - self._failing):
            what = f"no {', '.join(new)}" if reading.found else "nothing of the database"
            reasons = dict.fromkeys(reading.failures[name] for name in new)
            log.warning("metrics: %s: %s", what, "; ".join(reasons))
        elif self._failing and not failing:
            log.info("metrics: all of the database again")
        self._failing = self._failing | failing if failing else frozenset()


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
