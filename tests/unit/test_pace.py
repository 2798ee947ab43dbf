"""How far ahead a queue is claimed: enough to keep its handlers busy, no more than a crash may repeat."""

from __future__ import annotations

from eventbus.consuming.pace import Pace


def settled_pace(slots: int, prefetch: int, rate: float) -> Pace:
    """A queue whose handlers have finished ``rate`` deliveries a second for a second."""
    pace = Pace(slots, prefetch, now=0.0)
    for step in range(1, 11):
        for _ in range(int(rate / 10)):
            pace.finished()
        pace.room(waiting=0, running=slots, now=step / 10)
    return pace


def test_a_queue_that_was_never_measured_takes_one_event_per_slot_and_one_ahead() -> None:
    assert Pace(slots=10, prefetch=2_000, now=0.0).room(waiting=0, running=0, now=0.0) == 11


def test_slow_handlers_do_not_hoard_events_that_idle_peers_could_handle() -> None:
    pace = settled_pace(slots=4, prefetch=2_000, rate=0)
    assert pace.room(waiting=0, running=4, now=1.01) == 1
    assert pace.room(waiting=1, running=4, now=1.02) == 0
    assert pace.room(waiting=0, running=2, now=1.03) == 3


def test_fast_handlers_get_what_they_finish_in_half_a_second() -> None:
    pace = settled_pace(slots=10, prefetch=5_000, rate=2_000)
    assert pace.room(waiting=0, running=10, now=1.01) == 1_000
    assert pace.room(waiting=400, running=10, now=1.02) == 600


def test_handlers_are_never_fast_enough_for_more_than_the_prefetch() -> None:
    pace = settled_pace(slots=10, prefetch=700, rate=50_000)
    assert pace.room(waiting=0, running=0, now=1.01) == 700
    assert pace.room(waiting=200, running=0, now=1.02) == 500


def test_nothing_is_claimed_while_more_than_half_of_what_may_wait_is_still_there() -> None:
    pace = settled_pace(slots=10, prefetch=5_000, rate=2_000)
    assert pace.room(waiting=501, running=10, now=1.01) == 0
    assert pace.refill == 500
    assert pace.room(waiting=500, running=10, now=1.02) == 500


def test_a_queue_that_slows_down_stops_claiming_far_ahead_within_half_a_second() -> None:
    pace = settled_pace(slots=1, prefetch=5_000, rate=2_000)
    for step in range(1, 11):
        pace.room(waiting=0, running=1, now=1 + step * 0.05)
    assert pace.room(waiting=0, running=1, now=1.51) < 10


def test_a_burst_that_is_over_before_it_was_measured_still_tells_how_fast_the_handlers_are() -> None:
    pace = Pace(slots=10, prefetch=5_000, now=0.0)
    for _ in range(20):
        pace.finished()
    assert pace.room(waiting=0, running=0, now=0.01) == 1_010
