"""Percentiles: an operator who reads p99 must not be off by more than one bucket, whatever the times were."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus_stats.histogram import BOUNDS, Histogram, percentile

FACTOR = math.sqrt(2)
times = st.lists(st.floats(min_value=0, max_value=20_000), min_size=1, max_size=300)


def counted(*groups: list[float]) -> Histogram:
    histogram = Histogram()
    for group in groups:
        histogram.add(list(group))
    return histogram


def nearest_rank(values: list[float], share: float) -> float:
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


def test_the_bounds_never_change_because_minutes_of_older_versions_are_added_to_new_ones() -> None:
    assert BOUNDS[0] == 1e-4
    assert len(BOUNDS) == 55
    assert BOUNDS[-1] == pytest.approx(13_421.7728)
    assert all(upper / lower == pytest.approx(FACTOR) for lower, upper in pairwise(BOUNDS))


@given(times, st.floats(min_value=0, max_value=1))
def test_a_percentile_lies_in_the_bucket_of_the_true_one_and_never_above_the_longest(
    values: list[float], share: float
) -> None:
    histogram = counted(values)
    found = percentile(histogram.trimmed, share, histogram.longest)
    true = nearest_rank(values, share)
    assert found is not None
    assert found <= max(values)
    assert (
        bisect_left(BOUNDS, found * (1 - 1e-12))
        <= bisect_left(BOUNDS, true)
        <= bisect_left(BOUNDS, found * (1 + 1e-12))
    )
    if BOUNDS[0] < true <= BOUNDS[-1]:
        assert true / FACTOR <= found * (1 + 1e-9)
        assert found <= true * FACTOR * (1 + 1e-9)


@given(times)
def test_percentiles_rise_with_their_share_and_the_last_is_the_longest(values: list[float]) -> None:
    histogram = counted(values)
    found = [percentile(histogram.trimmed, share / 20, histogram.longest) for share in range(21)]
    assert all(lower is not None and upper is not None and lower <= upper for lower, upper in pairwise(found))
    assert found[-1] == pytest.approx(max(values))


@given(st.lists(times, max_size=5))
def test_counting_in_groups_is_counting_all_at_once(groups: list[list[float]]) -> None:
    together = counted([value for group in groups for value in group])
    assert counted(*groups).counts == together.counts
    assert counted(*groups).total == pytest.approx(together.total)
    assert counted(*groups).longest == together.longest


@given(times)
def test_every_time_is_counted_in_the_bucket_whose_upper_end_it_does_not_exceed(values: list[float]) -> None:
    expected = [0] * (len(BOUNDS) + 1)
    for value in values:
        expected[bisect_left(BOUNDS, value)] += 1
    assert counted(values).counts == expected


def test_a_clock_that_was_a_little_off_makes_no_negative_times() -> None:
    histogram = counted([-0.002, -0.001, 0.0, 0.5])
    assert (histogram.counts[0], sum(histogram.counts), histogram.total, histogram.longest) == (3, 4, 0.5, 0.5)
    below = counted([-0.002])
    assert (below.counts[0], below.total, below.longest) == (1, 0.0, 0.0)


def test_nothing_counted_has_no_percentile() -> None:
    assert percentile(Histogram().trimmed, 0.5, 0.0) is None
    assert Histogram().trimmed == []
    assert counted([]).counts == Histogram().counts


def test_what_is_stored_ends_with_the_last_bucket_that_has_something() -> None:
    assert counted([0.0001, 0.0003]).trimmed == [1, 0, 0, 0, 1]
