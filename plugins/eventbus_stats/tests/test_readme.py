"""The README says what is true: settings and their defaults, columns, bounds, and SQL that runs."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from eventbus_stats import Stats
from eventbus_stats.histogram import BOUNDS

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, str]:
    """The first two cells of the first table below a heading."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = section.partition("| --- |")[2]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {name.strip("`"): text.strip("`") for name, text, *_ in cells}


def test_every_setting_is_there_with_its_default_and_its_description() -> None:
    listed = rows("Settings")
    assert list(listed) == [*Stats.Settings.model_fields, "queues`, `except_queues"]
    for name, field in Stats.Settings.model_fields.items():
        assert float(listed[name]) == field.default
        assert str(field.description) in README


@pytest.mark.parametrize("major", [18], indirect=True)
def test_every_counter_of_the_table_is_explained_and_the_example_runs(table: psycopg.Connection) -> None:
    columns = table.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'eventbus.stats_minutes'::regclass AND attnum > 2"
        " AND atttypid = 'bigint'::regtype ORDER BY attnum"
    ).fetchall()
    assert list(rows("What is counted")) == [name for (name,) in columns]
    [example] = re.findall(r"```sql\n(.*?)```", README, re.DOTALL)
    assert table.execute(example.encode()).fetchall() == []


@pytest.mark.parametrize("major", [18], indirect=True)
def test_the_formula_of_the_bounds_is_theirs(table: psycopg.Connection) -> None:
    [formula] = re.findall(r"Bucket `n`\n?.*?ends at `([^`]+)`", README)
    found = table.execute(f"SELECT {formula} FROM generate_series(1, 55) n".encode()).fetchall()
    assert [float(bound) for (bound,) in found] == pytest.approx(list(BOUNDS))
