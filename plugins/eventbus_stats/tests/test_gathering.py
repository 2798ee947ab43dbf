"""What a process counts before it writes: the columns, the waiting times, and that it stays small and cheap."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from eventbus.plugins import DatabaseClock, Timing
from eventbus.plugins.values import OutcomeName
from eventbus_stats.gathering import Gathering
from eventbus_stats.histogram import percentile

PUBLISHED = datetime(2030, 1, 1, tzinfo=UTC)
AHEAD = PUBLISHED.timestamp() - 100.0
"""The database's clock minus the monotonic one, which shows 100 when the event is published."""


@dataclass
class Group:
    """A group that was counted."""

    counts: Mapping[OutcomeName, int] = field(default_factory=dict)
    timings: Sequence[Timing] = ()
    failures: int = 0
    calls: int = 0


def gathered(*groups: Group, ahead: float | None = AHEAD) -> dict[str, Any]:
    gathering = Gathering(lambda: ahead)
    for group in groups:
        gathering.add("ledger", group)
    [row] = gathering.take()
    return row


def test_each_outcome_is_counted_in_its_column_and_parked_ones_not_before_they_are_handled() -> None:
    row = gathered(
        Group(
            {"done": 7, "duplicate": 6, "discarded": 5, "retry": 4, "dead": 3, "released": 2, "parked": 9}, failures=7
        ),
        Group({"done": 1}),
    )
    assert {name: row[name] for name in ("handled", "duplicates", "discarded", "retried", "dead", "released")} == {
        "handled": 8, "duplicates": 6, "discarded": 5, "retried": 4, "dead": 3, "released": 2,
    }  # fmt: skip
    assert "parked" not in row
    assert row["failed"] == 7


def test_times_are_those_of_the_handler_and_from_publishing_to_its_start() -> None:
    row = gathered(Group({"done": 2}, [Timing(PUBLISHED, 100.25, 0.5), Timing(PUBLISHED, 101.0, 1.5)]))
    assert (row["seconds_sum"], row["seconds_max"]) == (pytest.approx(2.0), pytest.approx(1.5))
    assert (row["waited_sum"], row["waited_max"]) == (pytest.approx(1.25), pytest.approx(1.0))
    assert sum(row["seconds_buckets"]) == sum(row["waited_buckets"]) == 2


def test_deliveries_that_are_no_first_attempts_do_not_count_as_waiting() -> None:
    row = gathered(Group({"done": 2}, [Timing(None, 100.25, 0.5), Timing(PUBLISHED, 101.0, 1.5)]))
    assert (sum(row["seconds_buckets"]), sum(row["waited_buckets"])) == (2, 1)
    assert row["waited_max"] == pytest.approx(1.0)


def test_without_a_look_at_the_clock_there_are_no_waiting_times_but_all_others() -> None:
    row = gathered(Group({"done": 1}, [Timing(PUBLISHED, 100.25, 0.5)]), ahead=None)
    assert (sum(row["seconds_buckets"]), row["waited_buckets"], row["handled"]) == (1, [], 1)


def test_queues_are_kept_apart_and_taken_once() -> None:
    gathering = Gathering(lambda: AHEAD)
    gathering.count("mails", "published", 3)
    gathering.count("ledger", "lost_leases", 1)
    gathering.count("mails", "published", 2)
    assert [(row["queue"], row.get("published"), row.get("lost_leases")) for row in gathering.take()] == [
        ("ledger", None, 1),
        ("mails", 5, None),
    ]
    assert gathering.take() == []


def test_a_queue_in_which_nothing_was_counted_is_not_written() -> None:
    gathering = Gathering(lambda: AHEAD)
    gathering.add("ledger", Group({"parked": 2}))
    assert gathering.take() == []


def test_memory_stays_small_however_long_nothing_can_be_written() -> None:
    gathering = Gathering(lambda: AHEAD)
    for size in (1, 7, 199, 399, 400, 1_000, 2_999) * 5:
        gathering.add("ledger", Group({"done": size}, [Timing(PUBLISHED, 101.0, 0.001)] * size))
        assert len(gathering._of("ledger").timings) < 1_000
    [row] = gathering.take()
    assert (row["handled"], sum(row["seconds_buckets"]), sum(row["waited_buckets"])) == (5 * 5_005,) * 3
    assert row["seconds_sum"] == pytest.approx(5 * 5.005)
    assert row["waited_sum"] == pytest.approx(5 * 5_005)


def test_a_time_that_stands_for_several_calls_is_counted_for_each_of_them() -> None:
    timings = [Timing(PUBLISHED, 101.0, 0.5, 3), Timing(None, 101.0, 0.001, 5), Timing(PUBLISHED, 102.0, 4.0)]
    row = gathered(Group({"done": 9}, timings))
    assert (sum(row["seconds_buckets"]), sum(row["waited_buckets"])) == (9, 4)
    assert row["seconds_sum"] == pytest.approx(3 * 0.5 + 5 * 0.001 + 4.0)
    assert row["waited_sum"] == pytest.approx(3 * 1.0 + 2.0)
    assert (row["seconds_max"], row["waited_max"]) == (4.0, pytest.approx(2.0))
    assert percentile(row["seconds_buckets"], 0.5, 4.0) == pytest.approx(0.001, rel=0.5)


def test_counting_costs_a_fraction_of_what_an_event_costs() -> None:
    draws = random.Random(4)
    timings = [
        Timing(PUBLISHED + timedelta(microseconds=17 * n), 100.0 + 2e-5 * n, draws.lognormvariate(-6, 1))
        for n in range(200)
    ]
    group = Group({"done": 200}, timings)
    best = min(seconds_per_event(group) for _ in range(5))
    assert best < 3e-6, "an event costs about 8 µs; this takes about 0.3 µs where nothing else runs"


def seconds_per_event(group: Group) -> float:
    gathering = Gathering(lambda: AHEAD)
    began = time.process_time()
    for _ in range(50):
        gathering.add("ledger", group)
    gathering.take()
    return (time.process_time() - began) / (50 * 200)


async def test_the_measurement_with_the_shortest_round_trip_counts_until_it_is_old() -> None:
    readings = iter([0.0, 4.0, 10.0, 10.2, *(20.0 + n / 2 for n in range(24))])
    clock = DatabaseClock(lambda: next(readings))
    assert clock.ahead is None

    async def at(seconds: float) -> None:
        async def now() -> float:
            return seconds

        await clock.measure(now)

    await at(1_000.0)
    assert clock.ahead == pytest.approx(998.0)
    await at(1_010.1)
    assert clock.ahead == pytest.approx(1_000.0)
    for n in range(11):
        await at(5_020.25 + n)
        assert clock.ahead == pytest.approx(1_000.0)
    await at(5_031.25)
    assert clock.ahead == pytest.approx(5_000.0)


async def test_a_database_that_does_not_answer_changes_nothing_about_the_clock() -> None:
    readings = iter([0.0, 4.0, 10.0])
    clock = DatabaseClock(lambda: next(readings))

    async def now() -> float:
        return 1_000.0

    async def away() -> float:
        raise ConnectionError

    await clock.measure(now)
    with pytest.raises(ConnectionError):
        await clock.measure(away)
    assert clock.ahead == pytest.approx(998.0)
