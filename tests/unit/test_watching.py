"""What of a claim is kept for plugins, and that counts and times are those of all of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from eventbus.consuming.holdings import Holdings
from eventbus.consuming.outcomes import Group, part_of
from eventbus.consuming.watching import SAMPLE, follow, observe, sample
from eventbus.event import Event
from eventbus.plugins import Timing
from eventbus.transport import DONE, DUPLICATE, MISSING, PARKED, RELEASED, Delivery, Lease, Verdict

FAST, SLOW = 0.0001, 0.5
RETRY = Verdict("retry", error={"type": "ValueError"})
DISCARDED = Verdict("done", kind="discarded")
PUBLISHED = datetime(2030, 1, 1, tzinfo=UTC)


def event() -> Event:
    return Event(
        event_id=str(uuid4()), topic="a", payload="{}", headers=None, key=None, published_at=PUBLISHED, queue="q",
        attempt=1,
    )  # fmt: skip


def claimed(number: int, *, ordered: bool = False) -> tuple[Holdings, list[Delivery]]:
    """A claim of so many events."""
    lease = Lease(1, uuid4(), 0.0, claim_id=7, lo=1, hi=number, unfinished=number, ordered=ordered)
    holdings = Holdings()
    deliveries = [Delivery(event(), lease, seq) for seq in range(1, number + 1)]
    holdings.take(deliveries)
    return holdings, deliveries


def end(holdings: Holdings, delivery: Delivery, verdict: Verdict = DONE, seconds: float = FAST) -> None:
    delivery.began, delivery.spent = 100.0, seconds
    holdings.finish(delivery, verdict)


def group(*leases: Lease) -> Group:
    return Group("q", [part for lease in leases if (part := part_of(lease)) is not None])


def calls(timings: list[Timing], chosen: Callable[[Timing], bool] = lambda _: True) -> int:
    return sum(timing.calls for timing in timings if chosen(timing))


@pytest.mark.parametrize("number", [1, 7, 2 * SAMPLE - 1, 2 * SAMPLE, 1_037])
def test_times_stand_for_every_call_and_slow_ones_for_themselves(number: int) -> None:
    holdings, deliveries = claimed(number)
    sample(deliveries)
    for n, delivery in enumerate(deliveries):
        end(holdings, delivery, seconds=SLOW if n % 50 == 3 else FAST)
    counted = group(deliveries[0].lease)
    slow = sum(n % 50 == 3 for n in range(number))
    timings = list(counted.timings)
    assert counted.counts == {"done": number}
    assert (counted.calls, counted.failures) == (number, 0)
    assert calls(timings, lambda timing: timing.seconds == SLOW) == slow
    assert calls(timings, lambda timing: timing.seconds == FAST) == number - slow
    assert all(timing.calls == 1 for timing in timings if timing.seconds == SLOW)
    assert len(timings) < 2 * SAMPLE + slow
    assert {timing.published_at for timing in timings} == {PUBLISHED}


def test_a_claim_that_is_only_counted_does_not_keep_its_deliveries() -> None:
    holdings, deliveries = claimed(5_000)
    sample(deliveries)
    for delivery in deliveries:
        end(holdings, delivery)
    lease = deliveries[0].lease
    assert len(lease.sample) + len(lease.kept) + len(lease.observed) <= 2 * SAMPLE


@pytest.mark.parametrize("number", [20, 1_000])
def test_every_outcome_is_counted_and_only_calls_have_times(number: int) -> None:
    holdings, deliveries = claimed(number)
    sample(deliveries)
    odd = [RETRY, Verdict("dead"), DISCARDED, DUPLICATE, RELEASED, MISSING, PARKED, Verdict("deferred"),
           Verdict("deferred", error={"type": "ValueError"})]  # fmt: skip
    for delivery in deliveries:
        end(holdings, delivery, odd[delivery.seq - 1] if delivery.seq <= len(odd) else DONE)
    counted = group(deliveries[0].lease)
    assert counted.counts == {
        "done": number - len(odd), "retry": 1, "dead": 2, "discarded": 1, "duplicate": 1, "released": 1, "parked": 1,
        "deferred": 2,
    }  # fmt: skip
    assert counted.failures == 4  # the missing event is a dead letter
    assert counted.calls == calls(list(counted.timings)) == number - len(odd) + 3


@pytest.mark.parametrize("number", [20, 1_000])
def test_what_is_recorded_while_the_claim_stays_open_is_told_once(number: int) -> None:
    holdings, deliveries = claimed(number)
    lease = deliveries[0].lease
    sample(deliveries)
    last = number // 3
    for delivery in deliveries[:last]:
        end(holdings, delivery, RETRY if delivery.seq == 2 else DONE, SLOW if delivery.seq == 3 else FAST)
    first = group(lease)
    lease.recorded.update(lease.done, (seq for seq, _ in lease.verdicts))  # as the engine does
    lease.done, lease.verdicts = [], []
    for delivery in deliveries[last:]:
        end(holdings, delivery)
    second = group(lease)
    assert (first.counts, second.counts) == ({"done": last - 1, "retry": 1}, {"done": number - last})
    assert (calls(list(first.timings)), calls(list(second.timings))) == (last, number - last)
    assert calls(list(first.timings), lambda timing: timing.seconds == SLOW) == 1
    assert calls(list(second.timings), lambda timing: timing.seconds == SLOW) == 0


@pytest.mark.parametrize("number", [1, 20, 1_000])
def test_where_single_results_are_wanted_there_is_one_for_each_delivery_beside_the_sample(number: int) -> None:
    holdings, deliveries = claimed(number)
    observe(deliveries)
    sample(deliveries)
    for delivery in deliveries:
        end(holdings, delivery)
    settled = group(deliveries[0].lease)
    assert [result.event for result in settled.results] == [delivery.event for delivery in deliveries]
    assert calls(list(settled.timings)) == number


def test_events_of_a_key_are_watched_with_those_before_them_and_after_their_lease_was_taken_apart() -> None:
    holdings, deliveries = claimed(3, ordered=True)
    first, second, third = deliveries
    first.following, second.following = second, third
    observe([first])
    sample([first])
    end(holdings, first)
    second.lease = Lease(1, uuid4(), 0.0, exception_id=9, ordered=True, unfinished=1)
    follow(first.lease, second)
    end(holdings, second)
    assert [result.event for result in group(second.lease).results] == [second.event]
    assert list(group(second.lease).timings) == [Timing(None, 100.0, FAST)]
    assert list(group(first.lease).timings) == [Timing(PUBLISHED, 100.0, FAST)]


def test_of_a_claim_that_nobody_wants_to_know_of_nothing_is_told() -> None:
    holdings, deliveries = claimed(3)
    for delivery in deliveries:
        end(holdings, delivery)
    assert part_of(deliveries[0].lease) is None
