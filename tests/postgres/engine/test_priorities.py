"""Prioritized queues: what is urgent goes first, whatever way it took, and nothing else waits for ever."""

from __future__ import annotations

import pytest

from tests.postgres.engine.driver import Engine

LEVELS = 3


@pytest.fixture
def queue(bus: Engine) -> int:
    """A queue with three levels: 0 to 3, 4 to 6, 7 to 9."""
    return bus.declare_queue("urgent", kind="prioritized", lanes=LEVELS)


def publish(bus: Engine, **priorities: int) -> None:
    for label, priority in priorities.items():
        bus.publish(payload=f'"{label}"', priority=priority)
    bus.relay()


def claimed(bus: Engine, queue: int, limit: int = 100) -> list[str]:
    """What one claim gets, in its order; all of it is done."""
    claims, _ = bus.claim_any(bus.register(), {queue: limit})
    bus.settle(*claims)
    return [payload for claim in claims for payload in claim.payloads]


def due(bus: Engine, queue: int, limit: int = 100) -> list[str]:
    return [held.payload for held in bus.claim_due(bus.register(), queue, limit)]


def test_what_is_urgent_overtakes_what_was_published_before(bus: Engine, queue: int) -> None:
    publish(bus, low=0, middle=5, high=9)
    assert claimed(bus, queue, 1) == ["high"]
    publish(bus, late=8)
    assert claimed(bus, queue, 2) == ["late", "middle"]
    assert claimed(bus, queue) == ["low"]


def test_priorities_of_one_level_keep_the_order_of_their_publishing(bus: Engine, queue: int) -> None:
    publish(bus, a=7, b=9, c=8, d=7)
    assert claimed(bus, queue) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("lanes", [2, 3, 5, 10])
def test_every_priority_has_a_level_and_higher_ones_are_never_below_lower_ones(bus: Engine, lanes: int) -> None:
    queue = bus.declare_queue("levels", kind="prioritized", lanes=lanes)
    publish(bus, **{f"p{priority}": priority for priority in range(10)})
    by_level = bus.rows(
        "SELECT d.lane, o.priority FROM {bus}.deliveries d JOIN {bus}.outbox o ON o.id = d.outbox_id"
        " WHERE d.queue_id = %s ORDER BY o.priority DESC",
        queue,
    )
    found = [lane for lane, _ in by_level]
    assert found == sorted(found)
    assert set(found) == set(range(lanes))


def test_events_that_are_published_in_bulk_have_their_priorities(bus: Engine, queue: int) -> None:
    bus.rows(
        "INSERT INTO {bus}.outbox (event_id, topic, payload, size, priority)"
        " SELECT gen_random_uuid(), 'orders.created', to_json('p' || n), 2, n FROM generate_series(0, 9) n"
    )
    bus.relay()
    assert claimed(bus, queue) == ["p7", "p8", "p9", "p4", "p5", "p6", "p0", "p1", "p2", "p3"]


def test_a_delayed_event_is_as_urgent_as_it_was_published(bus: Engine, queue: int) -> None:
    publish(bus, low=0)
    bus.publish(payload='"delayed"', priority=9, delay="0 s")
    bus.rows("SELECT {bus}.fire_due(10, '-infinity')")
    bus.relay()
    assert claimed(bus, queue) == ["delayed", "low"]


def test_what_is_urgent_is_retried_first(bus: Engine, queue: int) -> None:
    publish(bus, low=0, middle=5, high=9)
    claims, _ = bus.claim_any(bus.register(), {queue: 100})
    for claim in reversed(claims):
        bus.settle(claim, outcomes={claim.id: [{"seq": claim.lo, "outcome": "retry", "delay": 0}]})
    assert due(bus, queue, 1) == ["high"]
    assert due(bus, queue) == ["middle", "low"]


def test_what_is_urgent_and_was_released_or_redriven_goes_first(bus: Engine, queue: int) -> None:
    publish(bus, low=0, middle=5, high=9)
    claims, _ = bus.claim_any(bus.register(), {queue: 100})
    for claim, outcome in zip(claims, ("dead", "released", "released"), strict=True):
        said = {"seq": claim.lo, "outcome": outcome, "reason": "x"}
        bus.settle(claim, outcomes={claim.id: [said]})
    bus.rows("SELECT {bus}.redrive(ARRAY(SELECT id FROM {bus}.dead_letters))")
    assert due(bus, queue, 2) == ["high", "middle"]
    assert due(bus, queue) == ["low"]


def test_several_claim_from_one_level_and_from_the_next_without_waiting(bus: Engine, queue: int) -> None:
    publish(bus, a=9, b=9, c=0)
    first, second = bus.register(), bus.register()
    one = bus.claimed(first, queue, 1)
    claims, more = bus.claim_any(second, {queue: 10})
    assert [claim.payloads for claim in claims] == [["b"], ["c"]]
    assert more == {}
    assert one.payloads == ["a"]


def test_the_level_that_is_left_over_is_reported_and_not_forgotten(bus: Engine, queue: int) -> None:
    publish(bus, a=9, b=0)
    claims, more = bus.claim_any(bus.register(), {queue: 1})
    assert ([claim.payloads for claim in claims], more) == ([["a"]], {queue: 1})


@pytest.mark.parametrize("lanes", [2, 3, 10])
def test_with_urgent_events_without_end_every_level_is_served_once_in_ten_claims_times_levels(
    bus: Engine, lanes: int
) -> None:
    queue = bus.declare_queue("levels", kind="prioritized", lanes=lanes)
    for priority in range(10):
        bus.rows(
            "INSERT INTO {bus}.outbox (event_id, topic, payload, size, priority)"
            " SELECT gen_random_uuid(), 'orders.created', '1', 2, %s FROM generate_series(1, 300)",
            priority,
        )
    bus.relay(5000)
    worker, round_ = bus.register(), 10 * (lanes - 1)
    served = []
    for turn in range(2 * round_):
        claim = bus.claimed(worker, queue, 1, turn)
        served.append(claim.lane)
        bus.settle(claim)
    for start in range(round_ + 1):
        assert set(served[start : start + round_]) == set(range(lanes)), f"from claim {start}"
    assert served.count(0) == len(served) * 9 // 10, "what is urgent does not go first"


@pytest.mark.parametrize("lanes", [2, 3, 10])
def test_the_same_holds_for_retries(bus: Engine, lanes: int) -> None:
    queue = bus.declare_queue("levels", kind="prioritized", lanes=lanes)
    bus.rows(
        "INSERT INTO {bus}.exceptions (due_at, seq, outbox_id, queue_id, lane)"
        " SELECT clock_timestamp(), n, lane * 1000 + n, %s, lane"
        " FROM generate_series(0, %s) lane, generate_series(1, 300) n",
        queue,
        lanes - 1,
    )
    worker, round_ = bus.register(), 10 * (lanes - 1)
    served = []
    for turn in range(2 * round_):
        [held] = bus.claim_due(worker, queue, 1, turn=turn)
        served.append(bus.value("SELECT lane FROM {bus}.exceptions WHERE id = %s", held.id))
        bus.settle_due([held], "done")
    for start in range(round_ + 1):
        assert set(served[start : start + round_]) == set(range(lanes)), f"from claim {start}"
    assert served.count(0) == len(served) * 9 // 10
