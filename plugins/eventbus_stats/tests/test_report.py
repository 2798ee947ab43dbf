"""What the figures say: rates, error rates, percentiles and charts, of one queue and of the whole bus."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from eventbus_stats.histogram import Histogram
from eventbus_stats.report import Counts, Report, look, names, recent_of, report_of, step_of

NOW = datetime(2030, 1, 1, 12, 30, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)
one_server = pytest.mark.parametrize("major", [18], indirect=True)


def row(queue: str = "ledger", **given: Any) -> dict[str, Any]:
    counters = dict.fromkeys(Counts.__slots__, 0)
    times = {"seconds_sum": 0.0, "seconds_max": 0.0, "waited_sum": 0.0, "waited_max": 0.0}
    return {
        "queue": queue, "first": NOW - timedelta(minutes=10), "recent": None, "steps": {}, **counters, **times,
        "seconds_buckets": [], "waited_buckets": [], **given,
    }  # fmt: skip


def of(*rows: dict[str, Any], since: datetime = NOW - HOUR) -> Report:
    return report_of(rows, since, NOW, NOW)


def test_the_mean_is_since_anything_happened_in_the_period_and_not_since_its_beginning() -> None:
    report = of(row(handled=600), row("mails", handled=60, first=NOW - timedelta(minutes=1)))
    assert [each.per_second for each in report.queues] == [pytest.approx(1.0), pytest.approx(0.1)]
    assert report.per_second == pytest.approx(1.1)


def test_now_is_since_the_beginning_of_the_minute_before_this_one() -> None:
    assert recent_of(NOW) == datetime(2030, 1, 1, 12, 29, tzinfo=UTC)
    assert recent_of(NOW.astimezone(datetime.strptime("+0545", "%z").tzinfo)) == recent_of(NOW)
    [queue] = of(row(handled=600, recent=45)).queues
    assert queue.per_second_now == pytest.approx(0.5)
    [young] = of(row(handled=60, recent=60, first=datetime(2030, 1, 1, 12, 30, tzinfo=UTC))).queues
    assert young.per_second_now == pytest.approx(2.0)


def test_a_share_of_all_calls_failed_and_without_calls_there_is_none() -> None:
    report = of(row(handled=90, failed=5, discarded=5, duplicates=100), row("mails", published=1))
    assert [each.error_rate for each in report.queues] == [pytest.approx(0.05), None]
    assert report.error_rate == pytest.approx(0.05)


def test_the_busiest_queue_comes_first() -> None:
    report = of(row("a", handled=1), row("c", handled=5), row("b", handled=1), row("d", published=1))
    assert [each.queue for each in report.queues] == ["c", "a", "b", "d"]


def test_percentiles_come_from_the_buckets_and_the_mean_from_the_sum() -> None:
    seconds = Histogram()
    seconds.add([0.001] * 90 + [0.1] * 9 + [2.0])
    [queue] = of(
        row(handled=100, seconds_buckets=seconds.trimmed, seconds_sum=seconds.total, seconds_max=seconds.longest)
    ).queues
    times = queue.handler
    assert times is not None
    assert times.p50 == pytest.approx(0.001, rel=0.42)
    assert [times.p95, times.p99] == pytest.approx([0.1, 0.1], rel=0.42)
    assert times.mean == pytest.approx(0.0299)
    assert (times.count, times.longest) == (100, 2.0)
    assert queue.waiting is None


def test_charts_have_at_most_sixty_steps_and_begin_with_the_period() -> None:
    assert step_of(NOW - HOUR, NOW) == 60
    assert step_of(NOW - HOUR, NOW + timedelta(seconds=59)) == 60
    assert step_of(NOW - HOUR, NOW + timedelta(seconds=60)) == 120
    assert step_of(NOW, NOW) == 60
    assert step_of(NOW - timedelta(days=30), NOW) == 43_200
    report = of(row(handled=9, steps={"0": 4, "59": 3, "60": 2}), since=datetime(2030, 1, 1, 11, 30, tzinfo=UTC))
    [queue] = report.queues
    assert report.step_seconds == 60
    assert queue.chart == [4, *[0] * 58, 3, 2]


def test_the_total_adds_up_all_queues() -> None:
    report = of(row(published=3, handled=2, lost_leases=1), row("mails", published=4, dead=1))
    assert (report.total.published, report.total.handled, report.total.dead, report.total.lost_leases) == (7, 2, 1, 1)


def insert(connection: psycopg.Connection, minutes_ago: int, queue: str, **columns: Any) -> None:
    listed = ", ".join(columns)
    connection.execute(
        f"INSERT INTO eventbus.stats_minutes (minute, queue, {listed}) VALUES (date_trunc('minute',"
        f" clock_timestamp() - make_interval(mins => %s)), %s, {', '.join(['%s'] * len(columns))})".encode(),
        [minutes_ago, queue, *columns.values()],
    )


def test_what_is_asked_for_is_what_is_added_up(table: psycopg.Connection) -> None:
    insert(table, 5, "ledger", handled=10, failed=1, seconds_buckets=[1, 2], seconds_sum=1.0, seconds_max=0.1)
    insert(table, 3, "ledger", handled=20, seconds_buckets=[0, 0, 5], seconds_sum=2.0, seconds_max=0.4)
    insert(table, 0, "ledger", handled=7, waited_buckets=[0, 4], waited_sum=0.5, waited_max=0.2)
    insert(table, 5, "mails", handled=1, published=2)
    insert(table, 90, "ledger", handled=1_000, dead=3)
    report = look(table, "eventbus", HOUR)
    ledger, mails = report.queues
    assert (ledger.counts.handled, ledger.counts.failed, ledger.counts.dead) == (37, 1, 0)
    assert (mails.counts.handled, mails.counts.published) == (1, 2)
    assert ledger.handler is not None
    assert ledger.handler.mean == pytest.approx(3 / 8)
    assert (ledger.handler.count, ledger.handler.longest) == (8, 0.4)
    assert ledger.waiting is not None
    assert (ledger.waiting.count, ledger.waiting.longest) == (4, 0.2)
    assert sum(ledger.chart) == 37
    assert max(ledger.chart[-7:-2]) == 20
    assert ledger.per_second_now == pytest.approx(7 / 90, rel=0.6)
    assert look(table, "eventbus", timedelta(hours=2)).total.handled == 1_038
    assert look(table, "eventbus", timedelta(minutes=4)).total.handled == 27
    assert [each.queue for each in look(table, "eventbus", HOUR, "mails").queues] == ["mails"]
    moment = datetime.now(UTC) - timedelta(minutes=4)
    assert look(table, "eventbus", moment).total.handled == 27


@one_server
def test_an_empty_period_says_when_the_newest_figures_are_from(table: psycopg.Connection) -> None:
    empty = look(table, "eventbus", HOUR)
    assert (empty.queues, empty.newest, empty.total) == ([], None, Counts())
    insert(table, 90, "ledger", handled=1)
    later = look(table, "eventbus", HOUR)
    assert later.queues == []
    assert later.newest is not None
    assert timedelta(minutes=89) < later.until - later.newest < timedelta(minutes=92)
    assert look(table, "eventbus", HOUR, "mails").newest is None


@one_server
def test_queues_that_were_dropped_are_known_as_long_as_there_are_figures(table: psycopg.Connection) -> None:
    table.execute("SELECT eventbus.declare_queues(%s)", ['[{"name": "mails", "patterns": ["a"]}]'])
    insert(table, 1, "ledger", handled=1)
    assert names(table, "eventbus") == ["ledger", "mails"]


@one_server
def test_a_month_of_many_queues_is_added_up_in_the_time_that_a_person_waits(table: psycopg.Connection) -> None:
    table.execute(
        "INSERT INTO eventbus.stats_minutes (minute, queue, handled, seconds_buckets, seconds_max)"
        " SELECT date_trunc('minute', now()) - make_interval(mins => m), 'queue' || q, 1, '{0,0,0,1,1,1}', 0.0005"
        " FROM generate_series(0, 10000) m, generate_series(1, 4) q"
    )
    table.execute("SET statement_timeout = '20s'")
    report = look(table, "eventbus", timedelta(days=30))
    assert [each.counts.handled for each in report.queues] == [10_001] * 4
