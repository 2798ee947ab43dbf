"""A delivery that must run alone waits for its turn without holding up the process for good."""

from __future__ import annotations

from eventbus.consuming.solitude import Solitude


def test_what_runs_for_a_moment_is_waited_for() -> None:
    solitude = Solitude()
    assert solitude.worth_waiting(100.0)
    assert solitude.worth_waiting(100.9)
    assert solitude.not_before <= 100.9


def test_a_handler_that_lasts_costs_the_process_a_tenth_of_its_time_at_most() -> None:
    solitude, now = Solitude(), 100.0
    waits = []
    for _ in range(9):
        began = now
        while solitude.worth_waiting(now):
            now += 0.25
        waits.append(now - began)
        assert solitude.not_before - now == 10 * waits[-1]
        now = solitude.not_before
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_once_it_had_its_turn_the_next_one_starts_with_a_short_wait_again() -> None:
    solitude = Solitude()
    assert solitude.worth_waiting(100.0)
    assert not solitude.worth_waiting(101.0)
    solitude.reached()
    assert solitude.worth_waiting(200.0)
    assert not solitude.worth_waiting(201.0)
