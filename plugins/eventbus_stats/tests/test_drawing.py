"""What a person sees: tables that fit the terminal, numbers that are never more exact than they are true."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus_stats.drawing import LEVELS, Table, chart, delays, everything, headline, length_of, others, rate, share
from eventbus_stats.drawing import speeds as speeds_of
from eventbus_stats.report import Counts, QueueReport, Report, Times

NOW = datetime(2030, 1, 1, 12, 0, 30, tzinfo=UTC)


def queue(name: str = "shop.receipts.send_receipt", p99: float | None = 0.1, **counts: int) -> QueueReport:
    counted = Counts(**counts)
    times = None if p99 is None else Times(10, 0.01, 0.005, 0.05, p99, p99 * 2)
    return QueueReport(name, counted, counted.error_rate, 1.5, 2.5, times, times, [60 * n for n in range(61)])


def report(*queues: QueueReport) -> Report:
    names = Counts.__slots__
    total = Counts(**{name: sum(getattr(each.counts, name) for each in queues) for name in names})
    since = NOW - timedelta(minutes=60, seconds=30)
    return Report(since, NOW, NOW, 60, total, total.error_rate, 3.0, 5.0, queues)


def widths(table: Table) -> int:
    columns, rows = table
    lines: list[Sequence[Any]] = [[column.title for column in columns], *rows]
    assert {len(line) for line in lines} == {len(columns)}
    return sum(max(len(str(line[n])) for line in lines) for n in range(len(columns))) + 3 * (len(columns) - 1)


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_tables_fit_the_terminal_and_the_chart_takes_what_is_left(width: int) -> None:
    shown = report(queue(handled=3_512_711, failed=14_696), queue("ledger", handled=1))
    assert widths(speeds_of(shown, width, charts=True)) <= width
    assert widths(delays(shown, width)) <= width
    line = speeds_of(shown, width, charts=True)[1][0][-1]
    assert isinstance(line, str)
    assert 8 <= len(line) <= 61


def test_without_blocks_in_the_encoding_there_is_no_chart_and_all_else_is_there() -> None:
    columns, [row] = speeds_of(report(queue(handled=5)), 120, charts=False)
    assert [column.title for column in columns] == ["queue", "handled", "now/s", "mean/s", "failed"]
    assert row == ["shop.receipts.send_receipt", "5", "2.50", "1.50", "0"]


@given(st.lists(st.floats(min_value=0, max_value=1e6), max_size=100), st.integers(min_value=1, max_value=80))
def test_a_chart_is_never_wider_than_its_room_and_shows_the_highest_as_full(values: list[float], width: int) -> None:
    drawn = chart(values, width)
    assert len(drawn) <= width
    assert set(drawn) <= {*LEVELS, "·"}
    assert (LEVELS[-1] in drawn) == (max(values, default=0.0) > 0)


def test_a_chart_rises_with_its_values_and_tells_nothing_from_little() -> None:
    assert chart([1, 2, 3, 4, 5, 6, 7, 8], 8) == LEVELS
    assert chart([0, 0.001, 100], 8) == "·▁█"
    assert chart([0, 0, 4, 4, 8, 8], 3) == "·▄█"
    assert chart([9, 0, 0, 8, 8], 3) == "█·█"


def test_the_step_that_has_only_begun_is_no_fall_in_the_chart() -> None:
    steady = QueueReport("ledger", Counts(handled=1), None, 1.0, 1.0, None, None, [*[600] * 60, 300])
    [[*_, line]] = speeds_of(report(steady), 200, charts=True)[1]
    assert line == "█" * 61


def test_the_slowest_handler_comes_first() -> None:
    shown = report(queue("fast", 0.01), queue("slow", 5.0), queue("never called", None), queue("middle", 0.1))
    assert [row[0] for row in delays(shown, 80)[1]] == ["slow", "middle", "fast"]
    assert delays(shown, 80)[1][0] == ["slow", "5ms", "50ms", "5s", "5ms", "50ms", "5s"]
    assert delays(shown, 120)[1][0] == ["slow", "5ms", "50ms", "5s", "10s", "5ms", "50ms", "5s", "10s"]


def test_of_rare_counters_only_those_are_shown_that_have_counted() -> None:
    shown = report(queue("a", handled=1), queue("b", dead=2, lost_leases=1), queue("c", dead=1))
    columns, rows = others(shown)
    assert [column.title for column in columns] == ["queue", "dead", "lost leases"]
    assert rows == [["b", "2", "1"], ["c", "1", ""]]
    assert others(report(queue("a", handled=1)))[1] == []


def test_a_pipe_gets_every_column_in_one_table() -> None:
    columns, rows = everything(report(queue(published=3, handled=2, failed=1), queue("ledger", None)))
    titles = [column.title for column in columns]
    assert {len(row) for row in rows} == {len(titles)}
    first = dict(zip(titles, rows[0], strict=True))
    assert (first["published"], first["handled"], first["error rate"], first["wait longest"]) == (
        3,
        2,
        "33.3%",
        "200ms",
    )


def test_the_first_line_tells_of_the_whole_bus() -> None:
    line = headline(report(queue(published=30, handled=20, failed=5, dead=1), queue("ledger", handled=1_000)))
    assert line.endswith("30 published, 1,020 handled (3.00/s, now 5.00/s), 5 failed (0.5%), 1 dead")
    assert headline(report(queue(handled=1))).endswith("1 handled (3.00/s, now 5.00/s), none failed")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.0, "0µs"), (0.00035, "350µs"), (0.0009999, "1ms"), (0.00123, "1.2ms"), (0.0449, "45ms"),
     (0.9996, "1s"), (1.25, "1.2s"), (45.0, "45s"), (59.9, "1min"), (150.0, "2.5min"), (3_599.0, "1h"),
     (10_800.0, "3h"), (360_000.0, "100h")],
)  # fmt: skip
def test_lengths_of_time_have_two_digits_and_the_unit_that_suits_them(seconds: float | None, text: str) -> None:
    assert length_of(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (0.001, "<0.01"), (0.25, "0.25"), (12.54, "12.5"), (1_250.4, "1,250")],
)
def test_rates_have_three_digits_and_little_is_not_shown_as_nothing(number: float, text: str) -> None:
    assert rate(number) == text


@pytest.mark.parametrize(
    ("part", "text"), [(None, ""), (0.0, "0.0%"), (0.0001, "<0.1%"), (0.107, "10.7%"), (1, "100.0%")]
)
def test_shares_are_percent_and_little_is_not_shown_as_nothing(part: float | None, text: str) -> None:
    assert share(part) == text
