"""A long change goes as fast as was asked and not faster, leaves others their share, and stops when it is told."""

from __future__ import annotations

from threading import Event

import pytest

from eventbus.postgres.choosing import InvalidChoice
from eventbus.postgres.pacing import Pace


class Time(Event):
    """Time that passes only while somebody waits for this event, or works."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(round(timeout, 6))
        self.now += max(timeout, 0)
        return self.is_set()

    def pace(self, rate: float | None = None, batch: int = 500) -> Pace:
        return Pace(rate, batch=batch, stopped=self, clock=lambda: self.now)


@pytest.mark.parametrize(("rate", "batch"), [(0.5, 1), (1, 1), (9.9, 1), (30, 3), (1000, 100), (1e9, 500), (None, 500)])
def test_a_rate_is_reached_in_steps_of_a_tenth_of_a_second(rate: float | None, batch: int) -> None:
    assert Time().pace(rate).batch == batch


@pytest.mark.parametrize("rate", [0.25, 1, 40, 999])
def test_no_more_than_the_rate_passes_in_any_second(rate: float) -> None:
    time = Time()
    pace = time.pace(rate)
    moments = []
    for step in range(60):
        time.now += 0.003
        moments.append(time.now)
        assert pace.goes_on(pace.batch, finished=False), step
    lasted = moments[-1] - moments[0]
    assert (len(moments) - 1) * pace.batch / lasted == pytest.approx(rate, rel=0.02)


def test_time_that_was_lost_is_not_caught_up_with() -> None:
    time = Time()
    pace = time.pace(10)
    time.now += 60
    pace.goes_on(1, finished=False)
    before = time.now
    pace.goes_on(1, finished=False)
    assert time.now - before == pytest.approx(0.1)


def test_without_a_rate_the_relay_gets_a_third_of_the_time() -> None:
    time = Time()
    pace = time.pace()
    for _ in range(3):
        time.now += 0.2
        assert pace.goes_on(500, finished=False)
    assert time.waits == [0.1, 0.1, 0.1]


def test_the_end_is_not_waited_for() -> None:
    time = Time()
    assert not time.pace(0.01).goes_on(1, finished=True)
    assert time.waits == []


def test_a_change_that_is_stopped_while_it_waits_goes_no_further() -> None:
    time = Time()
    pace = time.pace(0.01)
    time.set()
    assert not pace.goes_on(1, finished=False)


@pytest.mark.parametrize("rate", [0, -1, 0.0001, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(InvalidChoice, match="rate"):
        Pace(rate)
