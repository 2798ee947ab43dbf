from __future__ import annotations

from itertools import groupby

import hypothesis.strategies as st
from hypothesis import given

from eventbus_circuit_breaker.options import Options
from eventbus_circuit_breaker.tally import Tally

OUTCOMES = st.lists(st.sampled_from(["ok", "failed", "uncounted"]), max_size=60)


def play(tally: Tally, outcomes: str | list[str], finished: int = 0, now: float = 0.0) -> int:
    """One call after the other; how many have finished then."""
    names = {"o": "ok", "f": "failed", "u": "uncounted"}
    for outcome in outcomes:
        finished += 1
        if names.get(outcome, outcome) != "ok":
            tally.failed(now, finished, now, counts=names.get(outcome, outcome) == "failed")
    return finished


def test_a_queue_opens_after_so_many_failures_in_a_row() -> None:
    tally = Tally(Options(failures=3), 0, 0.0)
    play(tally, "ofof")
    assert tally.row is None
    play(tally, "ff", finished=4)
    assert tally.row == "3 failures in a row"


def test_one_success_begins_the_row_anew() -> None:
    tally = Tally(Options(failures=3), 0, 0.0)
    play(tally, "ffoff")
    assert tally.row is None


def test_bad_payloads_neither_open_a_queue_nor_hide_that_the_rest_fails() -> None:
    tally = Tally(Options(failures=3), 0, 0.0)
    finished = play(tally, "uuuuff")
    assert tally.row is None
    play(tally, "uuf", finished)
    assert tally.row == "3 failures in a row"


def test_a_threshold_of_one_is_told_as_what_it_is() -> None:
    tally = Tally(Options(failures=1), 0, 0.0)
    play(tally, "f")
    assert tally.row == "a failure"


def test_what_had_finished_before_it_began_to_count_is_no_success() -> None:
    tally = Tally(Options(failures=2), 1_000, 0.0)
    for finished in (1_001, 1_002):
        tally.failed(1.0, finished, 10.0, counts=True)
    assert tally.row


def test_slow_failures_among_quick_successes_are_no_row_although_they_end_together() -> None:
    tally = Tally(Options(failures=3), 0, 0.0)
    tally.look(20, 3.0)
    for finished, began in enumerate((0.5, 1.0, 2.5, 4.0), 21):
        tally.failed(began, finished, 10.0, counts=True)
    assert tally.row is None


@given(OUTCOMES)
def test_a_row_is_as_long_as_the_failures_since_the_last_success(outcomes: list[str]) -> None:
    tally = Tally(Options(failures=4), 0, 0.0)
    finished = 0
    for length, outcome in enumerate(outcomes, 1):
        finished = play(tally, [outcome], finished)
        so_far = [each for each in outcomes[:length] if each != "uncounted"]
        runs = [(kind, len(list(members))) for kind, members in groupby(so_far)]
        if outcome == "failed":
            assert (tally.row is not None) == (runs[-1][1] >= 4)
        assert tally.look(finished, 0.0) == so_far.count("ok")


def test_a_share_of_failures_within_the_window_opens_a_queue_whose_successes_go_on() -> None:
    tally = Tally(Options(failures=100, ratio=0.5, window=60, least_calls=10), 0, 0.0)
    finished = play(tally, "of" * 4)
    assert tally.share(finished, 0) is None
    finished = play(tally, "of", finished)
    assert tally.share(finished, 0) == "5 of 10 calls failed within 60 s"


def test_calls_that_still_run_count_as_good_ones_for_the_share() -> None:
    tally = Tally(Options(failures=100, ratio=0.5, window=60, least_calls=10), 0, 0.0)
    finished = play(tally, "of" * 5)
    assert tally.share(finished, 1) is None


def test_without_a_ratio_no_share_opens_a_queue() -> None:
    tally = Tally(Options(failures=100), 0, 0.0)
    finished = play(tally, "f" * 50)
    assert tally.share(finished, 0) is None


def test_successes_of_yesterday_do_not_hide_that_everything_fails_now() -> None:
    tally = Tally(Options(failures=1_000, ratio=0.5, window=60, least_calls=10), 0, 0.0)
    finished = 100_000
    for second in range(0, 120, 6):
        tally.look(finished, float(second))
    finished = play(tally, "f" * 10, finished, now=120.0)
    assert tally.share(finished, 0) == "10 of 10 calls failed within 60 s"


def test_failures_of_yesterday_count_no_more() -> None:
    tally = Tally(Options(failures=1_000, ratio=0.5, window=60, least_calls=10), 0, 0.0)
    finished = play(tally, "f" * 9)
    for second in range(0, 120, 6):
        tally.look(finished, float(second))
    finished = play(tally, "oooooooof", finished, now=120.0)
    assert tally.share(finished, 0) is None
