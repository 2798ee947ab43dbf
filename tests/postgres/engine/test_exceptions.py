"""Deliveries that left the happy path: see "Exceptions" in docs/storage-engine.md."""

from __future__ import annotations

from uuid import UUID

from tests.postgres.engine.driver import MEBIBYTE, Engine, Row
from tests.postgres.engine.sessions import NewSession, open_transaction


def retried(bus: Engine, worker: UUID, count: int = 1, delay: float = 0) -> None:
    """``count`` deliveries that wait for their first retry."""
    bus.publish_many(count)
    bus.relay()
    claim = bus.claimed(worker, 1, count)
    said = [{"seq": seq, "outcome": "retry", "delay": delay, "error": {"attempt": 1}} for seq in claim.seqs]
    bus.settle(claim, outcomes={claim.id: said})


def released(bus: Engine, worker: UUID, count: int, size: int = 2) -> list[str]:
    """A range of ``count`` deliveries that never started; the ids of its events."""
    bus.publish_many(count, size=size)
    bus.relay()
    claim = bus.claim(worker, 1, count, max_bytes=1024 * MEBIBYTE)
    assert claim is not None
    bus.settle(claim, outcomes={claim.id: [{"seq": claim.lo, "hi": claim.hi, "outcome": "released"}]})
    return [str(event_id) for event_id in claim.event_ids]


def rows(bus: Engine) -> list[Row]:
    """(first, last, state) of every exception."""
    return bus.rows("SELECT seq, coalesce(range_hi, seq), state FROM {bus}.exceptions ORDER BY seq")


def next_due(bus: Engine, worker: UUID, limit: int = 0) -> Row:
    """(due_in, crashed_in) as ``claim_due`` tells of queue 1, claiming at most ``limit``."""
    [row] = bus.rows(
        "SELECT due_in, crashed_in"
        " FROM {bus}.claim_due(%s, gen_random_uuid(), '{1}', ARRAY[%s], '{-infinity}', 1, false)"
        " WHERE exception_id IS NULL",
        worker,
        limit,
    )
    return row


def test_a_retry_comes_when_it_is_due_and_not_before(bus: Engine) -> None:
    worker = bus.register()
    retried(bus, worker, delay=3600)
    assert bus.claim_due(worker, 1) == []
    due_in, crashed_in = next_due(bus, worker)
    assert 3590 < due_in <= 3600
    assert crashed_in is None
    bus.rows("UPDATE {bus}.exceptions SET due_at = clock_timestamp()")
    [held] = bus.claim_due(worker, 1)
    assert (held.attempts, held.crashes) == (1, 0)


def test_only_failures_count_as_attempts(bus: Engine) -> None:
    worker = bus.register()
    retried(bus, worker)
    for outcome, attempts in (("released", 1), ("retry", 1), ("released", 2), ("retry", 2), ("retry", 3)):
        [held] = bus.claim_due(worker, 1)
        assert held.attempts == attempts
        assert bus.settle_due([held], outcome, delay=0, error={"attempt": attempts + 1}) == {held.id}
    assert bus.rows("SELECT attempts, first_error, last_error FROM {bus}.exceptions") == [
        (4, {"attempt": 1}, {"attempt": 4})
    ]


def test_a_delivery_that_gives_up_keeps_its_whole_event_its_attempts_and_both_errors(bus: Engine) -> None:
    worker = bus.register()
    retried(bus, worker)
    held = bus.claim_due(worker, 1)
    assert len(bus.settle_due(held, "dead", reason="5 attempts", error={"attempt": 2})) == 1
    assert rows(bus) == []
    assert bus.rows("SELECT attempts, reason, first_error, last_error, topic, payload FROM {bus}.dead_letters") == [
        (2, "5 attempts", {"attempt": 1}, {"attempt": 2}, "orders.created", {})
    ]


def test_a_delivery_that_succeeds_at_last_is_gone(bus: Engine) -> None:
    worker = bus.register()
    retried(bus, worker, 3)
    held = bus.claim_due(worker, 1)
    assert bus.settle_due(held, "done") == {one.id for one in held}
    assert rows(bus) == bus.rows("SELECT 1 FROM {bus}.dead_letters") == []


def test_a_worker_that_lost_a_retry_settles_nothing_of_its_next_owner(bus: Engine) -> None:
    zombie, worker = bus.register(), bus.register()
    retried(bus, zombie)
    lost = bus.claim_due(zombie, 1)
    bus.fall_silent(zombie)
    assert bus.take_over(worker) == (1, 1)
    assert bus.settle_due(lost, "dead", reason="late") == set()
    [held] = bus.claim_due(worker, 1)
    assert (held.id, held.attempts, held.crashes) == (lost[0].id, 1, 1)
    assert bus.settle_due(lost, "done") == set()
    assert bus.settle_due([held], "done") == {held.id}


def test_two_workers_never_get_the_same_retry(bus: Engine, session: NewSession) -> None:
    first, second, other = bus.register(), bus.register(), session()
    retried(bus, first, 3)
    with open_transaction(other):
        taken = other.claim_due(first, 1, 2)
        rest = bus.claim_due(second, 1)
    assert len(taken) == 2
    assert len(rest) == 1
    assert len({one.event_id for one in taken + rest}) == 3


def test_a_released_range_is_taken_apart_without_losing_or_repeating_a_delivery(bus: Engine) -> None:
    worker = bus.register()
    events = released(bus, worker, 10)
    assert rows(bus) == [(1, 10, "waiting")]
    assert [one.event_id for one in bus.claim_due(worker, 1, 4)] == events[:4]
    assert rows(bus) == [(1, 1, "claimed"), (2, 2, "claimed"), (3, 3, "claimed"), (4, 4, "claimed"), (5, 10, "waiting")]
    assert [one.event_id for one in bus.claim_due(worker, 1)] == events[4:]
    assert bus.claim_due(worker, 1) == []


def test_a_released_range_that_two_workers_take_apart_at_once_is_handled_once(bus: Engine, session: NewSession) -> None:
    first, second, other = bus.register(), bus.register(), session()
    events = released(bus, first, 10)
    with open_transaction(other):
        taken = other.claim_due(first, 1, 4)
        assert bus.claim_due(second, 1) == []
        due_in, _ = next_due(bus, second)
        assert due_in <= 0  # which says: ask again
    rest = bus.claim_due(second, 1)
    assert [one.event_id for one in taken + rest] == events


def test_a_worker_that_dies_with_a_part_of_a_released_range_loses_no_part_of_it(bus: Engine) -> None:
    dead, worker = bus.register(), bus.register()
    events = released(bus, dead, 6)
    bus.claim_due(dead, 1, 2)
    bus.fall_silent(dead)
    bus.take_over(worker)
    assert {one.event_id for one in bus.claim_due(worker, 1)} == set(events)


def test_what_does_not_fit_into_the_memory_granted_waits_and_is_not_held_by_a_worker_that_never_got_it(
    bus: Engine,
) -> None:
    worker = bus.register()
    events = released(bus, worker, 4, size=3 * MEBIBYTE)
    assert [one.event_id for one in bus.claim_due(worker, 1)] == events[:2]
    assert [row[2] for row in rows(bus)] == ["claimed", "claimed", "waiting", "waiting"]
    assert [one.event_id for one in bus.claim_due(worker, 1)] == events[2:]


def test_a_retry_that_is_larger_than_the_memory_granted_is_claimed_alone_and_not_stuck(bus: Engine) -> None:
    worker = bus.register()
    events = released(bus, worker, 2, size=20 * MEBIBYTE)
    assert [one.event_id for one in bus.claim_due(worker, 1)] == events[:1]
    assert [one.event_id for one in bus.claim_due(worker, 1)] == events[1:]


def test_a_retry_whose_event_the_outbox_no_longer_has_is_reported_and_not_skipped(bus: Engine) -> None:
    worker = bus.register()
    retried(bus, worker)
    bus.rows("DELETE FROM {bus}.outbox")
    held = bus.claim_due(worker, 1)
    assert [one.event_id for one in held] == [None]
    assert len(bus.settle_due(held, "dead", reason="event missing")) == 1
    assert bus.column("SELECT reason FROM {bus}.dead_letters") == ["event missing"]


def test_a_scheduled_event_becomes_an_event_when_it_is_due_and_only_once(bus: Engine, session: NewSession) -> None:
    bus.rows("SELECT {bus}.publish('orders.created', '{}', delay => interval '1 hour')")
    soon = bus.column("SELECT {bus}.publish('orders.created', '{}', delay => interval '0') FROM generate_series(1, 3)")
    assert (bus.tick().due_in or 0) < 0
    other = session()
    fire = "SELECT fired FROM {bus}.fire_due(%s, '-infinity')"
    with open_transaction(other):
        assert other.value(fire, 2) == 2
        assert bus.value(fire, 100) == 1
    assert bus.value(fire, 100) == 0
    bus.relay()
    assert sorted(bus.delivered(1)) == sorted(map(str, soon))
    assert 3590 < (bus.tick().due_in or 0) <= 3600
