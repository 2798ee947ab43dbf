"""Waits between attempts: what a user would lose if the arithmetic were wrong."""

from __future__ import annotations

import itertools
import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.errors import ConfigurationError
from eventbus.retry import LONGEST_WAIT, RetryPolicy


def middle() -> float:
    return 0.5


def test_waits_double_from_one_second_so_that_a_short_outage_is_survived() -> None:
    policy = RetryPolicy(jitter=False)
    assert [policy.delay(n, middle) for n in range(1, 11)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]


def test_the_first_wait_is_one_second_on_average_so_that_it_is_neither_a_busy_loop_nor_a_long_pause() -> None:
    policy = RetryPolicy()
    assert policy.delay(1, middle) == pytest.approx(1.0)
    assert policy.delay(1, lambda: 0.0) == pytest.approx(0.1)
    assert policy.delay(1, lambda: 1.0) == pytest.approx(1.9)


def test_jitter_spreads_retries_that_failed_together_so_that_the_struggling_service_is_not_hit_at_once() -> None:
    draws = itertools.count()
    waits = [RetryPolicy().delay(3, lambda: next(draws) / 100) for _ in range(101)]
    assert len(set(waits)) == 101
    assert min(waits) == pytest.approx(0.4)
    assert max(waits) == pytest.approx(7.6)


def test_without_jitter_no_random_number_is_asked_for() -> None:
    def refuse() -> float:
        raise AssertionError("called")

    assert RetryPolicy(jitter=False).delay(2, refuse) == 2.0


@pytest.mark.parametrize("failed", [70, 1_100, 4_999, 5_000, 2**31, 2**63, 10**400])
def test_a_counter_of_any_height_gives_a_capped_wait_instead_of_a_crash_or_an_instant_retry(failed: int) -> None:
    policy = RetryPolicy(max_attempts=5_000)
    assert policy.delay(failed, lambda: 0.0) == pytest.approx(30.0)
    assert policy.delay(failed, lambda: 1.0) == 300.0


def test_a_huge_factor_is_capped_instead_of_overflowing() -> None:
    policy = RetryPolicy(factor=1e9)
    assert policy.delay(2, lambda: 1.0) == 300.0
    assert RetryPolicy(factor=1e308, jitter=False).delay(3, middle) == 300.0
    assert RetryPolicy(factor=10**300, jitter=False).delay(2, middle) == 300.0


@pytest.mark.parametrize("failed", [0, -1, -(2**63)])
def test_a_counter_that_someone_reset_by_sql_gives_the_first_wait_instead_of_none(failed: int) -> None:
    assert RetryPolicy(jitter=False).delay(failed, middle) == 1.0


def test_factor_one_keeps_all_waits_equal() -> None:
    policy = RetryPolicy(first=5, factor=1, cap=60, jitter=False)
    assert {policy.delay(n, middle) for n in (1, 2, 70, 2**63)} == {5.0}


@given(
    failed=st.integers(min_value=-(2**70), max_value=2**70),
    first=st.floats(0.001, 1e6),
    factor=st.floats(1, 1e300),
    cap=st.floats(1e6, LONGEST_WAIT),
    random=st.floats(0, 1),
    jitter=st.booleans(),
)
def test_no_policy_ever_waits_zero_or_longer_than_its_cap(
    failed: int, first: float, factor: float, cap: float, random: float, jitter: bool
) -> None:
    wait = RetryPolicy(5, first, factor, cap, jitter).delay(failed, lambda: random)
    assert isinstance(wait, float)
    assert first * 0.0999 < wait <= cap
    assert timedelta(seconds=wait) > timedelta(0)


def test_the_configured_number_of_attempts_is_exact() -> None:
    policy = RetryPolicy(max_attempts=3)
    assert [policy.exhausted(n) for n in (0, 1, 2, 3, 4)] == [False, False, False, True, True]
    assert RetryPolicy(max_attempts=1).exhausted(1)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": 2.5}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"max_attempts": 10**7}, "max_attempts"),
        ({"first": 0}, "first"),
        ({"first": -1.0}, "first"),
        ({"first": math.nan}, "first"),
        ({"first": "1"}, "first"),
        ({"first": timedelta(seconds=1)}, "first"),
        ({"factor": 0.5}, "factor"),
        ({"factor": math.inf}, "factor"),
        ({"factor": math.nan}, "factor"),
        ({"first": 10.0, "cap": 5.0}, "cap"),
        ({"cap": math.inf}, "cap"),
        ({"cap": math.nan}, "cap"),
        ({"cap": None}, "cap"),
        ({"jitter": 0.5}, "jitter"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_at_once_with_the_name_of_the_option(
    options: dict[str, object], option: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        RetryPolicy(**options)  # type: ignore[arg-type]
    assert str(refused.value).startswith(f"RetryPolicy({option}={options[option]!r}): {option} must be ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (RetryPolicy(max_attempts=1), 0.0),
        (RetryPolicy(max_attempts=4, first=1, factor=2, cap=300, jitter=False), 1 + 2 + 4),
        (RetryPolicy(max_attempts=4, first=1, factor=2, cap=300), 1.9 * (1 + 2 + 4)),
        (RetryPolicy(max_attempts=6, first=1, factor=2, cap=5, jitter=False), 1 + 2 + 4 + 5 + 5),
        (RetryPolicy(max_attempts=1_000_000, first=1, factor=1, cap=1), 999_999),
        (RetryPolicy(max_attempts=1_000_000, first=1, factor=1, cap=1000, jitter=False), 999_999),
    ],
)
def test_the_longest_path_is_what_an_event_waits_when_every_attempt_fails_and_every_wait_is_the_longest(
    policy: RetryPolicy, seconds: float
) -> None:
    assert policy.longest_path() == pytest.approx(seconds)
    draws = [sum(policy.delay(failed, lambda: 1.0) for failed in range(1, min(policy.max_attempts, 100)))]
    assert policy.longest_path() >= max(draws) - 1e-6
