"""The same figures twice: from the tables that the consumers keep, and directly from the data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd  # type: ignore[import-untyped]
import psycopg

Figures = Mapping[tuple[Any, ...], tuple[int, ...]]
"""What is counted for whom: ``('UA',)`` or ``('JFK', 'departed')`` and its numbers."""


SHOWN: Final = 3
"""Differences of one table that are spelled out."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One table against the data set."""

    table: str
    expected: Figures
    found: Figures

    @property
    def figures(self) -> int:
        """How many numbers are compared."""
        return sum(len(numbers) for numbers in self.expected.values())

    @property
    def differences(self) -> list[tuple[Any, ...]]:
        """The keys whose numbers are not the same, or that only one side has."""
        return sorted(key for key in {*self.expected, *self.found} if self.expected.get(key) != self.found.get(key))

    @property
    def verdict(self) -> str:
        """``equal``, or ``DIFFERENT`` and the first differences."""
        different = self.differences
        if not different:
            return "equal"
        shown = [
            f"{' '.join(key)} has {_numbers(self.found.get(key))} instead of {_numbers(self.expected.get(key))}"
            for key in different[:SHOWN]
        ]
        more = [f"{len(different) - SHOWN} more"] if len(different) > SHOWN else []
        return f"DIFFERENT: {'; '.join([*shown, *more])}"


def compare(conn: psycopg.Connection, frame: pd.DataFrame) -> list[Comparison]:
    """Every table of the example against ``frame``, the flights that were published."""
    return [
        Comparison("flights", _published(frame), _read(conn, _PUBLISHED)),
        Comparison("carrier_delays", _carrier_delays(frame), _read(conn, _CARRIER_DELAYS)),
        Comparison("airport_board", _airport_board(frame), _read(conn, _AIRPORT_BOARD)),
        Comparison("audit_count", _audit_count(frame), _read(conn, _AUDIT_COUNT)),
    ]


_PUBLISHED = "SELECT origin, count(*), count(departure_delay) FROM flights GROUP BY origin"
_CARRIER_DELAYS = "SELECT carrier, flights, minutes, late, worst FROM carrier_delays"
_AIRPORT_BOARD = "SELECT airport, status, flights, minutes FROM airport_board"
_AUDIT_COUNT = "SELECT topic, events FROM audit_count"


def _numbers(numbers: tuple[int, ...] | None) -> str:
    return "nothing" if numbers is None else " ".join(f"{number:,}" for number in numbers)


def _read(conn: psycopg.Connection, query: str) -> Figures:
    """Text columns are what is counted, numbers are the counts."""
    rows = conn.execute(query.encode()).fetchall()
    return {
        tuple(value for value in row if isinstance(value, str)): tuple(
            int(value) for value in row if not isinstance(value, str)
        )
        for row in rows
    }


def _published(frame: pd.DataFrame) -> Figures:
    return _figures(frame.groupby("origin"), lambda rows: (len(rows), rows.dep_time.count()))


def _carrier_delays(frame: pd.DataFrame) -> Figures:
    departed = frame[frame.dep_time.notna()]
    return _figures(
        departed.groupby("carrier"),
        lambda rows: (len(rows), rows.dep_delay.sum(), (rows.dep_delay > 15).sum(), rows.dep_delay.max()),
    )


def _airport_board(frame: pd.DataFrame) -> Figures:
    departed = frame[frame.dep_time.notna()]
    cancelled = frame[frame.dep_time.isna()]
    arrived = departed[departed.arr_delay.notna()]
    diverted = departed[departed.arr_delay.isna()]
    at_either = Counter(cancelled.origin) + Counter(cancelled.dest)
    return {
        **_at_airport(departed.groupby("origin"), "departed", "dep_delay"),
        **_at_airport(arrived.groupby("dest"), "arrived", "arr_delay"),
        **_at_airport(diverted.groupby("dest"), "diverted", "arr_delay"),
        **{(airport, "cancelled"): (flights, 0) for airport, flights in at_either.items()},
    }


def _at_airport(groups: Iterable[tuple[str, Any]], status: str, delay: str) -> Figures:
    return {(airport, status): (len(rows), int(rows[delay].sum())) for airport, rows in groups}


def _audit_count(frame: pd.DataFrame) -> Figures:
    outcome = frame.dep_time.isna().map({True: "cancelled", False: "departed"})
    topics = "flights." + outcome + "." + frame.carrier
    return {(topic,): (int(events),) for topic, events in topics.value_counts().items()}


def _figures(groups: Iterable[tuple[str, Any]], numbers: Any) -> Figures:
    return {(name,): tuple(int(number) for number in numbers(rows)) for name, rows in groups}
