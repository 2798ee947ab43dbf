"""What a process counts before it writes: the columns, the waiting times, and that it stays small and cheap."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from eventbus.plugins import DatabaseClock, Result
from eventbus.plugins.values import OutcomeName
from eventbus_stats.gathering import Gathering, failures
from eventbus_stats.histogram import percentile

PUBLISHED = datetime(2030, 1, 1, tzinfo=UTC)
AHEAD = PUBLISHED.timestamp() - 100.0
"""The database's clock minus the monotonic one, which shows 100 when the event is published."""


@dataclass
class Group:
    """A settled group."""

    counts: Mapping[OutcomeName, int] = field(default_factory=dict)
    timings: Sequence[tuple[Any, float, float]] = ()
    results: Sequence[Result] = ()
    queue: str = "ledger"

    @property
    def seconds(self) -> Sequence[float]:
        return [seconds for _, _, seconds in self.timings]

    @property
    def has_failures(self) -> bool:
        return bool(self.counts.get("retry") or self.counts.get("dead"))

    @property
    def has_probe(self) -> bool:
        return False


class WithoutResults(Group):
    """One whose results must not be asked for: they cost more than delivering."""

    def __getattribute__(self, name: str) -> Any:
        assert name != "results"
        return super().__getattribute__(name)


def result(outcome: OutcomeName, *, error: bool) -> Result:
    return Result("ledger", None, outcome, 1, 100.0, 0.1, error={"type": "ValueError"} if error else None)


def gathered(*groups: Group, ahead: float | None = AHEAD) -> dict[str, Any]:
    gathering = Gathering(lambda: ahead)
    for group in groups:
        gathering.settled(group.queue, group)
    [row] = gathering.take()
    return row


def test_each_outcome_is_counted_in_its_column_and_parked_ones_not_before_they_are_handled() -> None:
    row = gathered(
        WithoutResults({"done": 7, "duplicate": 6, "discarded": 5, "retry": 4, "dead": 3, "released": 2, "parked": 9}),
        WithoutResults({"done": 1}),
    )
    assert {name: row[name] for name in ("handled", "duplicates", "discarded", "retried", "dead", "released")} == {
        "handled": 8, "duplicates": 6, "discarded": 5, "retried": 4, "dead": 3, "released": 2,
    }  # fmt: skip
    assert "parked" not in row
    assert row["failed"] == 7


def test_a_failure_that_was_postponed_is_one_and_waiting_for_another_copy_is_none() -> None:
    group = Group(
        {"deferred": 3, "done": 1},
        results=[result("deferred", error=True), *[result("deferred", error=False)] * 2, result("done", error=False)],
    )
    assert failures(group) == 1
    row = gathered(group)
    assert (row["deferred"], row["failed"]) == (3, 1)


def test_times_are_those_of_the_handler_and_from_publishing_to_its_start() -> None:
    row = gathered(WithoutResults({"done": 2}, [(PUBLISHED, 100.25, 0.5), (PUBLISHED, 101.0, 1.5)]))
    assert (row["seconds_sum"], row["seconds_max"]) == (pytest.approx(2.0), pytest.approx(1.5))
    assert (row["waited_sum"], row["waited_max"]) == (pytest.approx(1.25), pytest.approx(1.0))
    assert sum(row["seconds_buckets"]) == sum(row["waited_buckets"]) == 2


def test_deliveries_that_are_no_first_attempts_do_not_count_as_waiting() -> None:
    row = gathered(WithoutResults({"done": 2}, [(None, 100.25, 0.5), (PUBLISHED, 101.0, 1.5)]))
    assert (sum(row["seconds_buckets"]), sum(row["waited_buckets"])) == (2, 1)
    assert row["waited_max"] == pytest.approx(1.0)


def test_without_a_look_at_the_clock_there_are_no_waiting_times_but_all_others() -> None:
    row = gathered(WithoutResults({"done": 1}, [(PUBLISHED, 100.25, 0.5)]), ahead=None)
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
    gathering.settled("ledger", WithoutResults({"parked": 2}))
    assert gathering.take() == []


def test_memory_stays_small_however_long_nothing_can_be_written() -> None:
    gathering = Gathering(lambda: AHEAD)
    for size in (1, 7, 199, 399, 400, 1_000, 2_999) * 5:
        gathering.settled("ledger", WithoutResults({"done": size}, [(PUBLISHED, 101.0, 0.001)] * size))
        assert len(gathering._of("ledger").timings) < 1_000
    [row] = gathering.take()
    assert (row["handled"], sum(row["seconds_buckets"]), sum(row["waited_buckets"])) == (5 * 5_005,) * 3
    assert row["seconds_sum"] == pytest.approx(5 * 5.005)
    assert row["waited_sum"] == pytest.approx(5 * 5_005)


def test_of_a_large_group_those_that_waited_are_counted_by_their_share() -> None:
    timings = [(PUBLISHED if n % 3 else None, 101.0, 0.001) for n in range(1_700)]
    row = gathered(WithoutResults({"done": 1_700}, timings))
    assert sum(row["seconds_buckets"]) == 1_700
    assert sum(row["waited_buckets"]) == pytest.approx(sum(n % 3 > 0 for n in range(1_700)), rel=0.05)


def test_of_a_large_group_a_sample_decides_the_percentiles_and_the_longest_is_never_missed() -> None:
    draws = random.Random(5)
    seconds = [draws.lognormvariate(-6, 1) for _ in range(5_000)]
    seconds[3_333] = 30.0
    row = gathered(WithoutResults({"done": 5_000}, [(PUBLISHED, 100.0 + each, each) for each in seconds]))
    assert row["seconds_max"] == 30.0
    assert row["seconds_sum"] == pytest.approx(sum(seconds))
    assert (sum(row["seconds_buckets"]), sum(row["waited_buckets"])) == (5_000, 5_000)
    for share in (0.5, 0.95):
        true = sorted(seconds)[int(share * 5_000)]
        for times in ("seconds_buckets", "waited_buckets"):
            found = percentile(row[times], share, 30.0)
            assert found is not None
            assert true / 2 < found < true * 2


def test_counting_costs_a_fraction_of_what_an_event_costs() -> None:
    draws = random.Random(4)
    timings = [
        (PUBLISHED + timedelta(microseconds=17 * n), 100.0 + 2e-5 * n, draws.lognormvariate(-6, 1)) for n in range(200)
    ]
    group = WithoutResults({"done": 200}, timings)
    best = min(seconds_per_event(group) for _ in range(5))
    assert best < 3e-6, "an event costs about 8 µs; this takes about 0.3 µs where nothing else runs"


def seconds_per_event(group: Group) -> float:
    gathering = Gathering(lambda: AHEAD)
    began = time.process_time()
    for _ in range(50):
        gathering.settled("ledger", group)
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
